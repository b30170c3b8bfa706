"""Quantisation to fp8 and its grouped GEMM as ops; the plain forms emulate the kernels faithfully.

The same blocks, scales and roundings: values of one form are those of the other bit for bit, and
products differ by the order in which 128 numbers are added in fp32. No op here carries a gradient;
`fold_kernels.expert_fp8` says which product is the gradient of which.
"""

# Shapes.  R rows   e experts   K input width   N output width   b = 128, of which K and N hold B

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fold_kernels.backend import Request, choose_for
from fold_kernels.ops import checks
from fold_kernels.ops.products import owners
from fold_kernels.quantized import BLOCK, FP8, LARGEST, SMALLEST, Quantized

# What loses by being rounded to 4 significant bits; fp64 is asked for by those who want none lost.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize_rows(rows_RK: Tensor) -> Quantized:
    """Quantise rows, with a scale for every 128 numbers of a row.

    Args:
        rows_RK: bf16, fp16 or fp32; 128 divides K.

    Raises:
        ValueError: 128 does not divide the width, or there is no form for the dtype.
    """
    _check("quantize_rows", rows_RK, 2)
    rows_RK = rows_RK if rows_RK.stride(1) == 1 else rows_RK.contiguous()
    return Quantized(*_quantize_rows(rows_RK.detach()))


def quantize_blocks(weight_eNK: Tensor) -> Quantized:
    """Quantise weights, with a scale for every block of 128 x 128 numbers of an expert.

    Args:
        weight_eNK: bf16, fp16 or fp32, of any strides; 128 divides N and K.

    Raises:
        ValueError: 128 does not divide a width, or there is no form for the dtype.
    """
    _check("quantize_blocks", weight_eNK, 3)
    return Quantized(*_quantize_blocks(weight_eNK.detach()))


