"""Quantisation to fp8: rows by 1 x 128 blocks, weights by 128 x 128 blocks.

Bound by memory: every number is read once and written once. The width that products sum over
comes out contiguous, whatever the strides that come in: Hopper multiplies fp8 in that layout alone,
so a transposed weight is quantised from the weight as it lies.
"""

# Shapes.  R rows   e experts   N output width   K width that is summed over   b = 128

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fold_kernels.quantized import BLOCK, FP8, Quantized

# Rows of one program of `quantize_rows`.
ROWS = 32


@triton.jit
def magnitude(x):
    """|x| as the integer of its bits, which has the same order, and NaN above Inf above all."""
    # A maximum of floats would lose a NaN.
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest):
    """Scale of a block and its inverse, from its largest `magnitude`; NaN if that is no number."""
    amax = largest.to(tl.float32, bitcast=True)
    amax = tl.where(amax < float("inf"), tl.maximum(amax, 1e-30), float("nan"))
    # The plain operator divides by an approximation.
    scale = tl.div_rn(amax, 448.0)
    return scale, tl.div_rn(1.0, scale)


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    rows_ptr,  # [R, K], in
    values_ptr,  # [R, K] e4m3, out
    scales_ptr,  # [K / b, R] fp32, out
    num_rows,
    K,
    stride,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    k = block * BLOCK + tl.arange(0, BLOCK)
    valid = row < num_rows
    place = row.to(tl.int64)
    source = rows_ptr + place[:, None] * stride + k[None, :]
    x = tl.load(source, mask=valid[:, None], other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(magnitude(x), 1))
    values = (x * inverse[:, None]).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + place[:, None] * K + k[None, :], values, mask=valid[:, None])
    tl.store(scales_ptr + block.to(tl.int64) * num_rows + row, scale, mask=valid)


@triton.jit
def quantize_blocks_kernel(
    weight_ptr,  # [e, N, K], in
    values_ptr,  # [e, N, K] e4m3, out
    scales_ptr,  # [e, N / b, K / b] fp32, out
    N,
    K,
    stride_e,
    stride_n,
    stride_k,
    BLOCK: tl.constexpr,
):
    down = N // BLOCK
    expert = (tl.program_id(0) // down).to(tl.int64)
    n = (tl.program_id(0) % down * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    k = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    source = weight_ptr + expert * stride_e + n[:, None] * stride_n + k[None, :] * stride_k
    x = tl.load(source).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.max(magnitude(x), 1), 0))
    values = (x * inverse).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + expert * N * K + n[:, None] * K + k[None, :], values)
    tl.store(scales_ptr + tl.program_id(0).to(tl.int64) * (K // BLOCK) + tl.program_id(1), scale)


def quantize_rows(rows_RK: Tensor) -> Quantized:
    """Quantise rows of contiguous numbers, one scale for every 128 of a row."""
    num_rows, width = rows_RK.shape
    out = Quantized(
        rows_RK.new_empty(num_rows, width, dtype=FP8),
        rows_RK.new_empty(width // BLOCK, num_rows, dtype=torch.float32),
    )
    if out.values.numel() > 0:
        quantize_rows_kernel[(triton.cdiv(num_rows, ROWS), width // BLOCK)](
            rows_RK,
            out.values,
            out.scales,
            num_rows,
            width,
            rows_RK.stride(0),
            BLOCK=BLOCK,
            ROWS=ROWS,
            num_warps=4,
        )
    return out


def quantize_blocks(weight_eNK: Tensor) -> Quantized:
    """Quantise weights of any strides, one scale for every block of 128 x 128."""
    experts, n, k = weight_eNK.shape
    out = Quantized(
        weight_eNK.new_empty(experts, n, k, dtype=FP8),
        weight_eNK.new_empty(experts, n // BLOCK, k // BLOCK, dtype=torch.float32),
    )
    if out.values.numel() > 0:
        quantize_blocks_kernel[(experts * (n // BLOCK), k // BLOCK)](
            weight_eNK,
            out.values,
            out.scales,
            n,
            k,
            *weight_eNK.stride(),
            BLOCK=BLOCK,
            num_warps=8,
        )
    return out
