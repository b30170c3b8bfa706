"""Weight gradients: for each expert, its left rows transposed times its right rows.

Callable apart from everything else in backward, so that a pipeline can put it off. Either side may
be gathered; the index is loaded one step ahead, without which the gathered operand is not
pipelined (kernels.md 2b). Rows in expert order on both sides come through ragged descriptors,
which read zeros behind an expert's end; the gathering kernel masks both sides: poisoned rows of
other experts must not count, and zero times NaN is NaN. An expert without rows gets zeros.
"""

# Shapes.  R pairs in expert order   e experts   N columns of the left rows
#          K columns of the right rows

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from fold_kernels.gpu.launch import num_programs
from fold_kernels.gpu.tiles import columns
from fold_kernels.tables import Tile


@triton.jit
def write_gradient(
    acc,
    out_ptr,  # of the expert
    n,
    column,
    N,
    K,
    ACCUMULATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a tile, or add it; in parts, as the sum in one piece needs too many registers."""
    PARTS: tl.constexpr = 4
    width: tl.constexpr = BLOCK_K // PARTS
    parts = columns(acc, BLOCK_N, BLOCK_K, PARTS)
    for i in tl.static_range(PARTS):
        part = parts[i]
        k = column + i * width + tl.arange(0, width)
        target = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
        mask = (n < N)[:, None] & (k < K)[None, :]
        if ACCUMULATE:
            part += tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, part.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def wgrad_kernel(
    left_desc,  # [R, N] ragged, in
    right_desc,  # [R, K] ragged, in
    out_ptr,  # [e, N, K], out; inout with ACCUMULATE
    offsets_ptr,  # [e + 1] int32, in
    num_experts,
    N,
    K,
    ACCUMULATE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    across = tl.cdiv(K, BLOCK_K)
    per_expert = tl.cdiv(N, BLOCK_N) * across
    for tile in tl.range(tl.program_id(0), num_experts * per_expert, PROGRAMS):
        expert = tile // per_expert
        inside = tile % per_expert
        row = inside // across * BLOCK_N
        column = inside % across * BLOCK_K
        start = tl.load(offsets_ptr + expert)
        size = tl.load(offsets_ptr + expert + 1) - start
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for first in tl.range(0, size, BLOCK_M):
            left = load_ragged(left_desc, start, size, [first, row])
            right = load_ragged(right_desc, start, size, [first, column])
            acc = tl.dot(left.T, right, acc, input_precision="ieee")
        # `expert` is a plain number in the interpreter; a loaded offset makes it a tensor.
        own_ptr = out_ptr + (expert + start * 0).to(tl.int64) * N * K
        n = row + tl.arange(0, BLOCK_N)
        write_gradient(acc, own_ptr, n, column, N, K, ACCUMULATE, BLOCK_N, BLOCK_K)


@triton.jit
def wgrad_gather_kernel(
    left_ptr,  # [R or S, N], in
    right_ptr,  # [R or S, K], in
    origin_ptr,  # [R] int64, row of every pair on the gathered side, in
    out_ptr,  # [e, N, K], out; inout with ACCUMULATE
    offsets_ptr,  # [e + 1] int32, in
    num_experts,
    N,
    K,
    GATHER_LEFT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    across = tl.cdiv(K, BLOCK_K)
    per_expert = tl.cdiv(N, BLOCK_N) * across
    for tile in tl.range(tl.program_id(0), num_experts * per_expert, PROGRAMS):
        expert = tile // per_expert
        inside = tile % per_expert
        column = inside % across * BLOCK_K
        n = inside // across * BLOCK_N + tl.arange(0, BLOCK_N)
        k = column + tl.arange(0, BLOCK_K)
        start = tl.load(offsets_ptr + expert)
        stop = tl.load(offsets_ptr + expert + 1)
        step = tl.arange(0, BLOCK_M)
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        origin = tl.load(origin_ptr + start + step, mask=start + step < stop, other=0)
        for first in tl.range(start, stop, BLOCK_M):
            row = first + step
            valid = row < stop
            left_row = origin if GATHER_LEFT else row.to(tl.int64)
            right_row = row.to(tl.int64) if GATHER_LEFT else origin
            left = tl.load(
                left_ptr + left_row[:, None] * N + n[None, :],
                mask=valid[:, None] & (n < N)[None, :],
                other=0.0,
            )
            right = tl.load(
                right_ptr + right_row[:, None] * K + k[None, :],
                mask=valid[:, None] & (k < K)[None, :],
                other=0.0,
            )
            ahead = row + BLOCK_M
            origin = tl.load(origin_ptr + ahead, mask=ahead < stop, other=0)
            acc = tl.dot(left.T, right, acc, input_precision="ieee")
        own_ptr = out_ptr + (expert + start * 0).to(tl.int64) * N * K
        write_gradient(acc, own_ptr, n, column, N, K, ACCUMULATE, BLOCK_N, BLOCK_K)


def wgrad(
    left: Tensor,
    right: Tensor,
    offsets_e1: Tensor,
    tile: Tile,
    *,
    origin_R: Tensor | None = None,
    gather: str = "",
    into: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum over each expert's pairs of left row times right row, [e, N, K].

    Args:
        left: [R, N], or [S, N] if gathered; contiguous.
        right: [R, K], or [S, K] if gathered; contiguous.
        offsets_e1: int32, where each expert's pairs begin.
        tile: How the work is cut; its `m` counts rows of one step.
        origin_R: int64, row of every pair on the gathered side.
        gather: Which side is gathered: `left`, `right`, or neither.
        into: Gradient to add to. None makes a new one.
        dtype: Of a new one; None takes that of `left`.
    """
    experts, (n, k) = offsets_e1.shape[0] - 1, (left.shape[1], right.shape[1])
    # Zeros would be written twice: the kernel writes every element, also of an empty expert.
    out_eNK = left.new_empty(experts, n, k, dtype=dtype or left.dtype) if into is None else into
    if out_eNK.numel() == 0:
        return out_eNK
    options = {
        "ACCUMULATE": into is not None,
        "PROGRAMS": num_programs(left.device),
        **tile.options(),
    }
    grid, sizes = (options["PROGRAMS"],), (offsets_e1, experts, n, k)
    if gather:
        wgrad_gather_kernel[grid](
            left, right, origin_R, out_eNK, *sizes, GATHER_LEFT=gather == "left", **options
        )
        return out_eNK
    if left.shape[0] == 0:
        # A descriptor of no rows has no address.
        return out_eNK.zero_() if into is None else out_eNK
    wgrad_kernel[grid](
        create_ragged_descriptor(left, [tile.m, tile.n]),
        create_ragged_descriptor(right, [tile.m, tile.k]),
        out_eNK,
        *sizes,
        **options,
    )
    return out_eNK
