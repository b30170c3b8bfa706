"""The weighted activation and its gradients against autograd on the plain form."""

import pytest
import torch
from torch import Tensor, nn

from fold_kernels import swiglu as module
from fold_kernels.activation import activate, activate_backward
from fold_kernels.swiglu import ActivationGradients, swiglu

# Shapes.  R rows   F expert width
F = 6


def gelu_gated(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return nn.functional.gelu(gate) * up


def clamped(hidden: Tensor) -> Tensor:
    """Coupled halves, with an output that is no product of two functions."""
    gate, up = hidden.chunk(2, dim=-1)
    return (up.clamp(-1, 1) + 1) * gate * torch.sigmoid(1.7 * gate)


def operands(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    hidden = torch.randn(rows, 2 * F, dtype=dtype) * 3
    return hidden, torch.rand(rows, dtype=wide), torch.randn(rows, F, dtype=dtype)


def backward(activation, hidden: Tensor, weights: Tensor, grad: Tensor) -> ActivationGradients:
    # Poison: what is not written must show.
    out = ActivationGradients(
        torch.full_like(hidden, torch.nan),
        torch.full_like(weights, torch.nan),
        torch.full_like(grad, torch.nan),
    )
    activate_backward(activation, hidden, weights, grad.clone(), out=out)
    return out


@pytest.mark.parametrize("activation", [swiglu, gelu_gated, clamped])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_forward_and_gradients_equal_autograd(activation, rows: int, monkeypatch) -> None:
    # Blocks of two rows: the last one is not full.
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 2 * F)
    hidden, weights, grad = operands(rows)
    leaves = hidden.requires_grad_(), weights.requires_grad_()
    wanted = activation(hidden) * weights.unsqueeze(1)
    wanted_grads = torch.autograd.grad(wanted, leaves, grad)
    with torch.no_grad():
        got = torch.full_like(grad, torch.nan)
        activate(activation, hidden, weights, out_RF=got)
        out = backward(activation, hidden, weights, grad)
    for a, b in (
        (got, wanted),
        (out.weighted_RF, wanted),
        (out.hidden_R2F, wanted_grads[0]),
        (out.weights_R, wanted_grads[1]),
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_bf16_is_computed_in_fp32_and_rounded_once() -> None:
    hidden, weights, grad = operands(9, torch.bfloat16)
    got = torch.empty_like(grad)
    activate(swiglu, hidden, weights, out_RF=got)
    wide = hidden.float().requires_grad_()
    wanted = swiglu(wide) * weights.unsqueeze(1)
    # Sigmoid times gate is SiLU up to a rounding of fp32, which may tip a tie of bf16.
    torch.testing.assert_close(got, wanted.bfloat16(), rtol=2**-8, atol=0)
    assert (got == wanted.bfloat16()).float().mean() > 0.95
    out = backward(swiglu, hidden, weights, grad)
    (wanted_grad,) = torch.autograd.grad(wanted, wide, grad.float())
    torch.testing.assert_close(out.hidden_R2F, wanted_grad.bfloat16(), rtol=2**-8, atol=1e-6)
    assert out.weights_R.dtype == torch.float32


def test_large_gates_give_no_nan() -> None:
    hidden = torch.tensor([[200.0, 1.0], [-200.0, 1.0], [0.0, 1.0]])
    weights, grad = torch.ones(3), torch.ones(3, 1)
    out = backward(swiglu, hidden, weights, grad)
    torch.testing.assert_close(out.hidden_R2F[:, 0], torch.tensor([1.0, 0.0, 0.5]))
    torch.testing.assert_close(out.weights_R, torch.tensor([200.0, 0.0, 0.0]))
