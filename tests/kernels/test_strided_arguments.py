"""Small arguments of any strides: kernels address them by place, so entries make them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_problems import SIZES, Problem, run_experts
from torch import Tensor

from fold_kernels import ops
from fold_kernels.expert_mlp import Order, expert_mlp
from fold_kernels.ops.rows import pairs_of
from fold_kernels.swiglu import swiglu


def strided(x: Tensor) -> Tensor:
    """Equal numbers, two places apart, and others between them."""
    wide = x.unsqueeze(-1).repeat_interleave(2, dim=-1)
    wide[..., 1] = 1 if not x.is_floating_point() else 1e3
    view = wide[..., 0]
    assert view.numel() < 2 or not view.is_contiguous()
    return view


def calls(p: Problem) -> dict[str, tuple[Callable[..., Any], dict[str, Tensor]]]:
    """Ops with their small arguments."""
    pairs, starts = pairs_of(p.origin, 13)
    rows, bias = torch.randn(sum(p.sizes), 48, device=p.source.device), p.first[..., 0].clone()
    hidden, _ = ops.up_projection(p.source, p.first, p.scale, p.offsets, origin_R=p.origin)
    return {
        "gather": (lambda **o: ops.gather_rows(p.source, **o), {"origin_R": p.origin}),
        "combine": (
            lambda **o: ops.combine_rows(rows, **o),
            {"pairs_P": pairs, "starts_S1": starts, "scale_P": p.scale},
        ),
        "gemm": (
            lambda **o: ops.grouped_gemm(rows, p.first, **o),
            {"offsets_e1": p.offsets, "bias_eN": bias, "scale_R": p.scale},
        ),
        "wgrad": (
            lambda **o: ops.weight_gradient(hidden, p.source, gather="right", **o),
            {"offsets_e1": p.offsets, "origin_R": p.origin},
        ),
        "up": (
            lambda **o: ops.up_projection(p.source, p.first, **o)[1],
            {"scale_R": p.scale, "offsets_e1": p.offsets, "origin_R": p.origin, "bias_eO": bias},
        ),
        "down": (
            lambda **o: torch.cat([x.flatten() for x in down(p, hidden, o)]),
            {"scale_R": p.scale, "offsets_e1": p.offsets, "origin_R": p.origin},
        ),
    }


def down(p: Problem, hidden: Tensor, options: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return ops.down_backward(p.upstream, p.second, hidden, **options)


@pytest.mark.parametrize("name", ["gather", "combine", "gemm", "wgrad", "up", "down"])
def test_ops_take_small_arguments_of_any_strides(name: str, device) -> None:
    p = Problem.draw(SIZES["middle"], device=device)
    op, whole = calls(p)[name]
    wanted = op(**whole)
    for argument in whole:
        got = op(**{**whole, argument: strided(whole[argument])})
        assert torch.equal(got, wanted), argument


def test_a_layer_takes_routing_weights_and_order_of_any_strides(device) -> None:
    p = Problem.draw(SIZES["middle"], device=device)
    wanted, _ = run_experts(p)
    order = Order(strided(p.origin), strided(torch.tensor(p.sizes, device=device)), p.sizes)
    weights = p.first.unflatten(1, (2, -1)), p.second
    got = expert_mlp(p.source, strided(p.scale), *weights, order, activation=swiglu)
    assert torch.equal(got, wanted)
