"""One step of the user's module on one rank of a pipeline: what each action of a schedule computes.

Before the schedule starts, the user's step is called for each microbatch up to its call of the
core, whose arguments every stage needs. On the last stage the step then runs whole, from inside
the schedule: its loss, its logs and its outputs are the user's own code. The other stages call the
core with the arguments that were caught.
"""

# Shapes.  B sequences   s tokens of a sequence on this rank   D model width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fold_kernels.weight_store import WeightStore
from lightning_fold.model.fold import FoldedModel
from lightning_fold.model.passage import StageOutput
from lightning_fold.model.structure import SLICED_OUTPUTS
from lightning_fold.moe import balance
from lightning_fold.moe.tokens import repeating
from lightning_fold.pipeline.executor import Border
from lightning_fold.pipeline.segments import LayerCall
from lightning_fold.pipeline.stage import StageRunner
from lightning_fold.pipeline.tape import Context, Steps
from lightning_fold.pipeline.woven import Weaving
from lightning_fold.steps.logs import MicrobatchLogs
from lightning_fold.steps.microbatches import Pieces, fresh
from lightning_fold.steps.randomness import Generators, draw_seed, seed_stage
from lightning_fold.steps.woven import Around, StageCalls, StagePass, stage_steps

PROTOCOL = (
    "call the core once, and use nothing of it but what the call returns; or the module has "
    "`pipeline_forward(batch)`, which does that and returns the output, and "
    "`pipeline_loss(output, batch)`, which makes the loss of it (docs/pipelines.md)"
)

# Of errors where a part of the core is called alone: its weights are shards, or not on this rank.
_IN_PARTS = ("DTensor", "belongs to another pipeline stage")


