"""The first product with the activation behind it, and the gradient of both, as ops."""

# Shapes.  S source rows   R pairs in expert order   e experts   D model width   F expert width
#          O rows of the first weight: 2F of a gated activation, else F

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fold_kernels.activation import ACTIVATIONS, GATED, differentiate
from fold_kernels.backend import Request, choose_for
from fold_kernels.ops import checks
from fold_kernels.ops.products import Side, grouped_gemm, grouped_gemm_ref, owners, weight_gradient
from fold_kernels.ops.rows import combine_rows, gather_rows_ref, pairs_of


def up_projection(
    source_SD: Tensor,
    weight_eOD: Tensor,
    scale_R: Tensor,
    offsets_e1: Tensor,
    *,
    activation: str = "swiglu",
    origin_R: Tensor | None = None,
    bias_eO: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pre-activation [R, O], and activation times routing weight [R, F].

    Args:
        source_SD: Rows, each once, or in expert order without `origin_R`.
        weight_eOD: First weights, gate half then up half, dtype of the rows.
        scale_R: fp32, routing weight of every pair.
        offsets_e1: int32, where each expert's pairs begin.
        activation: Name in `fold_kernels.activation.ACTIVATIONS`.
        origin_R: int64, row of every pair.
        bias_eO: Added before the activation.

    Returns:
        hidden_RO: Rounded; the activation is computed from it. Carries no gradient.
        act_RF: Rounded once; carries gradients to rows, weights, routing weights and bias.

    Raises:
        ValueError: Shapes do not fit, or the activation has no name here.
    """
    op = "up_projection"
    _check_name(op, activation)
    checks.weights_of(op, "weight_eOD", weight_eOD, source_SD)
    experts, depth, model = weight_eOD.shape
    if activation in GATED and depth % 2:
        raise ValueError(f"{op}: weight_eOD has {depth} rows, no two halves of {activation}")
    checks.matrix(op, "source_SD", source_SD, width=model)
    pairs = scale_R.shape[0] if origin_R is not None and scale_R.dim() == 1 else source_SD.shape[0]
    scale_R = checks.factors(op, "scale_R", scale_R, pairs)
    offsets_e1 = checks.offsets(op, offsets_e1, experts)
    if origin_R is not None:
        origin_R = checks.indices(op, "origin_R", origin_R, pairs)
    if bias_eO is not None:
        bias_eO = checks.biases(op, "bias_eO", bias_eO, experts, depth)
    hidden_RO, act_RF = _up_projection(
        source_SD.contiguous(),
        weight_eOD.contiguous(),
        scale_R.float(),
        offsets_e1,
        activation,
        origin_R,
        bias_eO,
    )
    return hidden_RO, act_RF


def down_backward(
    grad_SD: Tensor,
    weight_eDF: Tensor,
    hidden_RO: Tensor,
    scale_R: Tensor,
    offsets_e1: Tensor,
    *,
    activation: str = "swiglu",
    origin_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through the second product and the activation.

    Args:
        grad_SD: Gradient of the sums, or of the rows in expert order without `origin_R`.
        weight_eDF: Second weights.
        hidden_RO: Pre-activation that `up_projection` gave.
        scale_R: fp32, routing weight of every pair.
        offsets_e1: int32, where each expert's pairs begin.
        activation: Name in `fold_kernels.activation.ACTIVATIONS`.
        origin_R: int64, row of every pair.

    Returns:
        grad_hidden_RO: Gradient of the pre-activation.
        act_RF: Weighted activation, for the second weight's gradient.
        grad_scale_R: fp32, gradient of the routing weights.

    Raises:
        ValueError: Shapes or dtypes do not fit, or the activation has no name here.
    """
    op = "down_backward"
    _check_name(op, activation)
    checks.weights_of(op, "weight_eDF", weight_eDF, grad_SD)
    experts, model, width = weight_eDF.shape
    depth = 2 * width if activation in GATED else width
    checks.matrix(op, "grad_SD", grad_SD, width=model)
    checks.matrix(op, "hidden_RO", hidden_RO, width=depth)
    pairs = hidden_RO.shape[0]
    scale_R = checks.factors(op, "scale_R", scale_R, pairs)
    offsets_e1 = checks.offsets(op, offsets_e1, experts)
    if origin_R is not None:
        origin_R = checks.indices(op, "origin_R", origin_R, pairs)
    elif grad_SD.shape[0] != pairs:
        raise ValueError(f"{op}: {grad_SD.shape[0]} rows of gradients meet {pairs} pairs")
    grad_RO, act_RF, grad_R = _down_backward(
        grad_SD.contiguous(),
        weight_eDF.contiguous(),
        hidden_RO.contiguous(),
        scale_R.float(),
        offsets_e1,
        activation,
        origin_R,
    )
    return grad_RO, act_RF, grad_R


@torch.library.custom_op("fold_kernels::up_projection", mutates_args=())
def _up_projection(
    source: Tensor,
    weight: Tensor,
    scale: Tensor,
    offsets: Tensor,
    activation: str,
    origin: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    widths = weight.shape[2], _width(weight.shape[1], activation)
    if _runs_triton("up", source, scale, weight.shape[0], widths):
        from fold_kernels.gpu.launch import tile_for
        from fold_kernels.gpu.up import up as run

        width = _width(weight.shape[1], activation)
        tile = tile_for(scale, "up", experts=weight.shape[0], width=width)
        return run(
            source, weight, scale, offsets, tile, gate=activation, origin_R=origin, bias_eO=bias
        )
    return up_projection_ref(source, weight, scale, offsets, activation, origin, bias)


def up_projection_ref(
    source_SD: Tensor,
    weight_eOD: Tensor,
    scale_R: Tensor,
    offsets_e1: Tensor,
    activation: str,
    origin_R: Tensor | None = None,
    bias_eO: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather, multiply, activate."""
    rows_RD = source_SD if origin_R is None else gather_rows_ref(source_SD, origin_R)
    ones = None if bias_eO is None else torch.ones_like(scale_R)
    hidden_RO = grouped_gemm_ref(rows_RD, weight_eOD, offsets_e1, False, bias_eO, ones)
    act_RF = ACTIVATIONS[activation](_wide(hidden_RO)) * scale_R.unsqueeze(1)
    return hidden_RO, act_RF.to(hidden_RO.dtype)


@torch.library.custom_op("fold_kernels::down_backward", mutates_args=())
def _down_backward(
    grad: Tensor,
    weight: Tensor,
    hidden: Tensor,
    scale: Tensor,
    offsets: Tensor,
    activation: str,
    origin: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if _runs_triton("down_backward", grad, scale, weight.shape[0], tuple(weight.shape[1:])):
        from fold_kernels.gpu.down_backward import down_backward as run
        from fold_kernels.gpu.launch import tile_for

        experts, width = weight.shape[0], weight.shape[2]
        tile = tile_for(hidden, "down_backward", experts=experts, width=width)
        return run(grad, weight, hidden, scale, offsets, tile, gate=activation, origin_R=origin)
    return down_backward_ref(grad, weight, hidden, scale, offsets, activation, origin)


def down_backward_ref(
    grad_SD: Tensor,
    weight_eDF: Tensor,
    hidden_RO: Tensor,
    scale_R: Tensor,
    offsets_e1: Tensor,
    activation: str,
    origin_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather, multiply by the second weight, differentiate the activation."""
    grad_RD = grad_SD if origin_R is None else gather_rows_ref(grad_SD, origin_R)
    grad_RF = _wide(grouped_gemm_ref(grad_RD, weight_eDF, offsets_e1, True))
    grad_hidden, act, grad_scale = activation_backward_ref(hidden_RO, scale_R, grad_RF, activation)
    return grad_hidden, act.to(hidden_RO.dtype), grad_scale


def activation_backward_ref(
    hidden_RO: Tensor, scale_R: Tensor, grad_RF: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the pre-activation, weighted activation, gradient of the routing weights."""
    wide, scale_R1 = _wide(hidden_RO), scale_R.unsqueeze(1)
    plain = ACTIVATIONS[activation](wide)
    grad_hidden = differentiate(activation, wide, grad_RF * scale_R1)
    return grad_hidden.to(hidden_RO.dtype), plain * scale_R1, (plain * grad_RF).sum(1)


@_up_projection.register_fake
def _(
    source: Tensor, weight: Tensor, scale: Tensor, offsets: Tensor, activation: str, *_: Any
) -> tuple[Tensor, Tensor]:
    pairs, depth = scale.shape[0], weight.shape[1]
    return source.new_empty(pairs, depth), source.new_empty(pairs, _width(depth, activation))


@_down_backward.register_fake
def _(
    grad: Tensor, weight: Tensor, hidden: Tensor, scale: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    act = hidden.new_empty(hidden.shape[0], weight.shape[2])
    return torch.empty_like(hidden), act, torch.empty_like(scale)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    source, weight, scale, offsets, ctx.activation, origin, bias = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(source, weight, scale, offsets, origin, bias, output[0])


def _backward(ctx: Any, _: Tensor | None, grad_act: Tensor) -> tuple[Tensor | None, ...]:
    source, weight, scale, offsets, origin, bias, hidden = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad_hidden, _act, grad_scale = activation_backward_ref(
        hidden, scale, _wide(grad_act), ctx.activation
    )
    # Rows behind the last offset hold anything; they have no gradient.
    inside = (owners(offsets, scale.shape[0]) < weight.shape[0]).unsqueeze(1)
    grad_hidden = grad_hidden.where(inside, 0)
    grad_scale = grad_scale.where(inside.squeeze(1), 0)
    grad_source = grad_weight = grad_bias = None
    if needs[0]:
        grad_source = grouped_gemm(grad_hidden, weight, offsets, transposed=True)
        grad_source = grad_source.where(inside, 0)
        if origin is not None:
            grad_source = combine_rows(grad_source, *pairs_of(origin, source.shape[0]))
    if needs[1]:
        side: Side = "" if origin is None else "right"
        grad_weight = weight_gradient(
            grad_hidden, source, offsets, origin_R=origin, gather=side, dtype=weight.dtype
        )
    if bias is not None and needs[6]:
        own = torch.arange(scale.shape[0], device=scale.device)
        grad_bias = combine_rows(grad_hidden, own, offsets.long()).to(bias.dtype)
    return grad_source, grad_weight, grad_scale, None, None, None, grad_bias


_up_projection.register_autograd(_backward, setup_context=_setup)


def _runs_triton(
    op: str, rows: Tensor, scale_R: Tensor, experts: int, widths: tuple[int, ...]
) -> bool:
    # As for their tiles: kinds of shapes go by pairs and by the width of the experts.
    request = Request.of(op, rows, widths, rows=scale_R.shape[0], experts=experts)
    return choose_for(rows, request).backend == "triton"


def _width(depth: int, activation: str) -> int:
    return depth // 2 if activation in GATED else depth


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_name(op: str, activation: str) -> None:
    if activation not in ACTIVATIONS:
        legal = ", ".join(ACTIVATIONS)
        raise ValueError(f"{op}: activation={activation!r} must be one of {legal}.")
