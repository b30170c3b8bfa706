"""The routing decision as one op: scores, bias, group limits, top-k, normalisation."""

# Shapes.  T tokens   K top-k   E all experts

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fold_kernels.backend import runs_triton
from fold_kernels.router import (
    TINY,
    GroupScore,
    RouterSpec,
    ScoreKind,
    route_ref,
    scores_of,
)


def router_topk(
    logits_TE: Tensor, spec: RouterSpec, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose K experts for every token. Local, without a host synchronisation.

    Args:
        logits_TE: fp32 for the kernel; the plain form takes any floating dtype.
        spec: How to choose.
        bias_E: Added to what ranks experts and groups, not to the weights; no gradient.

    Returns:
        weights_TK: In at least fp32, with gradient to the logits. All NaN where a logit is.
        index_TK: int64, best first; distinct, equal scores by lower id.

    Raises:
        ValueError: No router with so many experts can do what `spec` says, or the bias is not one
            number for each.
    """
    _check(logits_TE, spec, bias_E)
    bias_E = None if bias_E is None else bias_E.detach().contiguous()
    weights_TK, index_TK = _router_topk(logits_TE.contiguous(), bias_E, **asdict(spec))
    return weights_TK, index_TK


def route(
    logits_TE: Tensor, spec: RouterSpec, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`router_topk` where a kernel serves it; else its plain form under ordinary autograd."""
    if _runs_triton(logits_TE, spec):
        return router_topk(logits_TE, spec, bias_E)
    weights_TK, index_TK, _ = route_ref(logits_TE, spec, bias_E)
    return weights_TK, index_TK


@torch.library.custom_op("fold_kernels::router_topk", mutates_args=())
def _router_topk(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scores: str,
    softmax_after_topk: bool,
    renormalise: bool,
    scaling_factor: float,
    num_groups: int,
    top_groups: int,
    group_score: str,
) -> tuple[Tensor, Tensor]:
    spec = _spec(
        top_k, scores, softmax_after_topk, renormalise, scaling_factor, num_groups, top_groups,
        group_score,
    )  # fmt: skip
    if _runs_triton(logits, spec):
        from fold_kernels.gpu.router import router_topk as run

        return run(logits, spec, bias)
    weights, index, _ = route_ref(logits, spec, bias)
    return weights, index


@torch.library.custom_op("fold_kernels::router_topk_backward", mutates_args=())
def _router_topk_backward(
    logits: Tensor,
    index: Tensor,
    grad: Tensor,
    top_k: int,
    scores: str,
    softmax_after_topk: bool,
    renormalise: bool,
    scaling_factor: float,
    num_groups: int,
    top_groups: int,
    group_score: str,
) -> Tensor:
    spec = _spec(
        top_k, scores, softmax_after_topk, renormalise, scaling_factor, num_groups, top_groups,
        group_score,
    )  # fmt: skip
    if _runs_triton(logits, spec):
        from fold_kernels.gpu.router import router_topk_backward as run

        return run(logits, index, grad.contiguous(), spec)
    return router_topk_backward_ref(logits, index, grad, spec)


def router_topk_backward_ref(
    logits_TE: Tensor, index_TK: Tensor, grad_TK: Tensor, spec: RouterSpec
) -> Tensor:
    """Gradient of the logits, the choice held fixed.

    Written out: inside of a registered op nothing is recorded, and autograd has nothing to go by.
    """
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    scores_TE = scores_of(wide_TE, spec.scores)
    grad_TK = grad_TK.to(wide_TE.dtype) * spec.scaling_factor
    if spec.softmax_after_topk:
        weights_TK = wide_TE.gather(1, index_TK).softmax(1)
        grad_TK = weights_TK * (grad_TK - (grad_TK * weights_TK).sum(1, keepdim=True))
        return torch.zeros_like(wide_TE).scatter(1, index_TK, grad_TK).to(logits_TE.dtype)
    if spec.renormalise:
        chosen_TK = scores_TE.gather(1, index_TK)
        sum_T1 = chosen_TK.sum(1, keepdim=True) + TINY
        weights_TK = chosen_TK / sum_T1
        grad_TK = (grad_TK - (grad_TK * weights_TK).sum(1, keepdim=True)) / sum_T1
    grad_TE = torch.zeros_like(wide_TE).scatter(1, index_TK, grad_TK)
    return _scores_backward(wide_TE, scores_TE, grad_TE, spec.scores).to(logits_TE.dtype)


def _scores_backward(
    logits_TE: Tensor, scores_TE: Tensor, grad_TE: Tensor, kind: ScoreKind
) -> Tensor:
    if kind == "softmax":
        return scores_TE * (grad_TE - (grad_TE * scores_TE).sum(1, keepdim=True))
    if kind == "sigmoid":
        return grad_TE * scores_TE * (1 - scores_TE)
    # An expert that was not chosen has no part, also where the root's slope is infinite.
    slope_TE = torch.sigmoid(logits_TE) / (2 * scores_TE)
    return (grad_TE * slope_TE).where(grad_TE != 0, 0)


@_router_topk.register_fake
def _(logits: Tensor, bias: Tensor | None, top_k: int, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=wide), logits.new_empty(shape, dtype=torch.int64)


@_router_topk_backward.register_fake
def _(logits: Tensor, index: Tensor, grad: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, *options = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.options = options


def _backward(ctx: Any, grad_weights: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, index = ctx.saved_tensors
    grad = _router_topk_backward(logits, index, grad_weights, *ctx.options)
    return grad, None, *(None for _ in ctx.options)


_router_topk.register_autograd(_backward, setup_context=_setup)


def _check(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> None:
    if logits.dim() != 2:
        raise ValueError(f"router_topk: logits {tuple(logits.shape)} are not [tokens, experts]")
    spec.check(logits.shape[1])
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(
            f"router_topk: bias {tuple(bias.shape)} is not one number for each of "
            f"{logits.shape[1]} experts"
        )


def _runs_triton(logits: Tensor, spec: RouterSpec) -> bool:
    return runs_triton(
        logits, "router_topk", obstacle=_obstacle(logits, spec), dtypes=(torch.float32,)
    )


def _obstacle(logits: Tensor, spec: RouterSpec) -> str | None:
    experts = logits.shape[1]
    if experts > 1 << 15:
        return f"{experts} experts do not fit into a key"
    # The kernel folds a power of two of columns into groups.
    limited = spec.top_groups < spec.num_groups
    if limited and (experts & (experts - 1) or spec.num_groups & (spec.num_groups - 1)):
        return f"{experts} experts in {spec.num_groups} groups are no powers of two"
    return None


def _spec(
    top_k: int,
    scores: str,
    softmax_after_topk: bool,
    renormalise: bool,
    scaling_factor: float,
    num_groups: int,
    top_groups: int,
    group_score: str,
) -> RouterSpec:
    kind: ScoreKind = scores  # type: ignore[assignment]
    rank: GroupScore = group_score  # type: ignore[assignment]
    return RouterSpec(
        top_k, kind, softmax_after_topk, renormalise, scaling_factor, num_groups, top_groups, rank
    )
