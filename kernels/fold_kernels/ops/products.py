"""Grouped GEMM and its weight gradient as ops; the second can be called apart and later."""

# Shapes.  R rows in expert order   S source rows   e experts   K input width   N output width

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fold_kernels.backend import Request, choose_for
from fold_kernels.ops import checks
from fold_kernels.ops.rows import combine_rows, gather_rows_ref

Side = Literal["left", "right", ""]
_SIDES = get_args(Side)


def grouped_gemm(
    rows_RK: Tensor,
    weight: Tensor,
    offsets_e1: Tensor,
    *,
    transposed: bool = False,
    bias_eN: Tensor | None = None,
    scale_R: Tensor | None = None,
) -> Tensor:
    """Each expert's rows times the transpose of its weight, [R, N], in the dtype of the rows.

    Args:
        rows_RK: Rows in expert order. Rows behind the last offset reach nothing; what stands in
            their place of the result is undefined.
        weight: [e, N, K], or [e, K, N] if `transposed`; dtype of the rows.
        offsets_e1: int32, where each expert's rows begin, and the end of the last.
        transposed: Whether rows meet the weight itself.
        bias_eN: Added to the rows of each expert, times `scale_R`.
        scale_R: fp32; needed with `bias_eN`.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    op = "grouped_gemm"
    checks.weights_of(op, "weight", weight, rows_RK)
    experts, *both = weight.shape
    depth, width = both if transposed else reversed(both)
    checks.matrix(op, "rows_RK", rows_RK, width=depth)
    offsets_e1 = checks.offsets(op, offsets_e1, experts)
    if bias_eN is not None and scale_R is not None:
        bias_eN = checks.biases(op, "bias_eN", bias_eN, experts, width)
        scale_R = checks.factors(op, "scale_R", scale_R, rows_RK.shape[0])
    elif bias_eN is not None or scale_R is not None:
        raise ValueError("grouped_gemm: bias_eN and scale_R go together")
    out: Tensor = _grouped_gemm(
        rows_RK.contiguous(), weight.contiguous(), offsets_e1, transposed, bias_eN, scale_R
    )
    return out


def weight_gradient(
    left: Tensor,
    right: Tensor,
    offsets_e1: Tensor,
    *,
    origin_R: Tensor | None = None,
    gather: Side = "",
    into: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum over each expert's pairs of left row times right row, [e, N, K].

    Args:
        left: [R, N], or [S, N] if it is gathered.
        right: [R, K], or [S, K] if it is gathered.
        offsets_e1: int32, where each expert's pairs begin. Rows behind the last reach nothing.
        origin_R: int64, row of every pair on the gathered side.
        gather: Which side is gathered, if any.
        into: Gradient to add to, in place, and to return. None, the default, makes a new one:
            FSDP2 owns the gradient, and a sum made twice would double it.
        dtype: Of a new one; None takes that of `left`.

    Raises:
        ValueError: `gather` without `origin_R`, or shapes or dtypes that do not fit.
    """
    op = "weight_gradient"
    if gather not in _SIDES:
        raise ValueError(f"{op}: gather={gather!r} must be 'left', 'right' or ''. Change `gather`.")
    if (gather != "") != (origin_R is not None):
        raise ValueError(f"{op}: gather={gather!r} goes with origin_R, and only with it")
    checks.matrix(op, "left", left)
    checks.matrix(op, "right", right)
    if left.dtype != right.dtype:
        raise ValueError(f"{op}: left is {left.dtype}, and right is {right.dtype}. Change either.")
    pairs = (right if gather == "left" else left).shape[0]
    if origin_R is None and right.shape[0] != pairs:
        raise ValueError(f"{op}: {pairs} rows on the left meet {right.shape[0]} on the right")
    if origin_R is not None:
        origin_R = checks.indices(op, "origin_R", origin_R, pairs)
    offsets_e1 = checks.offsets(op, offsets_e1)
    shape = offsets_e1.shape[0] - 1, left.shape[1], right.shape[1]
    if into is not None and into.shape != shape:
        raise ValueError(f"weight_gradient: into {tuple(into.shape)} is not {shape}")
    left, right = left.contiguous(), right.contiguous()
    if into is not None:
        _weight_gradient_into(into, left, right, offsets_e1, origin_R, gather)
        return into
    out: Tensor = _weight_gradient(left, right, offsets_e1, origin_R, gather, dtype or left.dtype)
    return out


@torch.library.custom_op("fold_kernels::grouped_gemm", mutates_args=())
def _grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    transposed: bool,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    width = weight.shape[2] if transposed else weight.shape[1]
    request = Request.of("gemm", rows, (rows.shape[1], width), experts=weight.shape[0])
    backend = choose_for(rows, request).backend
    if backend == "triton":
        from fold_kernels.gpu.gemm import gemm as run
        from fold_kernels.gpu.launch import tile_for

        tile = tile_for(rows, "gemm", experts=weight.shape[0], width=width)
        return run(rows, weight, offsets, tile, transposed=transposed, bias_eN=bias, scale_R=scale)
    if backend == "torch_grouped_mm" and rows.shape[0] > 0 and bias is None:
        operand = weight if transposed else weight.mT
        return torch.nn.functional.grouped_mm(rows, operand, offs=offsets[1:])
    return grouped_gemm_ref(rows, weight, offsets, transposed, bias, scale)


