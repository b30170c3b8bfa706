"""The whole expert computation by kernels, forward and backward, against fp64."""

from __future__ import annotations

import pytest
import torch
from kernel_problems import LAYER, SIZES, Problem, error, plain_layer, run_experts

from fold_kernels.activation import ACTIVATIONS
from fold_kernels.expert_mlp import Order, expert_mlp
from fold_kernels.weight_store import WeightStore, deferring

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("empty", "dtype", "activation"),
    [
        ("first", FP32, "swiglu"),
        ("middle", BF16, "swiglu"),
        ("last", FP16, "swiglu"),
        ("one", BF16, "geglu_tanh"),
        ("middle", FP32, "clamped_swiglu"),
    ],
)
def test_output_and_gradients(empty: str, dtype, activation: str, device) -> None:
    p = Problem.draw(SIZES[empty], dtype=dtype, device=device)
    out, grads = run_experts(p, activation)
    wanted, wanted_grads = plain_layer(p, ACTIVATIONS[activation])
    assert error(out, wanted) <= LAYER[dtype]
    for name, grad in grads.items():
        assert error(grad, wanted_grads[name]) <= LAYER[dtype], name
    for e, size in enumerate(p.sizes):
        assert size or not (grads["first"][e].any() or grads["second"][e].any())
    assert not out[-1].any(), "the last row has no expert"


def test_no_pairs_at_all(device) -> None:
    out, grads = run_experts(Problem.draw(SIZES["none"], device=device))
    assert not out.any()
    assert all(not grad.any() for grad in grads.values())


def test_recompute_and_reruns_are_equal_bit_for_bit(device) -> None:
    """torchtitan #1974 and others: sums by atomics differed in 40 of 40 runs."""
    p = Problem.draw(SIZES["middle"], dtype=BF16, device=device)
    out, grads = run_experts(p)
    for options in ({}, {"recompute": True}):
        again, grads_again = run_experts(p, **options)
        assert torch.equal(out, again)
        assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


def test_delayed_weight_gradients_are_those_of_the_ordinary_backward(device) -> None:
    p = Problem.draw(SIZES["first"], device=device)
    _, wanted = run_experts(p)
    first = p.first.clone().unflatten(1, (2, -1)).detach().requires_grad_()
    second = p.second.clone().requires_grad_()
    order = Order(p.origin, torch.tensor(p.sizes, device=device), p.sizes)
    store = WeightStore()
    source = p.source.clone().requires_grad_()
    with deferring(store):
        out = expert_mlp(source, p.scale, first, second, order, activation=ACTIVATIONS["swiglu"])
    out.backward(p.upstream)
    assert first.grad is None
    assert second.grad is None
    store.take()()
    assert torch.equal(first.grad.flatten(1, 2), wanted["first"])
    assert torch.equal(second.grad, wanted["second"])
    assert torch.equal(source.grad, wanted["source"])


@pytest.mark.parametrize("gradient", ["expanded", "transposed", "sliced"])
def test_upstream_gradients_of_any_layout(gradient: str, device) -> None:
    """flash-attn #355, torchtitan #1265: `out.sum().backward()` gives strides of zero."""
    p = Problem.draw(SIZES["last"], device=device)
    upstream = {
        "expanded": torch.ones((), device=device).expand(13, 48),
        "transposed": torch.randn(48, 13, device=device).T,
        "sliced": torch.randn(13, 96, device=device)[:, ::2],
    }[gradient]
    p.upstream = upstream
    _, grads = run_experts(p)
    p.upstream = upstream.contiguous()
    _, wanted = run_experts(p)
    assert all(torch.equal(grads[name], wanted[name]) for name in grads)


def test_rows_and_gradients_that_no_expert_takes_reach_nothing(device) -> None:
    """transformers #45621, pytorch #193633: zero times NaN is NaN."""
    p = Problem.draw(SIZES["middle"], device=device)
    _, wanted = run_experts(p)
    p.source[-1] = torch.nan
    p.upstream[-1] = torch.nan
    out, grads = run_experts(p)
    assert torch.isfinite(out).all()
    assert not grads["source"][-1].any()
    for name, grad in grads.items():
        assert torch.equal(grad, wanted[name]), name
