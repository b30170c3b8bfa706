"""Balance the experts while training: losses added to the model's, and the expert bias.

Hooks on the routers collect what they decide between the core's entry and exit, so a layer that
backward repeats is not counted again, and only in training with gradients. At the core's exit the
losses are added to `out.loss`, where the model made one, and stand in `out.aux_loss`, where it has
that field: a step with a loss of its own adds that. `moe.balance` has the formulas.
"""

# Shapes.  E all experts

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fold.model.passage import Passage, StageOutput
from lightning_fold.model.routers import Router
from lightning_fold.moe import balance
from lightning_fold.moe.balance import Load, Routed
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.router_options import RouterOptions
from lightning_fold.topology.comm import Comm

Collected = tuple[int, Routed]
"""A decision, and the number of the router that has made it."""


class Balance:
    """What keeps the experts of one model evenly loaded.

    Args:
        routers: Those of all MoE layers.
        options: Losses with their coefficients, and the rate of the bias.
        comm: Collectives.
        tokens: Which tokens the layers see.
        takes_over: Whether the one loss stands for the model's own: then it is there in evaluation
            too, and `out.aux_loss` has it without the coefficient, as Hugging Face's has.
        passage: What comes in from the pipeline stage before. Loads travel with the hidden states,
            and the last stage makes the losses of them: one formula, whatever the stages.

    Attributes:
        sequence_share: What a mean over the sequences of this forward counts for, over what its
            loss does; other than 1 where a batch is cut into microbatches.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        options: RouterOptions,
        *,
        comm: Comm,
        tokens: RunningTokens,
        takes_over: bool = False,
        passage: Passage | None = None,
    ) -> None:
        self.routers = routers
        self.options = options
        self.comm = comm
        self.tokens = tokens
        self.takes_over = takes_over
        self.passage = passage
        self.sequence_share = 1.0
        self._collected: list[Collected] | None = None
        self._given: list[Collected] | None = None
        # Since the last step: by router the counts of this rank, by place of the router in the
        # model those of all dp ranks.
        self._own: dict[int, Tensor] = {}
        self._seen: dict[int, Tensor] = {}
        self._step_hooks: list[Any] = []

    def install(self, core: nn.Module) -> None:
        """Hook routers and core; after the hooks that complete `out.loss`, before FSDP2's."""
        core.register_forward_pre_hook(self._enter, with_kwargs=True)
        for number, router in enumerate(self.routers):
            router.module.register_forward_hook(self._collector(number))
        core.register_forward_hook(self._leave)

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Move the bias after each step of the optimizer that owns the routers."""
        self._forget()
        for hook in self._step_hooks:
            hook.remove()
        owners = [o for o in optimizers if self._owns(o)] if self.options.bias_update_rate else []
        self._step_hooks = [o.register_step_post_hook(self._move_bias) for o in owners[:1]]

    def close_batch(self, optimizer: Optimizer) -> None:
        """Forget the counts of a global batch, whether its step was made or skipped."""
        # A last stage without routers has counted those of the others.
        if not self.routers or self._owns(optimizer):
            self._forget()

    def _owns(self, optimizer: Optimizer) -> bool:
        weights = {id(p) for router in self.routers for p in router.module.parameters()}
        return any(id(p) in weights for group in optimizer.param_groups for p in group["params"])

    def _forget(self) -> None:
        self._own.clear()
        self._seen.clear()

    # One forward.

    def makes_losses(self, core: nn.Module) -> bool:
        """Whether a forward that begins now makes losses; equal on all ranks."""
        return bool(self.options.balances) and self._collects(core)

    def _collects(self, core: nn.Module) -> bool:
        """Whether it makes losses or counts."""
        return (core.training and torch.is_grad_enabled()) or self.takes_over

    @contextmanager
    def collecting(self, into: list[Collected] | None) -> Iterator[None]:
        """Let what routers decide inside go to `into`, with no core around them."""
        before, self._collected = self._collected, into
        try:
            yield
        finally:
            self._collected = before

    @contextmanager
    def given(self, collected: list[Collected]) -> Iterator[None]:
        """Let the forward of the core inside have decided this, before it begins."""
        self._given = collected
        try:
            yield
        finally:
            self._given = None

    def _enter(self, core: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._collected = list(self._given or ()) if self._collects(core) else None
        # In the call and not in the user's config, which outlives the run.
        return (args, kwargs | {"output_router_logits": False}) if self.takes_over else None

    def _collector(self, number: int) -> Any:
        router = self.routers[number]

        def collect(module: nn.Module, args: Any, out: Any) -> None:
            if self._collected is not None:
                self._collected.append((number, self._routed(router, out)))

        return collect

    def _routed(self, router: Router, out: Any) -> Routed:
        logits_TE, _, index_TK = out
        layout, rows = self.tokens.moe, logits_TE.shape[0]
        if layout is not None and layout.num_tokens != rows:
            raise ValueError(
                f"{router.name} decides for {rows} rows where the batch has {layout.num_tokens} "
                "tokens on this rank, so padding and sequences are not known. Leave aux_losses, "
                "z_loss and bias_update_rate out of `router_options`."
            )
        return Routed(logits_TE, index_TK, router.spec.scores, layout)

    def _leave(self, core: nn.Module, args: Any, out: Any) -> Any:
        collected, self._collected = self._collected, None
        if collected is None:
            return None
        arrived = None if self.passage is None else self.passage.loads
        if isinstance(out, StageOutput):
            sent = self.leave_stage(core, collected, arrived)
            return None if sent is None else out._replace(loads=sent)
        loads = self._loads(core, collected)
        if loads is None:
            return None
        if arrived is not None and self.passage is not None:
            rows = 1 if self.tokens.moe is None else self.tokens.moe.num_sequences
            dtype = loads[0].probs_BE.dtype if loads else balance.PACKED
            loads = [*balance.unpacked(arrived, self.passage.upstream, rows, dtype), *loads]
        if not loads:
            return None
        total, plain = self._losses(loads)
        return with_losses(out, total, plain if self.takes_over else total)

    def leave_stage(
        self, core: nn.Module, collected: Sequence[Collected], arrived: Tensor | None
    ) -> Tensor | None:
        """What a stage that is not the last sends of the balance: what has come in and its own.

        Collective over tp and cp.
        """
        loads = self._loads(core, collected)
        if loads is None:
            return None
        flat = [] if arrived is None else [arrived]
        flat += [balance.packed(load) for load in loads]
        return torch.cat(flat) if flat else None

    def _loads(self, core: nn.Module, collected: Sequence[Collected]) -> list[Load] | None:
        """Count what was decided; its loads, or None where nobody makes losses of them."""
        if self.options.bias_update_rate and core.training:
            self._count(collected)
        if not self.options.balances:
            return None
        self._check_graph(core, collected)
        local = [balance.local_load(routed) for _, routed in collected]
        return balance.sum_over_peers(local, self.comm) if local else []

    def _count(self, collected: Sequence[Collected]) -> None:
        for number, routed in collected:
            counts_E = balance.count_routed(routed).sum(0)
            self._own[number] = self._own.get(number, 0) + counts_E

    def _losses(self, loads: Sequence[Load]) -> tuple[Tensor, Tensor]:
        """Everything that is added to the loss, with coefficients and without."""
        plain = [
            (aux.coefficient, self._formula(aux.formula, loads)) for aux in self.options.aux_losses
        ]
        if self.options.z_loss:
            values = [balance.z_loss(load) for load in loads]
            plain.append((self.options.z_loss, torch.stack(values).sum()))
        weighted = [coefficient * value for coefficient, value in plain if coefficient is not None]
        assert len(weighted) == len(plain), "a coefficient was not resolved at set-up"
        return torch.stack(weighted).sum(), torch.stack([value for _, value in plain]).sum()

    def _formula(self, name: str, loads: Sequence[Load]) -> Tensor:
        if name == "model":
            return balance.model(loads)
        if name == "global_batch":
            return self._global_batch(loads)
        formula = balance.per_layer if name == "per_layer" else balance.per_sequence
        total = torch.stack([formula(load) for load in loads]).sum()
        return total * self.sequence_share if name == "per_sequence" else total

    def _global_batch(self, loads: Sequence[Load]) -> Tensor:
        values = []
        for number, load in enumerate(loads):
            seen_E = self._seen.get(number)
            before_E = torch.zeros_like(load.counts_BE[0]) if seen_E is None else seen_E
            value, self._seen[number] = balance.global_batch(load, before_E, self.comm)
            values.append(value)
        return torch.stack(values).sum()

    def _check_graph(self, core: nn.Module, collected: Sequence[Collected]) -> None:
        """Refuse what would lose a gradient or a sequence without a word."""
        for number, routed in collected:
            router = self.routers[number]
            learns = any(param.requires_grad for param in router.module.parameters())
            if torch.is_grad_enabled() and learns and not routed.logits_TE.requires_grad:
                raise ValueError(
                    f"{router.name} ran without gradients, as under reentrant activation "
                    "checkpointing, so its aux losses would have none. Call "
                    "`gradient_checkpointing_enable({'use_reentrant': False})`."
                )
            asked = any(aux.formula == "per_sequence" for aux in self.options.aux_losses)
            if asked and routed.layout is None:
                raise ValueError(
                    f"'per_sequence' needs the sequences, and {type(core).__name__}.forward has "
                    "neither `input_ids` nor `inputs_embeds` [B, S, ...]. Legal formula: "
                    "'per_layer', 'model', 'global_batch'.  Change `router_options`."
                )

    # One step.

    @torch.no_grad()
    def _move_bias(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Step every bias towards an even load, equally on all ranks. Collective over the stage."""
        biases = [router.bias_E for router in self.routers]
        own = [
            self._own.get(number, torch.zeros_like(bias_E, dtype=torch.long))
            for number, bias_E in enumerate(biases)
            if bias_E is not None
        ]
        sizes = [len(counts_E) for counts_E in own]
        counts = balance.sum_over_ranks(torch.cat(own), self.comm).split(sizes)
        # A fused optimizer is called by the scaler of fp16 also when it skips.
        skipped = getattr(optimizer, "found_inf", None)
        for bias_E, counts_E in zip(biases, counts, strict=True):
            assert bias_E is not None, "set-up gives every router a bias"
            step_E = balance.bias_step(counts_E).to(bias_E.dtype) * self.options.bias_update_rate
            bias_E.add_(step_E if skipped is None else step_E * (skipped == 0))


