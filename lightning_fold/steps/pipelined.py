"""The steps of a strategy with pipelines: set-up of the stages, and each batch through a schedule.

Owns what Lightning sees of it: the loss on every rank, logs, hooks, one reduction of the gradients
a batch. The schedule is `pipeline.executor`'s, the user's step `step.UserStep`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor, nn

from lightning_fold import params
from lightning_fold.config import FoldedConfig
from lightning_fold.model.fold import FoldedModel
from lightning_fold.model.inspect import ModelParts
from lightning_fold.model.routers import Router
from lightning_fold.model.structure import DecoderParts
from lightning_fold.params.sentinel import Sentinel
from lightning_fold.pipeline.costs import costs_of
from lightning_fold.pipeline.cut import CutModel, cut
from lightning_fold.pipeline.executor import Executor
from lightning_fold.pipeline.layout import Layout, even_layout, parse_layout
from lightning_fold.pipeline.placement import Placement
from lightning_fold.pipeline.probe import probe
from lightning_fold.pipeline.schedules import Plan, actions_of
from lightning_fold.pipeline.short import actions_of_few, is_too_few, nearest_count
from lightning_fold.pipeline.woven import Weaving, WeavingPlan, plan_weaving
from lightning_fold.steps.closure import check_module, fire_backward_hooks, install_closure
from lightning_fold.steps.joined import joined
from lightning_fold.steps.logs import MicrobatchLogs
from lightning_fold.steps.microbatches import Pieces, fingerprint, rows_of, split, weighed
from lightning_fold.steps.mirror import Mirror, Spec
from lightning_fold.steps.step import CoreGate, StepContext, UserStep
from lightning_fold.topology.comm import Comm

MICROBATCHES_PER_STAGE = 4


class StagesWoven(NamedTuple):
    """Stages of one rank that run in pieces, and why others do not."""

    stages: tuple[int, ...]
    reasons: dict[int, str]


class PipelinedSteps:
    """Runs the steps of one module in a pipeline.

    Args:
        module: The LightningModule, whole.
        config: The strategy's.
        comm: Collectives.
        device: Of this rank.

    Attributes:
        executor: Runs schedules; tells what it has seen of the latest one.
        cut: What is left of the model on this rank; from `leave_own` on.
        plan: Of the latest step.
        weaving: Stages that run in pieces; None without `pipeline_overlap`.
    """

    def __init__(
        self, module: LightningModule, config: FoldedConfig, comm: Comm, device: torch.device
    ) -> None:
        self.module = module
        self.config = config
        self.comm = comm
        self.device = device
        pp, vpp = config.pipeline_parallel_size, config.virtual_pipeline_size
        self.ranks = self._plan(1, forward_only=True).placement
        self.executor = Executor(comm, num_stages=pp * vpp, device=device)
        self.mirror = Mirror(comm.meshes.group("pp"), self.ranks[-1], device)
        self.logs = MicrobatchLogs(module, group=self.mirror.group, source=self.mirror.source)
        self.gate = CoreGate()
        self.plan: Plan | None = None
        self._cut: CutModel | None = None
        self._layout: Layout | None = None
        self._folded: FoldedModel | None = None
        self._weaving_plan: WeavingPlan | None = None
        self.weaving: Weaving | None = None
        self._woven: list[StagesWoven] = []

    @property
    def cut(self) -> CutModel:
        """What is left of the model on this rank."""
        assert self._cut is not None, "the model is cut when it is folded"
        return self._cut

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage, and with it the user's step."""
        return self.mirror.is_source

    # Set-up.

    def leave_own(
        self,
        root: nn.Module,
        parts: ModelParts,
        decoder: DecoderParts | None,
        routers: Sequence[Router],
    ) -> CutModel:
        """Leave this rank the parts of its stages; `model.fold.Cutter`."""
        anatomy = probe(root, parts)
        self._layout = self._laid_out(parts)
        placement = Placement(self._layout, self.ranks, self.comm.rank("pp"))
        self._check_no_idle_rank(placement)
        if self.config.pipeline_overlap:
            tp = self.comm.size("tp")
            self._weaving_plan = plan_weaving(root, parts, anatomy, placement, tp=tp)
        self._cut = cut(root, parts, decoder, routers, anatomy=anatomy, placement=placement)
        return self._cut

    def _check_no_idle_rank(self, placement: Placement) -> None:
        """Refuse a rank without parameters, on all ranks alike."""
        for rank in sorted(set(self.ranks)):
            own = replace(placement, rank=rank).own
            if not any(stage.layers or stage.embedding or stage.head for stage in own):
                raise ValueError(
                    f"pipeline rank {rank} has no parameters: pipeline_layout={placement.layout} "
                    "leaves all its stages empty. Legal: at least one layer, embedding or head for "
                    "each rank.  Change `pipeline_layout`."
                )

    def _laid_out(self, parts: ModelParts) -> Layout:
        text, num_stages = self.config.pipeline_layout, len(self.ranks)
        if text is not None:
            return parse_layout(text, len(parts.layers), num_stages=num_stages)
        return even_layout(costs_of(parts), num_stages, placement=self.ranks)

    def describe(self) -> str:
        """The line that set-up logs: schedule, layout, and where each stage runs."""
        ranks = " ".join(str(rank) for rank in self.ranks)
        line = f"  pipeline: {self.config.pipeline_schedule}, {self._layout} on pp ranks {ranks}"
        if not self._woven:
            return line
        woven = sorted(stage for weaving in self._woven for stage in weaving.stages)
        plain = sorted(pair for weaving in self._woven for pair in weaving.reasons.items())
        lines = [line, f"  woven stages: {', '.join(map(str, woven)) or 'none'}"]
        return "\n".join(lines + [f"  stage {i} is not woven: {why}" for i, why in plain])

    def start(
        self,
        folded: FoldedModel,
        *,
        forward_context: Callable[[str], AbstractContextManager[Any]],
        scale: Callable[[Tensor], Tensor],
    ) -> None:
        """Take the folded model.

        Args:
            folded: Of this rank's stages.
            forward_context: Lightning's precision context of a step, by the step's name.
            scale: What a loss scaler does to a loss.
        """
        self._folded = folded
        self._forward_context, self._scale = forward_context, scale
        self.gate.install(folded.parts.core)
        if self._weaving_plan is not None:
            repeats = self.config.activation_checkpointing == "full"
            self.weaving = self._weaving_plan.finish(folded, repeats=repeats)
            self._woven = self._told_of_stages(self.weaving)
        self._context = StepContext(
            module=self.module,
            folded=folded,
            stages=self.cut.stages,
            gate=self.gate,
            logs=self.logs,
            forward_context=forward_context,
            scale=self._share_of,
            weaving=self.weaving,
        )

    def _told_of_stages(self, weaving: Weaving) -> list[StagesWoven]:
        """What the ranks of this pipeline weave. Collective over pp."""
        told: list[Any] = [None] * self.comm.size("pp")
        own = StagesWoven(tuple(weaving.stages), dict(weaving.reasons))
        dist.all_gather_object(told, own, group=self.comm.meshes.group("pp"))
        return told

    def set_up(self, trainer: Trainer) -> None:
        """Prepare one run of `trainer`.

        Raises:
            ValueError: The module's steps, or the Trainer's search for a batch size, do not go
                through a schedule.
        """
        check_module(self.module)
        install_closure(trainer)
        self.logs.watch(trainer)

    @property
    def twins(self) -> dict[str, nn.Parameter]:
        """Parameters that the first and the last stage both hold, on either of them."""
        ends = (self.ranks[0], self.ranks[-1])
        if self._cut is None or self.comm.rank("pp") not in ends:
            return {}
        return {name: self.module.get_parameter(name) for name in self._cut.twins}

    def counted_elsewhere(self) -> set[int]:
        """Ids of parameters whose gradient the first stage counts in a norm."""
        return {id(p) for p in self.twins.values()} if self.is_last else set()

    # Steps.

    def training_step(
        self, batch: Any, rest: Sequence[Any], *, syncs: bool, sentinel: Sentinel | None
    ) -> Tensor:
        """Run forward and backward of a batch; return its loss, on every rank.

        Args:
            batch: Of this dp rank.
            rest: Further arguments of the user's step.
            syncs: Whether gradients are reduced: not inside an accumulation window.
            sentinel: Watches, if anything does.
        """
        folded, trainer = self._model, self.module.trainer
        step = self._step("training_step", batch, rest, train=True)
        if sentinel is not None:
            sentinel.before_backward()
        params.hold_back(folded.roots)
        loss = self._run(step)
        if syncs:
            params.reduce_held(folded.roots)
            # Before the twins' sum, which is of what two stages have computed.
            if sentinel is not None:
                sentinel.finish()
            self._sum_twins()
        loss = self._from_last(loss)
        with self._forward_context("training_step"):
            self.logs.mirror()
        fire_backward_hooks(trainer, self.module, loss)
        return loss

    def evaluation_step(self, name: str, batch: Any, rest: Sequence[Any]) -> Any:
        """Run `validation_step`, `test_step` or `predict_step` of a batch, forward only.

        Returns:
            What the user's step returned, its microbatches joined, on every rank.
        """
        step = self._step(name, batch, rest, train=False)
        self._run(step)
        params.reshard(self._model.sharded)
        out = joined([step.outputs[m] for m in range(len(step.outputs))]) if self.is_last else None
        if name != "predict_step":
            with self._forward_context(name):
                self.logs.mirror()
        return self._told(out)

    def _told(self, out: Any) -> Any:
        """What the last stage returned, on every rank and its device. Collective over pp."""
        told = self.mirror.objects(move_data_to_device(out, "cpu"))
        return move_data_to_device(told, self.device)

    def _run(self, step: UserStep) -> Tensor | None:
        step.catch()
        self.plan = self._plan(len(step.pieces.batches), forward_only=not step.train)
        self.executor.stamps.start()
        self.executor.run(self.plan, step, train=step.train)
        step.finish()
        return step.loss() if step.train and self.is_last else None

    def _step(self, name: str, batch: Any, rest: Sequence[Any], *, train: bool) -> UserStep:
        return UserStep(self._context, name, self._pieces(batch, train=train), rest, train)

    def _share_of(self, loss: Tensor) -> Tensor:
        """A loss as its backward begins: the only division, as without pipelines."""
        accumulate = self.module.trainer.accumulate_grad_batches
        return self._scale(loss / (self.comm.size("dp") * accumulate))

    def _pieces(self, batch: Any, *, train: bool) -> Pieces:
        """The microbatches of this rank: as many on every rank. Collective over all ranks."""
        own = getattr(self.module, "split_batch", None)
        named = own is None or self.config.microbatch_size is not None
        rows, shape = rows_of(batch) if named else 0, fingerprint(batch)
        if own is None:
            return split(batch, self._agreed(rows, rows, shape, train=train))
        # It alone knows how many pieces the batch has.
        batches = list(own(batch, self._wanted(rows)))
        count = self._agreed(len(batches), rows, shape, train=train)
        if len(batches) > count > 0:
            batches = list(own(batch, count))
        if len(batches) != count or not batches:
            raise ValueError(
                f"{type(self.module).__name__}.split_batch returns {len(batches)} microbatches for "
                f"num_microbatches={count}. Return as many as it is asked for, or fewer, but one, "
                "where the batch has no more."
            )
        return weighed(batches)

    def _wanted(self, rows: int) -> int:
        config = self.config
        if config.microbatch_size is not None:
            return -(-rows // config.microbatch_size)
        return config.num_microbatches or MICROBATCHES_PER_STAGE * self.comm.size("pp")

    def _agreed(self, limit: int, rows: int, shape: int, *, train: bool) -> int:
        own = torch.tensor([limit, rows, shape], device=self.device)
        told = self.comm.gather_from_all(own)
        flat = self.comm.to_host(told.flatten(), why="rows of all ranks' batches, once a step")
        self._check_peers(flat[2::3])
        count = min(self._wanted(max(flat[1::3])), *flat[::3])
        return nearest_count(num_microbatches=count, **self._shape) if train else count

    @property
    def _shape(self) -> dict[str, Any]:
        config = self.config
        return {
            "name": config.pipeline_schedule,
            "pp": config.pipeline_parallel_size,
            "vpp": config.virtual_pipeline_size,
        }

    def _check_peers(self, shapes: Sequence[int]) -> None:
        """All ranks of a pipeline, a sequence and a layer have to read the same batch."""
        folding = self.comm.meshes.folding
        first: dict[int, int] = {}
        for rank, shape in enumerate(shapes):
            dp = folding.coordinates(rank)["dp"]
            peer = first.setdefault(dp, rank)
            if shapes[peer] != shape:
                raise ValueError(
                    f"rank {rank} has read a batch of other shapes than rank {peer}, and both work "
                    f"on the same one (dp rank {dp}). Let the loader depend on nothing but the "
                    "sampler that Lightning gives it."
                )

    def _plan(self, count: int, *, forward_only: bool = False) -> Plan:
        shape = self._shape
        if not forward_only and is_too_few(num_microbatches=count, **shape):
            rank_zero_warn(
                f"a batch gives {count} microbatches, too few for {shape['name']!r}: all its "
                "forwards run before its backwards. That costs time only; batches with more rows, "
                "or drop_last=True where it is the last one, avoid it."
            )
            return actions_of_few(num_microbatches=count, **shape)
        overlap = self.config.pipeline_overlap and not forward_only
        return actions_of(
            num_microbatches=count, forward_only=forward_only, overlap=overlap, **shape
        )

    def _from_last(self, loss: Tensor | None) -> Tensor:
        """The loss of the last stage, on every rank. Collective over pp."""
        own = None if loss is None else [loss.double()]
        (told,) = self.mirror.tensors([Spec((), torch.float64)], own)
        return told.to(torch.promote_types(self.cut.stages.dtype, torch.float32))

    def _sum_twins(self) -> None:
        """Add up the gradients of what both ends hold. Collective over the two of them."""
        rank, first, last = self.comm.rank("pp"), self.ranks[0], self.ranks[-1]
        other = last if rank == first else first
        for param in self.twins.values():
            if param.grad is None:
                continue
            own = params.local_tensor(param.grad)
            theirs = torch.empty_like(own)
            self.comm.swap(own, theirs, peer=other, axis="pp")
            own.add_(theirs)

    @property
    def _model(self) -> FoldedModel:
        assert self._folded is not None, "steps need a model that is folded"
        return self._folded
