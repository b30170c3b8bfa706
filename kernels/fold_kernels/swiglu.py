"""SwiGLU of weighted expert rows: the activation between the two products of an expert.

`swiglu` is the plain form, and by its identity the mark of an activation that the pair
`weighted_swiglu` and `weighted_swiglu_backward` computes. The pair works in blocks of rows that
stay in a core's cache and keeps nothing for backward but what came in.
"""

# Shapes.  R rows   F expert width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of one intermediate of a block. Smaller blocks cost calls, larger ones leave the cache:
# best of 2**13 to 2**18 for F = 64 and 512 (AMD EPYC, first generation, 2026-11-29).
BLOCK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class ActivationGradients:
    """Where the backward of a weighted activation writes.

    Attributes:
        hidden_R2F: Gradient of the first product.
        weights_R: Gradient of the routing weights, at least fp32.
        weighted_RF: The weighted activation once more, for the gradient of the second weight.
    """

    hidden_R2F: Tensor
    weights_R: Tensor
    weighted_RF: Tensor


def swiglu(hidden_R2F: Tensor) -> Tensor:
    """SiLU of the gate half times the up half: [R, 2F] to [R, F]."""
    gate, up = hidden_R2F.chunk(2, dim=-1)
    return F.silu(gate) * up


def weighted_swiglu(hidden_R2F: Tensor, weights_R: Tensor, *, out_RF: Tensor) -> None:
    """`swiglu` times the routing weight of every row, rounded once; writes `out_RF`.

    Args:
        hidden_R2F: Any floating dtype; 16-bit ones are computed in fp32.
        weights_R: At least fp32.
        out_RF: The dtype of `hidden_R2F`.
    """
    for hidden, weights, out in _blocks(hidden_R2F, weights_R, out_RF):
        gate, up = _wide(hidden).chunk(2, dim=1)
        act = torch.sigmoid(gate, out=out if out.dtype == gate.dtype else None)
        act.mul_(gate).mul_(up).mul_(weights.unsqueeze(1))
        if act is not out:
            out.copy_(act)


def weighted_swiglu_backward(
    hidden_R2F: Tensor, weights_R: Tensor, grad_RF: Tensor, *, out: ActivationGradients
) -> None:
    """Gradients of `weighted_swiglu`; writes `out`, whose room also holds what is in between.

    Args:
        hidden_R2F: As in the forward.
        weights_R: At least fp32.
        grad_RF: Gradient of the weighted activation; its values are lost.
        out: No part of it may overlap an input.
    """
    outputs = (out.hidden_R2F, out.weights_R, out.weighted_RF)
    for block in _blocks(hidden_R2F, weights_R, grad_RF, *outputs):
        hidden, weights, grad, grad_hidden, grad_weights, weighted = block
        if hidden.dtype == weights.dtype:
            _backward_block(hidden, weights, grad, grad_hidden, grad_weights, weighted)
            continue
        wide_hidden, wide_weighted = _wide(grad_hidden), _wide(weighted)
        _backward_block(
            _wide(hidden), weights, _wide(grad), wide_hidden, grad_weights, wide_weighted
        )
        grad_hidden.copy_(wide_hidden)
        weighted.copy_(wide_weighted)


def _backward_block(
    hidden: Tensor,
    weights: Tensor,
    grad: Tensor,
    grad_hidden: Tensor,
    grad_weights: Tensor,
    weighted: Tensor,
) -> None:
    gate, up = hidden.chunk(2, dim=1)
    sigmoid, silu = grad_hidden.chunk(2, dim=1)
    weight = weights.unsqueeze(1)
    torch.sigmoid(gate, out=sigmoid)
    torch.mul(gate, sigmoid, out=silu)
    torch.mul(silu, up, out=weighted)
    # The weight's gradient without the expert's output: <grad, activation>.
    torch.sum(weighted * grad, 1, out=grad_weights)
    weighted.mul_(weight)
    grad.mul_(weight)
    # The slope of SiLU is sigmoid + silu - silu * sigmoid, a step from silu towards one.
    slope = torch.lerp(silu, sigmoid.new_ones(()), sigmoid, out=sigmoid)
    silu.mul_(grad)
    slope.mul_(grad.mul_(up))


def _blocks(hidden_R2F: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of all tensors, few at a time; on a GPU all of them at once."""
    rows = max(1, 2 * BLOCK_ELEMENTS // max(1, hidden_R2F.shape[1]))
    if hidden_R2F.device.type != "cpu" or hidden_R2F.shape[0] <= rows:
        yield hidden_R2F, *others
    else:
        yield from zip(*(x.split(rows) for x in (hidden_R2F, *others)), strict=True)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