def fp8_grouped_gemm(
    rows: Quantized,
    weight: Quantized,
    offsets_e1: Tensor,
    *,
    dtype: torch.dtype,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Each expert's rows times the transpose of its weight, [R, N], summed in fp32.

    Args:
        rows: From `quantize_rows`, in expert order. Rows behind the last offset reach nothing; what
            stands in their place of the result is undefined.
        weight: From `quantize_blocks`, [e, N, K].
        offsets_e1: int32, where each expert's rows begin, and the end of the last.
        dtype: Of the result.
        sizes: Rows of each expert on the host, where they are known; kernels do without, and the
            plain form then multiplies no row by a weight that is not its own.

    Raises:
        ValueError: Shapes do not fit.
    """
    if rows.values.dim() != 2 or weight.values.dim() != 3:
        raise ValueError(
            f"fp8_grouped_gemm: rows {tuple(rows.values.shape)} are of `quantize_rows` and weights "
            f"{tuple(weight.values.shape)} of `quantize_blocks`. Change `rows` or `weight`."
        )
    experts, _, depth = weight.values.shape
    if rows.values.shape[1] != depth or offsets_e1.shape[0] != experts + 1:
        raise ValueError(
            f"fp8_grouped_gemm: rows {tuple(rows.values.shape)} and {offsets_e1.shape[0]} offsets "
            f"do not fit weights {tuple(weight.values.shape)}"
        )
    offsets_e1 = checks.offsets("fp8_grouped_gemm", offsets_e1, experts)
    host = None if sizes is None else list(sizes)
    if host is not None and (len(host) != experts or not 0 <= sum(host) <= rows.values.shape[0]):
        raise ValueError(
            f"fp8_grouped_gemm: sizes {host} are not {experts} counts of at most "
            f"{rows.values.shape[0]} rows together. Change `sizes`."
        )
    out: Tensor = _fp8_grouped_gemm(
        rows.values, rows.scales, weight.values, weight.scales, offsets_e1, dtype, host
    )
    return out


@torch.library.custom_op("fold_kernels::quantize_rows", mutates_args=())
def _quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    if _runs_triton("quantize_rows", rows, rows.shape[1:]):
        from fold_kernels.gpu.quantize import quantize_rows as run

        return _pair(run(rows))
    return _pair(quantize_rows_ref(rows))


def quantize_rows_ref(rows_RK: Tensor) -> Quantized:
    """Scale, then round to nearest even."""
    num_rows, width = rows_RK.shape
    blocks_RBb = rows_RK.float().view(num_rows, width // BLOCK, BLOCK)
    scales_RB1, inverse_RB1 = _scales(blocks_RBb.abs().amax(2, keepdim=True))
    values_RK = _rounded(blocks_RBb * inverse_RB1).view(num_rows, width)
    return Quantized(values_RK, scales_RB1.squeeze(2).T.contiguous())


@torch.library.custom_op("fold_kernels::quantize_blocks", mutates_args=())
def _quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    if _runs_triton("quantize_blocks", weight, weight.shape[1:]):
        from fold_kernels.gpu.quantize import quantize_blocks as run

        return _pair(run(weight))
    return _pair(quantize_blocks_ref(weight))


def quantize_blocks_ref(weight_eNK: Tensor) -> Quantized:
    """Scale, then round to nearest even."""
    experts, n, k = weight_eNK.shape
    cut = experts, n // BLOCK, BLOCK, k // BLOCK, BLOCK
    blocks = weight_eNK.float().contiguous().view(cut)
    scales, inverse = _scales(blocks.abs().amax((2, 4), keepdim=True))
    values_eNK = _rounded(blocks * inverse).view(experts, n, k)
    return Quantized(values_eNK, scales.view(experts, n // BLOCK, k // BLOCK))


@torch.library.custom_op("fold_kernels::fp8_grouped_gemm", mutates_args=())
def _fp8_grouped_gemm(
    rows: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    sizes: list[int] | None,
) -> Tensor:
    left, right = Quantized(rows, row_scales), Quantized(weight, weight_scales)
    if _runs_triton("fp8_grouped_gemm", rows, weight.shape[1:], experts=weight.shape[0]):
        from fold_kernels.gpu.fp8_gemm import fp8_gemm as run
        from fold_kernels.gpu.fp8_gemm import tile_of

        tile = tile_of(rows, experts=weight.shape[0])
        return run(left, right, offsets, tile, dtype=dtype)
    return fp8_grouped_gemm_ref(left, right, offsets, sizes).to(dtype)


def fp8_grouped_gemm_ref(
    rows: Quantized, weight: Quantized, offsets_e1: Tensor, sizes: Sequence[int] | None = None
) -> Tensor:
    """Every expert on its rows, or on all rows, of which it keeps its own; fp32."""
    num_rows, experts = rows.values.shape[0], weight.values.shape[0]
    out_RN = rows.scales.new_zeros(num_rows, weight.values.shape[1])
    if sizes is None:
        owner_R1 = owners(offsets_e1, num_rows).unsqueeze(1)
        for e in range(experts):
            out_RN = torch.where(owner_R1 == e, _product(rows, weight, e), out_RN)
        return out_RN
    first = 0
    for e, size in enumerate(sizes):
        own = slice(first, first + size)
        out_RN[own] = _product(Quantized(rows.values[own], rows.scales[:, own]), weight, e)
        first += size
    return out_RN


def _product(rows: Quantized, weight: Quantized, expert: int) -> Tensor:
    """Rows times one weight: a sum over blocks of the width, in their order."""
    values_NK = weight.values[expert]
    scales_NB = weight.scales[expert].repeat_interleave(BLOCK, dim=0)
    sums = rows.scales.new_zeros(rows.values.shape[0], values_NK.shape[0])
    for b, (left, right) in enumerate(
        zip(rows.values.split(BLOCK, 1), values_NK.split(BLOCK, 1), strict=True)
    ):
        scale = rows.scales[b].unsqueeze(1) * scales_NB[:, b]
        sums += (left.float() @ right.float().T) * scale
    return sums


@_quantize_rows.register_fake
def _(rows: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, width = rows.shape
    scales = rows.new_empty(width // BLOCK, num_rows, dtype=torch.float32)
    return rows.new_empty(num_rows, width, dtype=FP8), scales


@_quantize_blocks.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor]:
    experts, n, k = weight.shape
    scales = weight.new_empty(experts, n // BLOCK, k // BLOCK, dtype=torch.float32)
    return weight.new_empty(experts, n, k, dtype=FP8), scales


@_fp8_grouped_gemm.register_fake
def _(rows: Tensor, _1: Tensor, weight: Tensor, _2: Tensor, _3: Tensor, dtype: Any, _4: Any) -> Any:
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=dtype)


def _scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of blocks and their inverses, from the largest magnitudes."""
    scales = torch.where(amax.isfinite(), amax.clamp_min(SMALLEST), torch.nan) / LARGEST
    return scales, scales.reciprocal()


def _rounded(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(FP8)


def _pair(x: Quantized) -> tuple[Tensor, Tensor]:
    return x.values, x.scales


def _runs_triton(op: str, x: Tensor, widths: Sequence[int], *, experts: int = 1) -> bool:
    request = Request.of(op, x, widths, dtype=FP8, experts=experts)
    return choose_for(x, request).backend == "triton"


def _check(op: str, x: Tensor, dims: int) -> None:
    if x.dim() != dims:
        raise ValueError(f"{op}: {tuple(x.shape)} has {x.dim()} dimensions and must have {dims}")
    widths = x.shape[1:]
    odd = [width for width in widths if width % BLOCK]
    if odd:
        raise ValueError(f"{op}: {BLOCK} does not divide widths {odd} of {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        legal = ", ".join(map(str, DTYPES))
        raise ValueError(f"{op}: there is no form for {x.dtype}. Legal: {legal}.")
