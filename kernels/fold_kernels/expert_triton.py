"""All experts by Triton kernels: the gather in the loads, the activation in the epilogues.

Only the pre-activation and the weighted activation exist for all pairs, and one set of rows that
the combine reads. Sums are gathers in a fixed order, so reruns are equal bit for bit.
"""

# Shapes.  S rows that arrived   R pairs in expert order   e local experts
#          O = 2F both halves of the first product   D model width   F expert width

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fold_kernels.activation import name_of
from fold_kernels.expert_operands import Factors, Gradients, Needs, Operands, empty_factors
from fold_kernels.gpu.combine import combine
from fold_kernels.gpu.down_backward import down_backward
from fold_kernels.gpu.gemm import gemm
from fold_kernels.gpu.launch import tile_for
from fold_kernels.gpu.up import up
from fold_kernels.gpu.wgrad import wgrad
from fold_kernels.ops.rows import pairs_of


def triton_forward(x: Operands, *, keep_hidden: bool) -> tuple[Tensor, Tensor | None]:
    """Weighted sums [S, D], and the first product [R, O] if it is to be kept."""
    offsets = offsets_of(x.counts_e)
    hidden_RO, act_RF = _up(x, offsets)
    rows_RD = _multiply(act_RF, x.down_eDF, offsets)
    sums_SD = combine(rows_RD, *pairs_of(x.origin_R, x.source_SD.shape[0]))
    return sums_SD, hidden_RO if keep_hidden else None


def triton_backward(
    x: Operands,
    grad_SD: Tensor,
    kept_RO: Tensor | None,
    needs: Needs,
    factors: Factors | None = None,
) -> Gradients:
    """Gradients; the first product is computed again if it was not kept.

    Args:
        x: As in forward.
        grad_SD: Gradient of the sums.
        kept_RO: The first product.
        needs: Which gradients.
        factors: Filled for `triton_weight_gradients`; None where that does not follow.
    """
    offsets = offsets_of(x.counts_e)
    hidden_RO = _up(x, offsets)[0] if kept_RO is None else kept_RO
    factors = factors or empty_factors(x, grad_SD)
    experts, width = len(x.sizes), x.down_eDF.shape[2]
    tile = tile_for(hidden_RO, "down_backward", experts=experts, width=width)
    _, _, grad_R = down_backward(
        grad_SD,
        x.down_eDF.contiguous(),
        hidden_RO,
        x.weights_R,
        offsets,
        tile,
        gate=_gate(x),
        origin_R=x.origin_R,
        grad_hidden_RO=factors.grad_hidden_RO,
        act_RF=factors.act_RF,
    )
    source_SD = None
    if needs.source:
        rows_RD = _multiply(factors.grad_hidden_RO, x.gate_up_eOD, offsets, transposed=True)
        source_SD = combine(rows_RD, *pairs_of(x.origin_R, x.source_SD.shape[0]))
    return Gradients(source_SD, grad_R, *triton_weight_gradients(factors, needs))


def triton_weight_gradients(factors: Factors, needs: Needs) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the first weights, [e, O, D], and of the second, [e, D, F]."""
    gate_up_eOD, down_eDF = None, None
    run = partial(_wgrad, factors, offsets_of(factors.counts_e))
    if needs.gate_up:
        gate_up_eOD = run(factors.grad_hidden_RO, factors.source_SD, gather="right")
    if needs.down:
        down_eDF = run(factors.grad_SD, factors.act_RF, gather="left")
    return gate_up_eOD, down_eDF


def offsets_of(counts_e: Tensor) -> Tensor:
    """Where each expert's pairs begin, int32 [e + 1]; no synchronisation."""
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    return torch.cat([ends_e.new_zeros(1), ends_e])


def _gate(x: Operands) -> str:
    name = name_of(x.activation)
    assert name is not None, "the backend lets no activation without a kernel come here"
    return name


def _up(x: Operands, offsets: Tensor) -> tuple[Tensor, Tensor]:
    pairs = x.weights_R
    tile = tile_for(pairs, "up", experts=len(x.sizes), width=x.down_eDF.shape[2])
    return up(
        x.source_SD.contiguous(),
        x.gate_up_eOD.contiguous(),
        pairs,
        offsets,
        tile,
        gate=_gate(x),
        origin_R=x.origin_R,
    )


def _multiply(
    rows_RK: Tensor, weight: Tensor, offsets: Tensor, *, transposed: bool = False
) -> Tensor:
    width = weight.shape[2] if transposed else weight.shape[1]
    tile = tile_for(rows_RK, "gemm", experts=weight.shape[0], width=width)
    return gemm(rows_RK, weight.contiguous(), offsets, tile, transposed=transposed)


def _wgrad(
    factors: Factors, offsets: Tensor, left: Tensor, right: Tensor, *, gather: str
) -> Tensor:
    tile = tile_for(factors.act_RF, "wgrad", experts=len(factors.sizes), width=right.shape[1])
    return wgrad(
        left.contiguous(),
        right.contiguous(),
        offsets,
        tile,
        origin_R=factors.origin_R,
        gather=gather,
    )
