"""Activations between the two products of an expert, as functions that GEMM epilogues call.

One pair per activation, fp32 blocks in and out. An epilogue takes the pair as a constexpr, so a
further activation is a pair here and a line in `GATES`, and no further kernel. The plain torch
forms are those of `fold_kernels.activation`. Numbers stand in the code: the interpreter multiplies
no global constexpr with a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    # libdevice has no form in the interpreter. This one neither overflows nor loses small values.
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def swiglu(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def swiglu_backward(gate, up, grad):
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu


@triton.jit
def geglu_tanh(gate, up):
    # sqrt(2 / pi) and the cubic term of Hendrycks and Gimpel, arXiv 1606.08415.
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return 0.5 * gate * (1.0 + tanh(inner)) * up


@triton.jit
def geglu_tanh_backward(gate, up, grad):
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
    t = tanh(inner)
    grad_gate = grad * up * (0.5 * (1.0 + t) + 0.5 * gate * (1.0 - t * t) * slope)
    return grad_gate, grad * 0.5 * gate * (1.0 + t)


@triton.jit
def clamped_swiglu(gate, up):
    # gpt-oss: 1.702 and a limit of 7 (openai/gpt-oss-20b; transformers 5, modeling_gpt_oss.py).
    gate = tl.minimum(gate, 7.0)
    up = tl.minimum(tl.maximum(up, -7.0), 7.0)
    return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)


@triton.jit
def clamped_swiglu_backward(gate, up, grad):
    low = tl.minimum(gate, 7.0)
    inside = tl.minimum(tl.maximum(up, -7.0), 7.0)
    sigmoid = tl.sigmoid(1.702 * low)
    slope = sigmoid + 1.702 * low * sigmoid * (1.0 - sigmoid)
    # At the limit itself autograd lets the gradient of a clamp pass.
    grad_gate = tl.where(gate <= 7.0, grad * (inside + 1.0) * slope, 0.0)
    grad_up = tl.where((up >= -7.0) & (up <= 7.0), grad * low * sigmoid, 0.0)
    return grad_gate, grad_up


@triton.jit
def relu_squared(gate, up):
    positive = tl.maximum(gate, 0.0)
    return positive * positive


@triton.jit
def relu_squared_backward(gate, up, grad):
    return grad * 2.0 * tl.maximum(gate, 0.0), grad * 0.0


@dataclass(frozen=True)
class Gate:
    """One activation.

    Attributes:
        forward: (gate, up) to the activation.
        backward: (gate, up, grad) to the gradients of gate and up.
        gated: Whether the first product has an up half beside the gate half. Without one, `up` is
            the gate itself and its gradient is ignored.
    """

    forward: Any
    backward: Any
    gated: bool = True


GATES = {
    "swiglu": Gate(swiglu, swiglu_backward),
    "geglu_tanh": Gate(geglu_tanh, geglu_tanh_backward),
    "clamped_swiglu": Gate(clamped_swiglu, clamped_swiglu_backward),
    "relu_squared": Gate(relu_squared, relu_squared_backward, gated=False),
}
