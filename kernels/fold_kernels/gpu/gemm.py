"""Grouped GEMM: the rows of each expert times its weight, or times its transpose.

Persistent programs walk the tile map; operands come through TMA descriptors made on the host. A
tile may read rows of the next expert or poisoned rows behind the last: each spoils its own row of
the result alone, and the store is masked by the expert's end.
"""

# Shapes.  R rows in expert order   e experts   K input width   N output width

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fold_kernels.gpu.launch import num_programs
from fold_kernels.gpu.tiles import locate, tile_map
from fold_kernels.tables import Tile


@triton.jit
def gemm_kernel(
    rows_desc,  # [R, K], in
    weight_desc,  # [e, N, K], or [e, K, N] with NN, in
    out_ptr,  # [R, N], out
    bias_ptr,  # [e, N], in; with HAS_BIAS
    scale_ptr,  # [R] fp32, multiplies the bias, in; with HAS_BIAS
    offsets_ptr,  # [e + 1] int32, in
    tiles_ptr,  # [M] int32, in
    num_tiles_ptr,  # [1] int32, in
    N,
    K,
    NN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles = tl.load(num_tiles_ptr)
    column_tiles = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        expert, tile_m, tile_n = locate(tile, tiles_ptr, row_tiles, column_tiles, GROUP)
        first = tl.load(offsets_ptr + expert) + tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if HAS_BIAS:
            # Added first: behind the products it would need registers that the accumulator holds.
            row = first + tl.arange(0, BLOCK_M)
            n = column + tl.arange(0, BLOCK_N)
            bias = tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n < N, other=0.0)
            valid = row < tl.load(offsets_ptr + expert + 1)
            scale = tl.load(scale_ptr + row, mask=valid, other=0.0)
            acc += scale[:, None] * bias.to(tl.float32)[None, :]
        for k in tl.range(0, K, BLOCK_K):
            rows = rows_desc.load([first, k])
            if NN:
                weight = weight_desc.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N)
                acc = tl.dot(rows, weight, acc, input_precision="ieee")
            else:
                weight = weight_desc.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K)
                acc = tl.dot(rows, weight.T, acc, input_precision="ieee")
        row = first + tl.arange(0, BLOCK_M)
        n = column + tl.arange(0, BLOCK_N)
        valid = row < tl.load(offsets_ptr + expert + 1)
        target = out_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
        mask = valid[:, None] & (n < N)[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)


def gemm(
    rows_RK: Tensor,
    weight: Tensor,
    offsets_e1: Tensor,
    tile: Tile,
    *,
    transposed: bool = False,
    bias_eN: Tensor | None = None,
    scale_R: Tensor | None = None,
) -> Tensor:
    """Multiply, [R, K] to [R, N]; rows behind the last offset are left as found.

    Args:
        rows_RK: bf16, fp16 or fp32; contiguous.
        weight: [e, N, K], or [e, K, N] if `transposed`; contiguous.
        offsets_e1: int32, where each expert's rows begin, and the end of the last.
        tile: How the work is cut.
        transposed: Whether rows meet the weight itself rather than its transpose.
        bias_eN: Added to the rows of each expert.
        scale_R: fp32, multiplies the bias of each row; needed with `bias_eN`.
    """
    num_rows, depth = rows_RK.shape
    width = weight.shape[2] if transposed else weight.shape[1]
    out_RN = rows_RK.new_empty(num_rows, width)
    if out_RN.numel() == 0:
        return out_RN
    tiles_M, num_tiles = tile_map(offsets_e1, num_rows, tile.m)
    block = [1, tile.k, tile.n] if transposed else [1, tile.n, tile.k]
    programs = num_programs(rows_RK.device)
    gemm_kernel[(programs,)](
        TensorDescriptor.from_tensor(rows_RK, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(weight, block),
        out_RN,
        bias_eN,
        scale_R,
        offsets_e1,
        tiles_M,
        num_tiles,
        width,
        depth,
        NN=transposed,
        HAS_BIAS=bias_eN is not None,
        PROGRAMS=programs,
        **tile.options(),
    )
    return out_RN
