"""Copy rows out and sum them back: both gathers, in forward and backward.

A sum reads its rows in a fixed order and is rounded once, so reruns agree bit for bit; scatters
with atomics do neither. Both are bound by memory.
"""

# Shapes.  S sums or source rows   R rows   D width

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Elements that one program copies at a time; 36 registers without a spill up to 4096.
MAX_BLOCK = 2048


@triton.jit
def combine_kernel(
    rows_ptr,  # [R, D], in
    pairs_ptr,  # [R] int64, rows of the sums one after the other, negative for none, in
    starts_ptr,  # [S + 1] int64, where the rows of each sum begin in `pairs`, in
    scale_ptr,  # [R] fp32, by place in `pairs`, in; with HAS_SCALE
    out_ptr,  # [S, D], out
    D,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Sums are counted by the first axis of the grid: the second ends at 65535.
    index = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    start = tl.load(starts_ptr + index).to(tl.int64)
    stop = tl.load(starts_ptr + index + 1).to(tl.int64)
    for place in tl.range(start, stop):
        row = tl.load(pairs_ptr + place).to(tl.int64)
        # A select, not a factor of zero: the row may hold NaN.
        value = tl.load(rows_ptr + row * D + d, mask=(d < D) & (row >= 0), other=0.0)
        value = value.to(tl.float32)
        if HAS_SCALE:
            value = value * tl.load(scale_ptr + place)
        acc += value
    tl.store(out_ptr + index * D + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def gather_kernel(
    source_ptr,  # [S, D], in
    origin_ptr,  # [R] int64, row of the source, negative for zeros, in
    out_ptr,  # [R, D], out
    D,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(origin_ptr + index).to(tl.int64)
    value = tl.load(source_ptr + row * D + d, mask=(d < D) & (row >= 0), other=0.0)
    tl.store(out_ptr + index * D + d, value, mask=d < D)


def combine(
    rows_RD: Tensor, pairs_R: Tensor, starts_S1: Tensor, scale_R: Tensor | None = None
) -> Tensor:
    """Sum the rows of every place, [S, D]: fp32 inside, zeros where there are none.

    Args:
        rows_RD: Contiguous.
        pairs_R: int64, the rows of the first sum, then of the second; negative for none.
        starts_S1: int64, where each sum's begin, and the end of the last.
        scale_R: fp32, factor of every row, in the order of `pairs_R`.
    """
    sums, width = starts_S1.shape[0] - 1, rows_RD.shape[1]
    out_SD = rows_RD.new_empty(sums, width)
    if out_SD.numel() == 0:
        return out_SD
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    combine_kernel[(sums, triton.cdiv(width, block))](
        rows_RD,
        pairs_R,
        starts_S1,
        scale_R,
        out_SD,
        width,
        HAS_SCALE=scale_R is not None,
        BLOCK=block,
    )
    return out_SD


def gather(source_SD: Tensor, origin_R: Tensor) -> Tensor:
    """Copy rows, [R, D]; zeros where the origin is negative."""
    pairs, width = origin_R.shape[0], source_SD.shape[1]
    out_RD = source_SD.new_empty(pairs, width)
    if out_RD.numel() == 0:
        return out_RD
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    gather_kernel[(pairs, triton.cdiv(width, block))](
        source_SD, origin_R, out_RD, width, BLOCK=block
    )
    return out_RD
