"""Which tile of rows belongs to which expert: the walk that all grouped kernels share.

Rows lie in expert order and `offsets` says where each expert's begin. A tile is `BLOCK_M` rows of
one expert, packed as `expert << 20 | tile of the expert` into int32. How many tiles there are is
known on the device alone; the host knows a bound, ceil(R / BLOCK_M) + e, so nothing synchronises.
"""

# Shapes.  R rows in expert order   e experts   M bound of the number of tiles

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@triton.jit(do_not_specialize=["max_tiles"])
def tile_map_kernel(
    offsets_ptr,  # [e + 1] int32, in
    tiles_ptr,  # [M] int32, out
    num_tiles_ptr,  # [1] int32, out
    num_experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS)
    known = expert < num_experts
    start = tl.load(offsets_ptr + expert, mask=known, other=0)
    stop = tl.load(offsets_ptr + expert + 1, mask=known, other=0)
    tiles = (stop - start + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The expert of a tile: as many experts end at or before it.
    before = end[None, :] <= index[:, None]
    owner = tl.sum(before.to(tl.int32), 1)
    first = tl.max(tl.where(before, end[None, :], 0), 1)
    tl.store(tiles_ptr + index, (owner << 20) | (index - first), mask=index < max_tiles)


@triton.jit
def locate(
    tile,
    tiles_ptr,
    num_row_tiles,
    num_column_tiles,
    GROUP: tl.constexpr,
):
    """Expert, tile of its rows, and tile of columns of the `tile`-th of all.

    `GROUP` tiles of rows walk the columns together: neighbours read the same weights from L2.
    """
    per_group = GROUP * num_column_tiles
    first = tile // per_group * GROUP
    inside = tile % per_group
    height = tl.minimum(num_row_tiles - first, GROUP)
    packed = tl.load(tiles_ptr + first + inside % height)
    return packed >> 20, packed & 0xFFFFF, inside // height


@triton.jit
def halves(x, M: tl.constexpr, N: tl.constexpr):
    """Left and right half of the columns of a block."""
    return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def columns(x, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """Columns of a block in 2 or 4 parts, from the left.

    An epilogue on one part after the other needs far fewer registers than on the whole.
    """
    tl.static_assert(PARTS == 2 or PARTS == 4, "2 or 4 parts")
    parts = halves(x, M, N)
    if PARTS == 4:
        parts = halves(parts[0], M, N // 2) + halves(parts[1], M, N // 2)
    return parts


def max_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Bound of the number of tiles."""
    return triton.cdiv(num_rows, block_m) + num_experts


def tile_map(offsets_e1: Tensor, num_rows: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Packed tiles [M] and how many of them count [1], both int32. No synchronisation."""
    num_experts = offsets_e1.shape[0] - 1
    bound = max_tiles(num_rows, num_experts, block_m)
    tiles_M = offsets_e1.new_empty(bound)
    num_tiles = offsets_e1.new_empty(1)
    experts = triton.next_power_of_2(num_experts)
    # The compare of a block with all experts stays in registers.
    block = max(1, min(BLOCK, 1 << 13 >> (experts.bit_length() - 1)))
    tile_map_kernel[(triton.cdiv(bound, block),)](
        offsets_e1,
        tiles_M,
        num_tiles,
        num_experts,
        bound,
        BLOCK_M=block_m,
        EXPERTS=experts,
        BLOCK=block,
    )
    return tiles_M, num_tiles


def tile_map_ref(offsets_e1: Tensor, num_rows: int, block_m: int) -> tuple[Tensor, Tensor]:
    """The plain form of `tile_map`; entries that do not count may differ."""
    num_experts = offsets_e1.shape[0] - 1
    tiles_e = (offsets_e1.diff() + block_m - 1) // block_m
    end_e = tiles_e.cumsum(0)
    index_M = torch.arange(
        max_tiles(num_rows, num_experts, block_m), dtype=torch.int32, device=offsets_e1.device
    )
    owner_M = torch.searchsorted(end_e, index_M, right=True).clamp(max=num_experts - 1)
    first_M = (end_e - tiles_e)[owner_M]
    return ((owner_M << 20) | (index_M - first_M)).int(), end_e[-1:].int()