class _Caught(BaseException):
    """Ends the user's step at its call of the core.

    Not an `Exception`: the step must not swallow it.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.call = args, kwargs


@dataclass
class CoreGate:
    """Stands before the core: catches its arguments, or seeds and counts a call that counts.

    Attributes:
        catches: Whether a call ends here.
        seed: Of the microbatch that runs; None outside of a step, where no call is possible.
        stage: The stage that runs.
        calls: Calls of the core since the microbatch began.
        output: What the core returned last.
        refuse: Makes the error of a call too many.
    """

    catches: bool = False
    seed: int | None = None
    stage: int = 0
    calls: int = 0
    output: Any = None
    refuse: Callable[[str], Exception] = RuntimeError

    def install(self, core: nn.Module) -> None:
        """Hook `core`; the first of all its hooks."""
        core.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        core.register_forward_hook(self._leave)

    def _enter(self, core: nn.Module, args: Any, kwargs: Any) -> None:
        if self.catches:
            raise _Caught(args, kwargs)
        if self.seed is None:
            raise RuntimeError(
                "under pipeline_parallel_size > 1 no rank has the whole model: it is called from "
                "training_step, validation_step, test_step and predict_step only, once in each"
            )
        if self.calls:
            raise self.refuse("calls it more than once")
        self.calls += 1
        seed_stage(self.seed, self.stage)

    def _leave(self, core: nn.Module, args: Any, output: Any) -> None:
        self.output = output


@dataclass(frozen=True)
class StepContext:
    """What all steps of a run share.

    Attributes:
        module: The user's module.
        folded: Its folded model.
        stages: Runs the stages of this rank.
        gate: Stands before the core.
        logs: Records what microbatches log.
        forward_context: Lightning's precision context of a step's forward, by its name.
        scale: Turns a microbatch's share of the loss into the root of its backward.
        weaving: Stages that run in pieces; None where none does.
    """

    module: LightningModule
    folded: FoldedModel
    stages: StageRunner
    gate: CoreGate
    logs: MicrobatchLogs
    forward_context: Callable[[str], AbstractContextManager[Any]]
    scale: Callable[[Tensor], Tensor]
    weaving: Weaving | None = None


@dataclass
class UserStep:
    """One call of `training_step` or another step, as the actions of a schedule.

    Attributes:
        context: What it shares with other steps.
        name: Of the user's method.
        pieces: Its microbatches.
        rest: Further arguments of the method.
        train: Whether it has a backward.
        outputs: What the method returned for each microbatch, on the last stage.
    """

    context: StepContext
    name: str
    pieces: Pieces
    rest: Sequence[Any]
    train: bool
    outputs: dict[int, Any] = field(default_factory=dict)

    # Before the schedule.

    def catch(self) -> None:
        """Call the user's step for each microbatch, up to the core. Local."""
        gate = self.context.gate
        self._starts: list[Generators] = []
        self._calls: list[tuple[Any, Any]] = []
        self._seeds: list[int] = []
        with self.context.logs.muted():
            for batch in self.pieces.batches:
                self._starts.append(Generators.now())
                gate.catches = True
                try:
                    self._method(fresh(batch), *self.rest)
                except _Caught as caught:
                    self._calls.append(caught.call)
                except RuntimeError as error:
                    if any(word in str(error) for word in _IN_PARTS):
                        raise self._refuse("calls parts of it") from error
                    raise
                else:
                    raise self._refuse("does not call it")
                finally:
                    gate.catches = False
                self._seeds.append(draw_seed())
        self._after = Generators.now()
        core, watch = self.context.folded.parts.core, self.context.folded.watch
        self._layouts = [watch.layouts_of(core, *call) for call in self._calls]
        for (_, kwargs), (layout, _) in zip(self._calls, self._layouts, strict=True):
            self._check_call(kwargs, has_layout=layout is not None)

    def finish(self) -> None:
        """Leave the generators where every rank of the pipeline leaves them."""
        self._after.restore()

    @property
    def _method(self) -> Callable[..., Any]:
        module: Any = self.context.module
        if self.train and hasattr(module, "pipeline_forward"):
            return lambda batch, *rest: module.pipeline_loss(module.pipeline_forward(batch), batch)
        method: Callable[..., Any] = getattr(module, self.name)
        return method

    def _check_call(self, kwargs: Any, *, has_layout: bool) -> None:
        for name in SLICED_OUTPUTS:
            if kwargs.get(name):
                raise self._refuse(f"asks it for `{name}`, and no stage has that of all layers")
        if kwargs.get("num_items_in_batch") is not None:
            raise self._refuse(
                "gives it `num_items_in_batch`, and microbatches are weighed by their targets"
            )
        if kwargs.get("past_key_values") is not None:
            raise self._refuse("gives it `past_key_values`, as generation does token by token")
        if not has_layout:
            raise self._refuse("gives it neither `input_ids` nor `inputs_embeds` [B, S, ...]")

    def _refuse(self, what: str) -> ValueError:
        name = type(self.context.module).__name__
        return ValueError(
            f"{name}.{self.name} {what} (`self.{self.context.folded.parts.core_name}`). Under "
            f"pipeline_parallel_size > 1 a step has to {PROTOCOL}.  Change the step, or "
            "`pipeline_parallel_size` to 1."
        )

    # What the actions compute.

    def border(self, stage: int, microbatch: int) -> Border:
        """What comes into `stage`."""
        stages, folded = self.context.stages, self.context.folded
        attention, moe = self._layouts[microbatch]
        layout = attention if stages.is_above_layers(stage) else moe
        assert layout is not None, "checked before the step"
        loads, kinds = 0, stages.upstream[stage]
        if folded.balance is not None and folded.balance.makes_losses(folded.parts.core):
            loads = sum(balance.packed_sizes(kinds, layout.num_sequences))
        shape = (layout.num_sequences, layout.places_s.shape[0], stages.width)
        return Border(shape, stages.dtype, loads, balance.PACKED)

    def forward(
        self, stage: int, microbatch: int, hidden: Tensor | None, loads: Tensor | None
    ) -> StageOutput | Tensor | None:
        """Run a stage."""
        stages = self.context.stages
        if stages.is_empty(stage):
            assert hidden is not None
            passed = None if loads is None else loads.view_as(loads)
            return StageOutput(hidden.view_as(hidden), passed)
        precision = self.context.forward_context(self.name)
        with self._open(stage, microbatch), precision, stages.entered(stage, hidden, loads):
            is_last = stages.is_last(stage)
            return self._last(microbatch) if is_last else self._call_core(microbatch)

    def weaves(self, stage: int) -> bool:
        """Whether a stage runs in pieces."""
        weaving = self.context.weaving
        return weaving is not None and stage in weaving.stages

    def steps(
        self,
        stage: int,
        microbatch: int,
        inputs: tuple[Tensor, ...],
        *,
        clock: Context,
        store: WeightStore | None,
    ) -> Steps[StagePass]:
        """Run a stage in pieces, as a pass of `pipeline.tape`."""
        context, weaving = self.context, self.context.weaving
        assert weaving is not None, "a stage is woven"
        watch = context.folded.watch
        precision = partial(context.forward_context, self.name)
        around = Around(watch, precision, store, is_random=weaving.is_random)
        calls = StageCalls(
            before=partial(self._before, stage, microbatch),
            behind=partial(self._behind, stage, microbatch)
            if context.stages.is_last(stage)
            else None,
            balance=context.folded.balance,
            core=context.folded.parts.core,
        )
        return stage_steps(stage, weaving, calls, around, watch=watch, inputs=inputs, clock=clock)

    def _before(
        self, stage: int, m: int, hidden: Tensor | None, loads: Tensor | None
    ) -> tuple[Tensor, list[LayerCall]]:
        stages = self.context.stages
        with self._open(stage, m), stages.entered(stage, hidden, loads, "before"):
            out = self._call_core(m)
            return out.hidden, stages.passage.calls

    def _behind(self, stage: int, m: int, hidden: Tensor, loads: Tensor | None) -> Tensor:
        stages = self.context.stages
        # `_before` has called the core for this forward.
        with self._open(stage, m), repeating(), stages.entered(stage, hidden, loads, "behind"):
            root = self._last(m)
            assert root is not None, "evaluation is not woven"
            return root

    @contextmanager
    def _open(self, stage: int, m: int) -> Iterator[None]:
        """Let the core be called once, for a microbatch on a stage."""
        gate = self.context.gate
        gate.seed, gate.stage, gate.calls = self._seeds[m], stage, 0
        gate.refuse = self._refuse
        self._set_share(m)
        try:
            yield
        finally:
            gate.seed = gate.output = None

    def _call_core(self, m: int) -> StageOutput:
        args, kwargs = self._calls[m]
        out: StageOutput = self.context.folded.parts.core(*args, **kwargs)
        return out

    def _last(self, m: int) -> Tensor | None:
        self._starts[m].restore()
        weight = self.pieces.weights[m]
        with self.context.logs.microbatch(weight=weight):
            out = self._method(fresh(self.pieces.batches[m]), *self.rest)
        if not self.context.gate.calls:
            raise self._refuse("does not call it")
        self.outputs[m] = out
        if not self.train:
            return None
        loss = loss_of(out)
        if loss is None:
            raise self._refuse("returns no loss")
        # Kept without its graph, which a dictionary of the user's would keep with it.
        self.outputs[m] = loss.detach()
        return self.context.scale(loss * weight) if weight > 0 else self._nothing(loss)

    def _nothing(self, loss: Tensor) -> Tensor:
        """A zero with a graph, for a microbatch without targets, whose mean is over nothing.

        Its backward runs all the same: experts of other ranks wait for it.
        """
        outputs = [
            x
            for x in tree_leaves(self.context.gate.output)
            if isinstance(x, Tensor) and x.requires_grad and x.dim() > 0
        ]
        return outputs[0].sum() * 0 if outputs else loss.nan_to_num() * 0

    def _set_share(self, m: int) -> None:
        keeper = self.context.folded.balance
        if keeper is not None:
            rows, weight = self.pieces.rows, self.pieces.weights[m]
            keeper.sequence_share = rows[m] / sum(rows) / weight if weight > 0 else 1.0

    def loss(self) -> Tensor:
        """Weighted mean over the microbatches, on the last stage."""
        pairs = [(self.outputs[m], w) for m, w in enumerate(self.pieces.weights) if w > 0]
        total = torch.stack([loss.double() * weight for loss, weight in pairs]).sum()
        return total.to(pairs[0][0].dtype)


def loss_of(out: Any) -> Tensor | None:
    """The loss in what a training step returned."""
    loss = out.get("loss") if isinstance(out, dict) else out
    return loss if isinstance(loss, Tensor) else None
