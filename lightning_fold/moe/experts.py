"""The expert computation on rows that have arrived: two grouped GEMMs around a gated activation.

A row may serve several experts of this rank: it arrives once, and what comes back is the sum over
those experts. Routing weights multiply the activation, before the second projection: the expert
output need not be kept for the router's gradient, and the way back is a plain sum (Megatron-Core's
order). No communication happens here.
"""

# Shapes.  S rows that arrived   R = pairs of a row and an expert, in expert order
#          e local experts   D model width   F local expert width

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fold_kernels.grouped_gemm import grouped_gemm


@dataclass(frozen=True)
class ExpertRows:
    """Rows for this rank's experts, each once, and which expert takes which.

    Attributes:
        source_SD: Token rows as they arrived.
        origin_R: int64, row of `source_SD` that comes i-th in expert order.
        weights_R: Routing weight of every pair.
        counts_e: int64, pairs per local expert, on device.
        sizes: The same counts on the host.
    """

    source_SD: Tensor
    origin_R: Tensor
    weights_R: Tensor
    counts_e: Tensor
    sizes: Sequence[int]


def run_experts(
    inputs: ExpertRows,
    *,
    gate_up_e2FD: Tensor,
    down_eDF: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Sum over its experts of every arrived row, weighted, [S, D]: partial sums if etp > 1.

    Args:
        inputs: The rows; their dtype is the compute dtype.
        gate_up_e2FD: First projection, gate then up.
        down_eDF: Second projection.
        activation: Maps [R, 2F], gate half then up half, to [R, F].
    """
    dtype = inputs.source_SD.dtype
    rows_RD = inputs.source_SD.index_select(0, inputs.origin_R)
    gate_up_eOD = gate_up_e2FD.to(dtype).flatten(1, 2)
    hidden_RO = grouped_gemm(rows_RD, gate_up_eOD, inputs.counts_e, inputs.sizes)
    weighted_RF = (activation(hidden_RO) * inputs.weights_R.unsqueeze(-1)).to(dtype)
    out_RD = grouped_gemm(weighted_RF, down_eDF.to(dtype), inputs.counts_e, inputs.sizes)
    return torch.zeros_like(inputs.source_SD).index_add(0, inputs.origin_R, out_RD)
