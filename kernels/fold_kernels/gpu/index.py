"""Order of routed rows by expert, without a sort: count in tiles, scan, rank in tiles.

Stable, so the order equals that of `torch.sort(stable=True)` bit for bit; rows of no expert (an id
outside of [0, E)) come last. Nothing synchronises.
"""

# Shapes.  N routed rows   E experts   P tiles of rows

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@triton.jit(do_not_specialize=["N"])
def count_kernel(
    ids_ptr,  # [N] int64, in
    counts_ptr,  # [P, E + 1] int64, out; rows of no expert in the last column
    N,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + row, mask=row < N, other=-1)
    ids = tl.where((ids >= 0) & (ids < NUM_EXPERTS), ids, NUM_EXPERTS).to(tl.int32)
    # Places behind the last row fall into a bin that nobody reads.
    ids = tl.where(row < N, ids, BINS - 1)
    counts = tl.histogram(ids, BINS)
    bins = tl.arange(0, BINS)
    place = tl.program_id(0).to(tl.int64) * (NUM_EXPERTS + 1) + bins
    tl.store(counts_ptr + place, counts.to(tl.int64), mask=bins <= NUM_EXPERTS)


@triton.jit(do_not_specialize=["N"])
def rank_kernel(
    ids_ptr,  # [N] int64, in
    starts_ptr,  # [P, E + 1] int64, place of each tile's first row of every expert, in
    order_ptr,  # [N] int64, out
    inverse_ptr,  # [N] int64, out
    N,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.arange(0, BLOCK)
    row = tl.program_id(0) * BLOCK + step
    ids = tl.load(ids_ptr + row, mask=row < N, other=-1)
    ids = tl.where((ids >= 0) & (ids < NUM_EXPERTS), ids, NUM_EXPERTS)
    before = (ids[:, None] == ids[None, :]) & (step[None, :] < step[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    base = tl.program_id(0).to(tl.int64) * (NUM_EXPERTS + 1)
    place = tl.load(starts_ptr + base + ids, mask=row < N, other=0) + rank
    tl.store(order_ptr + place, row.to(tl.int64), mask=row < N)
    tl.store(inverse_ptr + row, place, mask=row < N)


def expert_index(ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order [N], inverse [N] and counts [E], all int64. See `fold_kernels.permute.expert_index`."""
    rows = ids_N.shape[0]
    order_N, inverse_N = torch.empty_like(ids_N), torch.empty_like(ids_N)
    if rows == 0:
        return order_N, inverse_N, ids_N.new_zeros(num_experts)
    tiles = triton.cdiv(rows, BLOCK)
    counts_PE = ids_N.new_empty(tiles, num_experts + 1)
    bins = triton.next_power_of_2(num_experts + 2)
    count_kernel[(tiles,)](ids_N, counts_PE, rows, NUM_EXPERTS=num_experts, BINS=bins, BLOCK=BLOCK)
    ends_PE = counts_PE.cumsum(0)
    totals_E = ends_PE[-1]
    starts_PE = ends_PE - counts_PE + (totals_E.cumsum(0) - totals_E)
    rank_kernel[(tiles,)](
        ids_N, starts_PE, order_N, inverse_N, rows, NUM_EXPERTS=num_experts, BLOCK=BLOCK
    )
    return order_N, inverse_N, totals_E[:-1].contiguous()
