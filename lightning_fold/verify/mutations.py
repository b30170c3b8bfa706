"""Faults injected on purpose, and the run that shows that the suite sees every one of them.

Each mutation patches one function of the product, in every rank, for one case.
`python -m lightning_fold.verify.mutations` runs each on a case that must notice, beside the same
case unharmed, and fails when one survives.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from fold_kernels.permute import order_of_chunks
from lightning_fold import stepping, strategy
from lightning_fold.model import swap, tensor_parallel
from lightning_fold.moe import layer
from lightning_fold.moe.dispatch import all_to_all, base
from lightning_fold.params import Family, clip, families, local_tensor, shard
from lightning_fold.topology.comm import split_rows
from lightning_fold.topology.in_flight import travel
from lightning_fold.verify import mutations_context as context
from lightning_fold.verify import mutations_pipeline as pipeline
from lightning_fold.verify import mutations_router as router
from lightning_fold.verify import mutations_tokens as tokens
from lightning_fold.verify.plan import Case
from lightning_fold.verify.plan_pipelines import STAGES

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        what: The fault in words.
        case: A case that must notice it.
        seen_by: The check that must fail.
        patch: Makes the context in which the product is faulty.
        crash: Text of the error with which it ends, where it cannot end in wrong numbers.
    """

    what: str
    case: Case
    seen_by: str
    patch: Patch
    crash: str | None = None


@contextmanager
def injected(name: str) -> Iterator[None]:
    """Run the body with a mutation of `MUTATIONS`; an empty name is none.

    Raises:
        ValueError: There is no mutation of that name.
    """
    if not name:
        yield
        return
    if name not in MUTATIONS:
        raise ValueError(f"{name!r} is no mutation. Legal: {', '.join(MUTATIONS)}.")
    with MUTATIONS[name].patch():
        yield


def _expert_gradient_times_ep() -> contextlib.AbstractContextManager[Any]:
    def scaled(param: Any) -> Tensor:
        local = local_tensor(param)
        names = getattr(getattr(param, "device_mesh", None), "mesh_dim_names", None) or ()
        ep = param.device_mesh["ep"].size() if "ep" in names else 1
        out: Tensor = _ScaleGradient.apply(local, float(ep))
        return out

    return mock.patch.object(layer, "local_tensor", scaled)


class _ScaleGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def _not_summed_over_tp(family: Family) -> contextlib.AbstractContextManager[Any]:
    """The table says tp for what tp does not shard; here it does not."""

    def shorter(kind: Family, sharded: Any) -> tuple[str, ...]:
        axes = families.reduce_axes(kind, sharded)
        return tuple(axis for axis in axes if axis != "tp") if kind is family else axes

    return mock.patch.object(shard, "reduce_axes", shorter)


def _etp_sum_left_out() -> contextlib.AbstractContextManager[Any]:
    """A rank takes its own partial rows instead of the sum over etp."""

    def unsummed(rows: Tensor, comm: Any, hops: Any) -> Tensor:
        for hop in hops:
            if hop.kind == "scatter":
                rows = split_rows(rows, comm, list(hop.sizes), hop.axis)
            else:
                rows = travel(rows, comm, [hop])
        return rows

    return mock.patch.object(base, "travel", unsummed)


def _norm_of_local_shards() -> contextlib.AbstractContextManager[Any]:
    def local_norm(params: Any, *, device: torch.device) -> Tensor:
        squares = [local_tensor(p.grad).square().sum() for p in params if p.grad is not None]
        return torch.stack(squares).sum().sqrt()

    return mock.patch.object(clip, "gradient_norm", local_norm)


def _equal_data() -> contextlib.AbstractContextManager[Any]:
    def first(self: Any) -> dict[str, Any]:
        return {"num_replicas": self.comm.size("dp"), "rank": 0}

    owner = strategy.FoldedMoEStrategy
    return mock.patch.object(owner, "distributed_sampler_kwargs", property(first))


def _halves_swapped() -> contextlib.AbstractContextManager[Any]:
    """The second etp rank stores up where gate belongs."""

    def swapped(param: nn.Parameter, mesh: Any, placements: Any) -> nn.Parameter:
        out: Any = shard_parameter(param, mesh, placements)
        if param.dim() == 4 and mesh.get_local_rank("etp") == 1:
            with torch.no_grad():
                out.to_local().copy_(out.to_local().flip(1))
        sharded: nn.Parameter = out
        return sharded

    shard_parameter = swap.shard_parameter
    return mock.patch.object(swap, "shard_parameter", swapped)


