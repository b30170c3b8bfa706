"""First product of the experts: rows gathered in the load, the activation in the epilogue.

The activation is computed from the rounded pre-activation, which backward reads: it recomputes the
same bits. Gate and up halves have an accumulator each, so the weight keeps Hugging Face's layout.
"""

# Shapes.  S source rows   R pairs in expert order   e experts   D model width
#          F expert width   O rows of the first weight: 2F gated, F not

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fold_kernels.gpu.gates import GATES
from fold_kernels.gpu.launch import num_programs
from fold_kernels.gpu.tiles import locate, tile_map
from fold_kernels.tables import Tile


@triton.jit
def up_kernel(
    source_ptr,  # [S, D], in
    origin_ptr,  # [R] int64, row of the source of every pair, in; with GATHER
    weight_desc,  # [e, O, D], gate half then up half, in
    bias_ptr,  # [e, O], in; with HAS_BIAS
    scale_ptr,  # [R] fp32, routing weights, in
    hidden_ptr,  # [R, O], pre-activation, out
    act_ptr,  # [R, F], activation times routing weight, out
    offsets_ptr,  # [e + 1] int32, in
    tiles_ptr,  # [M] int32, in
    num_tiles_ptr,  # [1] int32, in
    F,
    D,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles = tl.load(num_tiles_ptr)
    column_tiles = tl.cdiv(F, BLOCK_N)
    depth = 2 * F if GATED else F
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        expert, tile_m, tile_n = locate(tile, tiles_ptr, row_tiles, column_tiles, GROUP)
        row = tl.load(offsets_ptr + expert) + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = row < tl.load(offsets_ptr + expert + 1)
        origin = row.to(tl.int64)
        if GATHER:
            origin = tl.load(origin_ptr + row, mask=valid, other=0).to(tl.int64)
        inner = tl.arange(0, BLOCK_K)
        source = source_ptr + origin[:, None] * D + inner[None, :]
        column = tile_n * BLOCK_N
        gate_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        n = column + tl.arange(0, BLOCK_N)
        # Added first: behind the products it would need registers that both accumulators hold.
        if HAS_BIAS:
            bias = bias_ptr + expert.to(tl.int64) * depth + n
            gate_acc += tl.load(bias, mask=n < F, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up_acc += tl.load(bias + F, mask=n < F, other=0.0).to(tl.float32)[None, :]
        for k in tl.range(0, D, BLOCK_K):
            mask = valid[:, None] & (k + inner < D)[None, :]
            rows = tl.load(source + k, mask=mask, other=0.0)
            gate_weight = weight_desc.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K)
            gate_acc = tl.dot(rows, gate_weight.T, gate_acc, input_precision="ieee")
            if GATED:
                up_weight = weight_desc.load([expert, F + column, k]).reshape(BLOCK_N, BLOCK_K)
                up_acc = tl.dot(rows, up_weight.T, up_acc, input_precision="ieee")
        mask = valid[:, None] & (n < F)[None, :]
        target = hidden_ptr + row.to(tl.int64)[:, None] * depth + n[None, :]
        gate = gate_acc.to(hidden_ptr.dtype.element_ty)
        tl.store(target, gate, mask=mask)
        gate_wide = gate.to(tl.float32)
        up_wide = gate_wide
        if GATED:
            up = up_acc.to(hidden_ptr.dtype.element_ty)
            tl.store(target + F, up, mask=mask)
            up_wide = up.to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=valid, other=0.0)
        act = ACTIVATION(gate_wide, up_wide) * scale[:, None]
        target = act_ptr + row.to(tl.int64)[:, None] * F + n[None, :]
        tl.store(target, act.to(act_ptr.dtype.element_ty), mask=mask)


def up(
    source_SD: Tensor,
    weight_eOD: Tensor,
    scale_R: Tensor,
    offsets_e1: Tensor,
    tile: Tile,
    *,
    gate: str,
    origin_R: Tensor | None = None,
    bias_eO: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pre-activation [R, O], and activation times routing weight [R, F], rounded once.

    Args:
        source_SD: Rows, each once; contiguous.
        weight_eOD: First weights, contiguous.
        scale_R: fp32, routing weight of every pair.
        offsets_e1: int32, where each expert's pairs begin.
        tile: How the work is cut; its `n` counts columns of one half.
        gate: Name in `GATES`.
        origin_R: int64, row of every pair; None where rows lie in expert order already.
        bias_eO: Added before the activation.
    """
    pairs, depth = scale_R.shape[0], weight_eOD.shape[1]
    activation = GATES[gate]
    width = depth // 2 if activation.gated else depth
    hidden_RO, act_RF = source_SD.new_empty(pairs, depth), source_SD.new_empty(pairs, width)
    if pairs == 0:
        return hidden_RO, act_RF
    tiles_M, num_tiles = tile_map(offsets_e1, pairs, tile.m)
    programs = num_programs(source_SD.device)
    up_kernel[(programs,)](
        source_SD,
        origin_R,
        TensorDescriptor.from_tensor(weight_eOD, [1, tile.n, tile.k]),
        bias_eO,
        scale_R,
        hidden_RO,
        act_RF,
        offsets_e1,
        tiles_M,
        num_tiles,
        width,
        source_SD.shape[1],
        ACTIVATION=activation.forward,
        GATED=activation.gated,
        GATHER=origin_R is not None,
        HAS_BIAS=bias_eO is not None,
        PROGRAMS=programs,
        **tile.options(),
    )
    return hidden_RO, act_RF
