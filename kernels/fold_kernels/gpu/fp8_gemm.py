"""Grouped GEMM in fp8: the quantised rows of each expert times its quantised weight.

The walk is that of `gemm.py`. Hopper adds products of fp8 with about 14 bits (DeepGEMM #37), so no
more than 128 of them are added there: each step of 128 columns is one product, whose result is
scaled and added in fp32. Both operands lie with the summed width contiguous, the one layout that
its fp8 instructions take.
"""

# Shapes.  R rows in expert order   e experts   K input width   N output width   b = 128

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fold_kernels.gpu.launch import num_programs
from fold_kernels.gpu.tiles import locate, tile_map
from fold_kernels.quantized import BLOCK, Quantized
from fold_kernels.tables import FEW_ROWS, Tile

# Spill-free on sm_90 with Triton 3.6.0 and 3.7.0; never timed. Their depth is the block of the
# scales, and their columns have to lie in one.
MANY = Tile(128, 128, BLOCK, stages=4, warps=8)
FEW = Tile(64, 128, BLOCK, stages=4, warps=4)
# Small, since the interpreter computes a tile in Python.
INTERPRETED_TILE = Tile(16, 64, BLOCK, stages=2, warps=4, group=2)


@triton.jit(do_not_specialize=["num_rows"])
def fp8_gemm_kernel(
    rows_desc,  # [R, K] e4m3, in
    row_scales_ptr,  # [K / b, R] fp32, in
    weight_desc,  # [e, N, K] e4m3, in
    weight_scales_ptr,  # [e, N / b, K / b] fp32, in
    out_ptr,  # [R, N], out
    offsets_ptr,  # [e + 1] int32, in
    tiles_ptr,  # [M] int32, in
    num_tiles_ptr,  # [1] int32, in
    num_rows,
    N,
    K,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tl.static_assert(BLOCK_K == 128, "a step is as deep as a block of the scales")
    tl.static_assert(BLOCK_K % BLOCK_N == 0, "the columns of a tile share one scale")
    row_tiles = tl.load(num_tiles_ptr)
    column_tiles = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        expert, tile_m, tile_n = locate(tile, tiles_ptr, row_tiles, column_tiles, GROUP)
        first = tl.load(offsets_ptr + expert) + tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        row = first + tl.arange(0, BLOCK_M)
        valid = row < tl.load(offsets_ptr + expert + 1)
        row_scales = row_scales_ptr + row
        block = expert.to(tl.int64) * (N // BLOCK_K) + column // BLOCK_K
        weight_scales = weight_scales_ptr + block * (K // BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        scale = tl.load(row_scales, mask=valid, other=0.0) * tl.load(weight_scales)
        for k in tl.range(0, K, BLOCK_K):
            rows = rows_desc.load([first, k])
            weight = weight_desc.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K)
            acc += tl.dot(rows, weight.T) * scale[:, None]
            # Loaded one step ahead: only operands of products are pipelined.
            row_scales += num_rows
            weight_scales += 1
            more = k + BLOCK_K < K
            scale = tl.load(row_scales, mask=valid & more, other=0.0)
            scale *= tl.load(weight_scales, mask=more, other=0.0)
        n = column + tl.arange(0, BLOCK_N)
        target = out_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None])


def tile_of(rows: Tensor, *, experts: int) -> Tile:
    """How the work is cut for so many rows of so many experts."""
    if rows.device.type != "cuda":
        return INTERPRETED_TILE
    return FEW if rows.shape[0] < FEW_ROWS * experts else MANY


def fp8_gemm(
    rows: Quantized, weight: Quantized, offsets_e1: Tensor, tile: Tile, *, dtype: torch.dtype
) -> Tensor:
    """Multiply, [R, K] to [R, N]; rows behind the last offset are left as found.

    Args:
        rows: [R, K].
        weight: [e, N, K].
        offsets_e1: int32, where each expert's rows begin, and the end of the last.
        tile: How the work is cut; `k` is 128, which `n` divides.
        dtype: Of the result.
    """
    num_rows, depth = rows.values.shape
    width = weight.values.shape[1]
    out_RN = rows.values.new_empty(num_rows, width, dtype=dtype)
    if out_RN.numel() == 0:
        return out_RN
    tiles_M, num_tiles = tile_map(offsets_e1, num_rows, tile.m)
    programs = num_programs(rows.values.device)
    fp8_gemm_kernel[(programs,)](
        TensorDescriptor.from_tensor(rows.values, [tile.m, tile.k]),
        rows.scales,
        TensorDescriptor.from_tensor(weight.values, [1, tile.n, tile.k]),
        weight.scales,
        out_RN,
        offsets_e1,
        tiles_M,
        num_tiles,
        num_rows,
        width,
        depth,
        PROGRAMS=programs,
        **tile.options(),
    )
    return out_RN