def _even_counts() -> contextlib.AbstractContextManager[Any]:
    """Received rows are cut as if every peer had sent equally many to every local expert."""

    def even(counts_Ce: Tensor, num_rows: int) -> Tensor:
        each, rest = divmod(num_rows, counts_Ce.numel())
        chunks = torch.full_like(counts_Ce, each)
        chunks.view(-1)[:rest] += 1
        return order_of_chunks(chunks, num_rows)

    return mock.patch.object(all_to_all, "order_of_chunks", even)


@contextmanager
def _loss_weighted_by_tokens() -> Iterator[None]:
    """One mean over the tokens of all dp ranks, where DDP means the mean of the ranks' means."""

    def step(self: Any, batch: Any, *args: Any) -> Any:
        self._labels_seen = int((batch["labels"][:, 1:] != -100).sum())
        return training_step(self, batch, *args)

    def weighted(self: Any, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        total = torch.tensor(float(self._labels_seen))
        dist.all_reduce(total, group=self.meshes.group("dp"))
        share = self._labels_seen * self.folding.dp / float(total)
        return backward(self, closure_loss * share, *args, **kwargs)

    owner = strategy.FoldedMoEStrategy
    training_step, backward = owner.training_step, owner.backward
    with (
        mock.patch.object(owner, "training_step", step),
        mock.patch.object(owner, "backward", weighted),
    ):
        yield


def _no_division() -> contextlib.AbstractContextManager[Any]:
    """Lightning's own backward, which leaves the division to FSDP2 or DDP."""
    owner = stepping.SteppingStrategy
    return mock.patch.object(owner, "backward", super(owner, owner).backward)


def _sum_not_forced() -> contextlib.AbstractContextManager[Any]:
    def factor_only(module: Any) -> None:
        module.set_gradient_divide_factor(1.0)

    return mock.patch.object(shard, "sum_only", factor_only)


def _first_kv_head() -> contextlib.AbstractContextManager[Any]:
    def first(linear: Any, rows: slice) -> None:
        use_rows(linear, slice(0, rows.stop - rows.start))

    use_rows = tensor_parallel._use_rows
    return mock.patch.object(tensor_parallel, "_use_rows", first)


def _untied() -> contextlib.AbstractContextManager[Any]:
    """Every module's weight is distributed on its own."""

    def forget(self: Any, *args: Any) -> None:
        initialize(self, *args)
        self.sharded = _Forgetful()

    initialize = tensor_parallel.TensorParallel.__init__
    return mock.patch.object(tensor_parallel.TensorParallel, "__init__", forget)


class _Forgetful(dict[nn.Parameter, nn.Parameter]):
    def __contains__(self, key: object) -> bool:
        return False


_TP2_EP4 = Case("decoder", "tp2cp1dp2pp1-etp1ep4edp1")
_TP2_ETP2 = Case("decoder", "tp2cp1dp2pp1-etp2ep2edp1")
_CP2 = Case("decoder", "tp1cp2dp2pp1-etp1ep4edp1")

_AUX = Case("decoder", _TP2_EP4.mapping, feature="aux")
_BIAS = Case("decoder-groups", _TP2_EP4.mapping, feature="bias")

MUTATIONS: Mapping[str, Mutation] = {
    "expert-grad-times-ep": Mutation(
        "expert gradient scaled by ep", _TP2_EP4, "expert gradient", _expert_gradient_times_ep
    ),
    "router-not-summed-over-tp": Mutation(
        "router gradient not summed over tp",
        _TP2_EP4,
        "router gradient",
        lambda: _not_summed_over_tp(Family.ROUTER),
    ),
    "norm-not-summed-over-tp": Mutation(
        "norm gradient not summed over tp",
        _TP2_EP4,
        "dense gradient",
        lambda: _not_summed_over_tp(Family.DENSE),
    ),
    "shared-not-summed-over-tp": Mutation(
        "shared-expert gradient not summed over tp",
        Case("decoder-shared-bias", _TP2_EP4.mapping),
        "shared gradient",
        lambda: _not_summed_over_tp(Family.SHARED),
    ),
    "etp-sum-left-out": Mutation(
        "ETP reduce-scatter left out", _TP2_ETP2, "logits", _etp_sum_left_out
    ),
    "norm-of-local-shards": Mutation(
        "clip norm from local shards",
        Case("decoder", _TP2_EP4.mapping, clip=True),
        "clip norm",
        _norm_of_local_shards,
    ),
    "equal-data": Mutation("dp ranks fed equal data", _TP2_EP4, "logits", _equal_data),
    "halves-swapped": Mutation(
        "one etp rank's gate and up halves swapped", _TP2_ETP2, "logits", _halves_swapped
    ),
    "even-counts": Mutation(
        "unequal token counts ignored by dispatch: rows cut evenly",
        _TP2_ETP2,
        "logits",
        _even_counts,
    ),
    "loss-weighted-by-tokens": Mutation(
        "unequal token counts of dp ranks: one token mean for the mean of means",
        _TP2_EP4,
        "dense gradient",
        _loss_weighted_by_tokens,
    ),
    "no-division-by-dp": Mutation("no division by dp", _TP2_EP4, "dense gradient", _no_division),
    "sum-not-forced": Mutation(
        "forced SUM left out; seen in fp32 only",
        Case("decoder", _TP2_EP4.mapping, precision="32"),
        "dense gradient",
        _sum_not_forced,
        crash="PREMUL_SUM",
    ),
    "first-kv-head": Mutation(
        "the wrong key/value head under tp = 4",
        Case("decoder", "tp4cp1dp1pp1-etp1ep2edp2"),
        "logits",
        _first_kv_head,
    ),
    "untied": Mutation(
        "tied weights untied",
        Case("decoder-tied", _TP2_EP4.mapping),
        "dense gradient",
        _untied,
    ),
    "aux-of-own-tokens": Mutation(
        "aux losses not summed over tp", _AUX, "router gradient", router.aux_of_own_tokens
    ),
    "global-batch-own-gradient": Mutation(
        "gradient of the global-batch loss 1/dp too small",
        _AUX,
        "router gradient",
        router.global_batch_own_gradient,
    ),
    "bias-of-own-tokens": Mutation(
        "expert bias moved by a rank's own tokens", _BIAS, "buffers", router.bias_of_own_tokens
    ),
    "padding-counted": Mutation(
        "padding counted by the aux losses", _AUX, "loss", router.padding_counted
    ),
    "dropped-still-computed": Mutation(
        "rows beyond the capacity still computed",
        Case("decoder", _TP2_EP4.mapping, feature="capacity"),
        "logits",
        tokens.dropped_still_computed,
    ),
    "capacity-of-all-ranks": Mutation(
        "capacity counted from the tokens of all dp ranks",
        Case("decoder", "tp1cp1dp4pp1-etp1ep4edp1", feature="capacity-local"),
        "logits",
        tokens.capacity_of_all_ranks,
    ),
    "token-sent-twice": Mutation(
        "dedup sends a token twice to one rank",
        Case("decoder", "tp4cp1dp1pp1-etp1ep2edp2", feature="dedup"),
        "logits",
        tokens.token_sent_twice,
    ),
    "context-loss-not-summed": Mutation(
        "loss of this cp rank's tokens only", _CP2, "loss", context.context_loss_not_summed
    ),
    "split-before-shift": Mutation(
        "labels split over cp before they are shifted", _CP2, "loss", context.split_before_shift
    ),
    "positions-from-zero": Mutation(
        "positions of a cp rank counted from zero", _CP2, "logits", context.positions_from_zero
    ),
    "no-document-borders": Mutation(
        "no mask between the documents of a packed sequence under cp",
        Case("decoder", _CP2.mapping, batch="packed"),
        "logits",
        context.no_document_borders,
    ),
    "ring-step-left-out": Mutation(
        "last step of ring attention left out",
        Case("decoder", _CP2.mapping, context_parallel_method="ring"),
        "logits",
        context.last_ring_step_left_out,
    ),
    "microbatches-weighed-equally": Mutation(
        "microbatches weighed equally, not by their targets",
        STAGES["plain"],
        "dense gradient",
        pipeline.weighed_equally,
    ),
    "twins-not-summed": Mutation(
        "tied weight of both ends of a pipeline not summed",
        STAGES["tied"],
        "dense gradient",
        pipeline.twins_not_summed,
    ),
    "twins-counted-twice": Mutation(
        "tied weight of both ends of a pipeline counted twice by the clip norm",
        STAGES["tied"],
        "clip norm",
        pipeline.twins_counted_twice,
    ),
    "loads-without-gradient": Mutation(
        "aux losses of the last stage without a gradient for earlier routers",
        STAGES["aux"],
        "router gradient",
        pipeline.loads_without_gradient,
    ),
    "last-weights-left-out": Mutation(
        "delayed weight gradients of the last microbatch left out",
        STAGES["delayed"],
        "expert gradient",
        pipeline.last_weights_left_out,
    ),
}

if __name__ == "__main__":
    from lightning_fold.verify.mutate import main

    sys.exit(main())
