"""The expert computation on rows that have arrived: two grouped GEMMs around a gated activation.

Routing weights multiply the activation, before the second projection: the expert output need not
be kept for the router's gradient, and the way back is a plain sum (Megatron-Core's order). No
communication happens here.
"""

# Shapes.  R rows in expert order   e local experts   D model width   F local expert width

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fold_kernels.grouped_gemm import grouped_gemm


@dataclass(frozen=True)
class ExpertRows:
    """Rows of this rank's experts, in expert order.

    Attributes:
        rows_RD: Token rows.
        weights_R: Routing weight of every row.
        counts_e: int64, rows per local expert, on device.
        sizes: The same counts on the host.
    """

    rows_RD: Tensor
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
    """Weighted expert outputs of the local width shard, [R, D]: partial sums if etp > 1.

    Args:
        inputs: The rows; their dtype is the compute dtype.
        gate_up_e2FD: First projection, gate then up.
        down_eDF: Second projection.
        activation: Maps [R, 2F], gate half then up half, to [R, F].
    """
    dtype = inputs.rows_RD.dtype
    gate_up_eOD = gate_up_e2FD.to(dtype).flatten(1, 2)
    hidden_RO = grouped_gemm(inputs.rows_RD, gate_up_eOD, inputs.counts_e, inputs.sizes)
    weighted_RF = (activation(hidden_RO) * inputs.weights_R.unsqueeze(-1)).to(dtype)
    return grouped_gemm(weighted_RF, down_eDF.to(dtype), inputs.counts_e, inputs.sizes)
