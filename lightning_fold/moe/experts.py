"""The expert computation on rows that have arrived: two products around a gated activation.

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

from torch import Tensor

from fold_kernels.expert_forms import Precision
from fold_kernels.expert_mlp import Order, expert_mlp
from fold_kernels.weight_store import PutOff


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
    recompute: bool = False,
    precision: Precision = "bf16",
    put_off: PutOff | None = None,
) -> Tensor:
    """Sum over its experts of every arrived row, weighted, [S, D]: partial sums if etp > 1.

    Backward keeps what `fold_kernels.expert_mlp` says: the rows and the first product.

    Args:
        inputs: The rows; their dtype is the compute dtype.
        gate_up_e2FD: First projection, gate then up.
        down_eDF: Second projection.
        activation: Maps [R, 2F], gate half then up half, to [R, F].
        recompute: Whether backward computes the first product again instead of keeping it.
        precision: Of the products; see `fold_kernels.expert_mlp`.
        put_off: Where backward leaves the weights' gradients; see `fold_kernels.expert_mlp`.
    """
    return expert_mlp(
        inputs.source_SD,
        inputs.weights_R,
        gate_up_e2FD,
        down_eDF,
        Order(inputs.origin_R, inputs.counts_e, inputs.sizes),
        activation=activation,
        recompute=recompute,
        precision=precision,
        put_off=put_off,
    )
