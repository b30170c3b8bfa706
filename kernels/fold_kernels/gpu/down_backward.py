"""Gradient of the pre-activation: one product with everything about the activation behind it.

With dA' = gather(dO) W2 and s the routing weight, the epilogue writes dH = s dA' act'(H), the
weighted activation s A once more for the second weight's gradient, and <dA', A>, the gradient of s
(SonicMoE, arXiv 2512.14080, section 3): no expert output is kept for it. The sum over F is left as
one partial a tile of columns; the caller sums them in a fixed order.
"""

# Shapes.  S source rows   R pairs in expert order   e experts   D model width
#          F expert width   O rows of the first weight   P tiles of columns

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fold_kernels.gpu.gates import GATES
from fold_kernels.gpu.launch import num_programs
from fold_kernels.gpu.tiles import columns, locate, tile_map
from fold_kernels.tables import Tile


@triton.jit
def write_columns(
    grad,
    column,
    row,
    valid,
    scale,
    hidden_ptr,
    grad_hidden_ptr,
    act_ptr,
    F,
    FORWARD: tl.constexpr,
    BACKWARD: tl.constexpr,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Epilogue of some columns; returns their part of <dA', A>."""
    n = column + tl.arange(0, WIDTH)
    mask = valid[:, None] & (n < F)[None, :]
    depth = 2 * F if GATED else F
    place = row.to(tl.int64)[:, None] * depth + n[None, :]
    gate = tl.load(hidden_ptr + place, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(hidden_ptr + place + F, mask=mask, other=0.0).to(tl.float32)
    act = FORWARD(gate, up)
    grad_gate, grad_up = BACKWARD(gate, up, grad * scale[:, None])
    kind = grad_hidden_ptr.dtype.element_ty
    tl.store(grad_hidden_ptr + place, grad_gate.to(kind), mask=mask)
    if GATED:
        tl.store(grad_hidden_ptr + place + F, grad_up.to(kind), mask=mask)
    place = row.to(tl.int64)[:, None] * F + n[None, :]
    tl.store(act_ptr + place, (act * scale[:, None]).to(kind), mask=mask)
    return tl.sum(tl.where(mask, grad * act, 0.0), 1)


@triton.jit(do_not_specialize=["R"])
def down_backward_kernel(
    grad_ptr,  # [S, D], gradient of the sums, in
    origin_ptr,  # [R] int64, in; with GATHER
    weight_desc,  # [e, D, F], in
    hidden_ptr,  # [R, O], pre-activation, in
    scale_ptr,  # [R] fp32, routing weights, in
    grad_hidden_ptr,  # [R, O], out
    act_ptr,  # [R, F], weighted activation, out
    partial_ptr,  # [P, R] fp32, parts of the routing weights' gradient, out
    offsets_ptr,  # [e + 1] int32, in
    tiles_ptr,  # [M] int32, in
    num_tiles_ptr,  # [1] int32, in
    F,
    D,
    R,
    FORWARD: tl.constexpr,
    BACKWARD: tl.constexpr,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles = tl.load(num_tiles_ptr)
    column_tiles = tl.cdiv(F, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        expert, tile_m, tile_n = locate(tile, tiles_ptr, row_tiles, column_tiles, GROUP)
        row = tl.load(offsets_ptr + expert) + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = row < tl.load(offsets_ptr + expert + 1)
        origin = row.to(tl.int64)
        if GATHER:
            origin = tl.load(origin_ptr + row, mask=valid, other=0).to(tl.int64)
        inner = tl.arange(0, BLOCK_K)
        grads = grad_ptr + origin[:, None] * D + inner[None, :]
        column = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            mask = valid[:, None] & (k + inner < D)[None, :]
            rows = tl.load(grads + k, mask=mask, other=0.0)
            weight = weight_desc.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(rows, weight, acc, input_precision="ieee")
        scale = tl.load(scale_ptr + row, mask=valid, other=0.0)
        # In one piece the epilogue needs more registers than there are; in parts it does not.
        width: tl.constexpr = BLOCK_N // SPLIT
        parts = columns(acc, BLOCK_M, BLOCK_N, SPLIT)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for i in tl.static_range(SPLIT):
            total += write_columns(
                parts[i],
                column + i * width,
                row,
                valid,
                scale,
                hidden_ptr,
                grad_hidden_ptr,
                act_ptr,
                F,
                FORWARD,
                BACKWARD,
                GATED,
                width,
            )
        tl.store(partial_ptr + tile_n.to(tl.int64) * R + row, total, mask=valid)


def down_backward(
    grad_SD: Tensor,
    weight_eDF: Tensor,
    hidden_RO: Tensor,
    scale_R: Tensor,
    offsets_e1: Tensor,
    tile: Tile,
    *,
    gate: str,
    origin_R: Tensor | None = None,
    grad_hidden_RO: Tensor | None = None,
    act_RF: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the pre-activation [R, O], weighted activation [R, F], routing gradient [R] fp32.

    Args:
        grad_SD: Gradient of the sums, contiguous.
        weight_eDF: Second weights, contiguous.
        hidden_RO: Pre-activation that the forward kept, contiguous.
        scale_R: fp32, routing weight of every pair.
        offsets_e1: int32, where each expert's pairs begin.
        tile: How the work is cut.
        gate: Name in `GATES`.
        origin_R: int64, row of every pair; None where rows lie in expert order already.
        grad_hidden_RO: Where the first result is written, if there is a place for it.
        act_RF: The same for the second.
    """
    pairs, width = hidden_RO.shape[0], weight_eDF.shape[2]
    if grad_hidden_RO is None:
        grad_hidden_RO = hidden_RO.new_empty(hidden_RO.shape)
    if act_RF is None:
        act_RF = hidden_RO.new_empty(pairs, width)
    if pairs == 0:
        return grad_hidden_RO, act_RF, scale_R.new_empty(0)
    activation = GATES[gate]
    tiles_M, num_tiles = tile_map(offsets_e1, pairs, tile.m)
    # Zeros: a row behind the last offset belongs to no tile, and its gradient is none.
    partial_PR = scale_R.new_zeros(triton.cdiv(width, tile.n), pairs)
    programs = num_programs(grad_SD.device)
    down_backward_kernel[(programs,)](
        grad_SD,
        origin_R,
        TensorDescriptor.from_tensor(weight_eDF, [1, tile.k, tile.n]),
        hidden_RO,
        scale_R,
        grad_hidden_RO,
        act_RF,
        partial_PR,
        offsets_e1,
        tiles_M,
        num_tiles,
        width,
        grad_SD.shape[1],
        pairs,
        FORWARD=activation.forward,
        BACKWARD=activation.backward,
        GATED=activation.gated,
        GATHER=origin_R is not None,
        SPLIT=tile.split,
        PROGRAMS=programs,
        **tile.options(),
    )
    return grad_hidden_RO, act_RF, partial_PR.sum(0)