def grouped_gemm_ref(
    rows_RK: Tensor,
    weight: Tensor,
    offsets_e1: Tensor,
    transposed: bool = False,
    bias_eN: Tensor | None = None,
    scale_R: Tensor | None = None,
) -> Tensor:
    """Every expert on all rows, of which it keeps its own; zeros behind the last offset."""
    out_RN = rows_RK.new_zeros(rows_RK.shape[0], weight.shape[2 if transposed else 1])
    for e, mask_R1 in enumerate(_masks(offsets_e1, rows_RK.shape[0])):
        product = rows_RK @ (weight[e] if transposed else weight[e].T)
        if bias_eN is not None and scale_R is not None:
            product = (product + scale_R.unsqueeze(1) * bias_eN[e]).to(product.dtype)
        out_RN = torch.where(mask_R1, product, out_RN)
    return out_RN


@torch.library.custom_op("fold_kernels::weight_gradient", mutates_args=())
def _weight_gradient(
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    origin: Tensor | None,
    gather: str,
    dtype: torch.dtype,
) -> Tensor:
    if _wgrad_runs_triton(left, right, offsets):
        return _wgrad(left, right, offsets, origin, gather, None, dtype)
    return weight_gradient_ref(left, right, offsets, origin, gather).to(dtype)


@torch.library.custom_op("fold_kernels::weight_gradient_into", mutates_args=("into",))
def _weight_gradient_into(
    into: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    origin: Tensor | None,
    gather: str,
) -> None:
    if _wgrad_runs_triton(left, right, offsets) and into.is_contiguous():
        _wgrad(left, right, offsets, origin, gather, into, into.dtype)
    else:
        into.add_(weight_gradient_ref(left, right, offsets, origin, gather))


def weight_gradient_ref(
    left: Tensor, right: Tensor, offsets_e1: Tensor, origin_R: Tensor | None, gather: str
) -> Tensor:
    """Every expert on the pairs that are its own."""
    if origin_R is not None:
        left = gather_rows_ref(left, origin_R) if gather == "left" else left
        right = gather_rows_ref(right, origin_R) if gather == "right" else right
    masks = _masks(offsets_e1, left.shape[0])
    return torch.stack([left.where(mask, 0).T @ right.where(mask, 0) for mask in masks])


@_grouped_gemm.register_fake
def _(rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2] if transposed else weight.shape[1])


@_weight_gradient.register_fake
def _(
    left: Tensor, right: Tensor, offsets: Tensor, origin: Any, gather: str, dtype: torch.dtype
) -> Tensor:
    return left.new_empty(offsets.shape[0] - 1, left.shape[1], right.shape[1], dtype=dtype)


@_weight_gradient_into.register_fake
def _(*_: Any) -> None:
    return None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, offsets, ctx.transposed, bias, scale = inputs
    ctx.save_for_backward(rows, weight, offsets, bias, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, offsets, bias, scale = ctx.saved_tensors
    needs_rows, needs_weight, _, _, needs_bias, needs_scale = ctx.needs_input_grad
    grad = grad.contiguous()
    grad_rows = grad_weight = grad_bias = grad_scale = None
    if needs_rows:
        grad_rows = grouped_gemm(grad, weight, offsets, transposed=not ctx.transposed)
    if needs_weight:
        left, right = (rows, grad) if ctx.transposed else (grad, rows)
        grad_weight = weight_gradient(left, right, offsets, dtype=weight.dtype)
    if needs_bias:
        own = torch.arange(rows.shape[0], device=rows.device)
        grad_bias = combine_rows(grad, own, offsets.long(), scale).to(bias.dtype)
    if needs_scale:
        padded = torch.cat([bias, bias.new_zeros(1, bias.shape[1])])
        of_row = padded.index_select(0, owners(offsets, rows.shape[0]))
        grad_scale = (grad.float() * of_row.float()).sum(1)
    return grad_rows, grad_weight, None, None, grad_bias, grad_scale


_grouped_gemm.register_autograd(_backward, setup_context=_setup)


def owners(offsets_e1: Tensor, num_rows: int) -> Tensor:
    """Expert of every row, int64 [R]; e for rows behind the last offset."""
    rows = torch.arange(num_rows, device=offsets_e1.device, dtype=offsets_e1.dtype)
    return torch.searchsorted(offsets_e1[1:].contiguous(), rows, right=True)


def _masks(offsets_e1: Tensor, num_rows: int) -> list[Tensor]:
    owner_R1 = owners(offsets_e1, num_rows).unsqueeze(1)
    return [owner_R1 == e for e in range(offsets_e1.shape[0] - 1)]


def _wgrad_runs_triton(left: Tensor, right: Tensor, offsets: Tensor) -> bool:
    widths = left.shape[1], right.shape[1]
    request = Request.of("wgrad", left, widths, experts=offsets.shape[0] - 1)
    return choose_for(left, request).backend == "triton"


def _wgrad(
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    origin: Tensor | None,
    gather: str,
    into: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    from fold_kernels.gpu.launch import tile_for
    from fold_kernels.gpu.wgrad import wgrad as run

    tile = tile_for(left, "wgrad", experts=offsets.shape[0] - 1, width=right.shape[1])
    return run(left, right, offsets, tile, origin_R=origin, gather=gather, into=into, dtype=dtype)
