"""Any gated activation with the routing weights multiplied in, forward and backward.

SwiGLU runs as the pair of `swiglu.py`. Any other callable is differentiated by autograd on the
kept input, inside backward: it keeps nothing of its own.
"""

# Shapes.  R rows   F expert width

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fold_kernels.swiglu import (
    ActivationGradients,
    swiglu,
    weighted_swiglu,
    weighted_swiglu_backward,
)

Activation = Callable[[Tensor], Tensor]


def geglu_tanh(hidden_R2F: Tensor) -> Tensor:
    """GELU, tanh form, of the gate half times the up half: [R, 2F] to [R, F]."""
    gate, up = hidden_R2F.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(hidden_R2F: Tensor) -> Tensor:
    """gpt-oss: gate * sigmoid(1.702 gate) * (up + 1), both halves clamped at 7."""
    gate, up = hidden_R2F.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def relu_squared(hidden_RF: Tensor) -> Tensor:
    """Square of the positive part, without an up half: [R, F] to [R, F]."""
    return F.relu(hidden_RF).square()


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": swiglu,
    "geglu_tanh": geglu_tanh,
    "clamped_swiglu": clamped_swiglu,
    "relu_squared": relu_squared,
}
"""Activations that have a kernel, by the name that ops take."""
GATED = frozenset({"swiglu", "geglu_tanh", "clamped_swiglu"})


def differentiate(name: str, hidden: Tensor, grad_RF: Tensor) -> Tensor:
    """Gradient of an activation's input from that of its output, in the dtype of both.

    Written out: inside of a registered op nothing is recorded, and autograd has nothing to go by.

    Args:
        name: Of `ACTIVATIONS`.
        hidden: Its input, [R, 2F] or, without an up half, [R, F].
        grad_RF: Gradient of its output.
    """
    if name == "relu_squared":
        return grad_RF * (2 * F.relu(hidden))
    gate, up = hidden.chunk(2, dim=-1)
    if name == "geglu_tanh":
        grad_gate = torch.ops.aten.gelu_backward(grad_RF * up, gate, approximate="tanh")
        return torch.cat([grad_gate, grad_RF * F.gelu(gate, approximate="tanh")], dim=-1)
    if name == "swiglu":
        sigmoid = torch.sigmoid(gate)
        grad_gate = grad_RF * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        return torch.cat([grad_gate, grad_RF * gate * sigmoid], dim=-1)
    assert name == "clamped_swiglu", name
    low, high = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    sigmoid = torch.sigmoid(1.702 * low)
    grad_gate = grad_RF * (high + 1) * (sigmoid * (1 + 1.702 * low * (1 - sigmoid)))
    grads = grad_gate.where(gate <= 7.0, 0), (grad_RF * low * sigmoid).where(up.abs() <= 7.0, 0)
    return torch.cat(grads, dim=-1)


def name_of(activation: Activation) -> str | None:
    """Name of an activation with a kernel; None for any other callable."""
    return next((name for name, known in ACTIVATIONS.items() if known is activation), None)


def activate(
    activation: Activation, hidden_R2F: Tensor, weights_R: Tensor, *, out_RF: Tensor
) -> None:
    """Write the activation times the routing weights, rounded once. See `weighted_swiglu`."""
    if activation is swiglu:
        weighted_swiglu(hidden_R2F, weights_R, out_RF=out_RF)
    else:
        torch.mul(activation(hidden_R2F), weights_R.unsqueeze(1), out=out_RF)


def activate_backward(
    activation: Activation,
    hidden_R2F: Tensor,
    weights_R: Tensor,
    grad_RF: Tensor,
    *,
    out: ActivationGradients,
) -> None:
    """Write the gradients of `activate`. See `weighted_swiglu_backward`."""
    if activation is swiglu:
        weighted_swiglu_backward(hidden_R2F, weights_R, grad_RF, out=out)
        return
    hidden = hidden_R2F.detach().requires_grad_()
    with torch.enable_grad():
        activated = activation(hidden)
    plain, weight = activated.detach(), weights_R.unsqueeze(1)
    scaled = (grad_RF * weight).to(activated.dtype)
    (grad_hidden,) = torch.autograd.grad(activated, hidden, scaled)
    out.hidden_R2F.copy_(grad_hidden)
    torch.mul(plain, weight, out=out.weighted_RF)
    torch.sum(plain.to(weights_R.dtype) * grad_RF, 1, out=out.weights_R)