def with_losses(out: Any, total: Tensor, reported: Tensor) -> Any:
    """A copy of a model's output with `total` added to its loss and `reported` as its aux loss.

    A scalar tensor is a loss.

    Raises:
        ValueError: The output has room for neither, or holds an aux loss already.
    """
    if isinstance(out, Tensor) and out.dim() == 0:
        return out + total.to(out.dtype)
    loss = _field(out, "loss")
    has_aux = _has_field(out, "aux_loss")
    if loss is None and not has_aux:
        raise ValueError(
            f"the model returns {type(out).__name__} without `loss` and without a field "
            "`aux_loss`: its aux losses would be lost. Return one of them, or leave aux_losses and "
            "z_loss out of `router_options`."
        )
    if _field(out, "aux_loss") is not None:
        raise ValueError(
            "the model computes an aux loss of its own beside those of `router_options`. Call it "
            "without output_router_logits=True."
        )
    changes = {} if loss is None else {"loss": loss + total.to(loss.dtype)}
    return _changed(out, changes | ({"aux_loss": reported} if has_aux else {}))


def _has_field(out: Any, name: str) -> bool:
    if dataclasses.is_dataclass(out):
        return name in {field.name for field in dataclasses.fields(out)}
    return name in out if isinstance(out, Mapping) else hasattr(out, name)


def _field(out: Any, name: str) -> Any:
    # A ModelOutput is a mapping too, which leaves out what is None.
    if isinstance(out, Mapping) and not dataclasses.is_dataclass(out):
        return out.get(name)
    return getattr(out, name, None)


def _changed(out: Any, changes: Mapping[str, Tensor]) -> Any:
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return dataclasses.replace(out, **changes)
    if isinstance(out, Mapping):
        return {**out, **changes}
    return out._replace(**changes)
