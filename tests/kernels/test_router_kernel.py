"""The routing kernel against its plain form: choice exact, weights and gradients close."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fold_kernels import ops
from fold_kernels.router import RouterSpec, route_ref

SPECS = [
    (8, RouterSpec(2)),
    (8, RouterSpec(2, softmax_after_topk=True)),
    (5, RouterSpec(5)),
    (4, RouterSpec(1, renormalise=False)),
    (60, RouterSpec(4, renormalise=False, scaling_factor=2.5)),
    (12, RouterSpec(3, "sqrt_softplus")),
    (16, RouterSpec(4, num_groups=4, top_groups=2, group_score="max")),
    (64, RouterSpec(6, "sigmoid", num_groups=8, top_groups=4)),
    (512, RouterSpec(16, "sigmoid", num_groups=8, top_groups=4, scaling_factor=2.5)),
]


def awkward_logits(experts: int, device) -> Tensor:
    """Ties, signed zeros, far and infinite values; tokens that divide no block."""
    logits = torch.randn(19, experts)
    logits[3] = 0.0
    logits[4] = logits[4, 0]
    logits[5] = -0.0
    logits[5, ::2] = 0.0
    logits[6] *= 60
    logits[7, 1:] = -torch.inf
    return logits.to(device)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("experts", "spec"), SPECS, ids=str)
def test_choice_weights_and_gradients_equal_the_reference(
    experts: int, spec: RouterSpec, with_bias: bool, device
) -> None:
    logits = awkward_logits(experts, device).requires_grad_()
    bias = torch.randn(experts, device=device) * 0.1 if with_bias else None
    weights, index = ops.router_topk(logits, spec, bias)
    wanted, wanted_index, _ = route_ref(logits, spec, bias)
    # Where fewer experts than K are open at all, any weights of zero over zero are NaN in both.
    assert torch.equal(index, wanted_index)
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    upstream = torch.randn_like(weights)
    grads = [torch.autograd.grad(w, logits, upstream)[0] for w in (weights, wanted)]
    torch.testing.assert_close(grads[0][:7], grads[1][:7], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("experts", "spec"), SPECS, ids=str)
def test_rows_of_nan_choose_distinct_experts_and_have_nan_weights(
    experts: int, spec: RouterSpec, device
) -> None:
    """vllm #39391, TE #2821: NaN logits gave one expert twice, and an illegal access."""
    logits = awkward_logits(experts, device)
    logits[0] = torch.nan
    logits[1, experts - 1] = torch.nan
    weights, index = ops.router_topk(logits, spec)
    assert weights[:2].isnan().all()
    assert not weights[2:7].isnan().any()
    for row in index.tolist():
        assert len(set(row)) == spec.top_k
        assert all(0 <= expert < experts for expert in row)


def test_reruns_are_equal_bit_for_bit(device) -> None:
    logits = torch.randn(40, 32, device=device)
    first = ops.router_topk(logits, RouterSpec(4))
    for _ in range(3):
        again = ops.router_topk(logits, RouterSpec(4))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_no_tokens(device) -> None:
    logits = torch.randn(0, 8, device=device, requires_grad=True)
    weights, index = ops.router_topk(logits, RouterSpec(2))
    assert weights.shape == index.shape == (0, 2)
    (grad,) = torch.autograd.grad(weights.sum(), logits)
    assert grad.shape == (0, 8)


def test_what_the_kernel_cannot_route_takes_the_plain_form(device) -> None:
    odd = RouterSpec(2, num_groups=3, top_groups=2)
    logits = torch.randn(7, 12, device=device)
    wanted, wanted_index, _ = route_ref(logits, odd)
    weights, index = ops.router_topk(logits, odd)
    assert torch.equal(index, wanted_index)
    assert torch.equal(weights, wanted)
    double = ops.router_topk(logits.double(), RouterSpec(2))[0]
    assert double.dtype == torch.float64
