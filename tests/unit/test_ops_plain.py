"""Ops where no kernel serves: plain forms as registered, their gradients, what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fold_kernels import ops
from fold_kernels.activation import ACTIVATIONS, GATED, differentiate
from fold_kernels.ops.router import router_topk_backward_ref
from fold_kernels.router import RouterSpec, route_ref

# Shapes.  S = 4 rows   R = 6 pairs   e = 3 experts   D = 7 model width   F = 5 expert width
FP64 = torch.float64
OFFSETS = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
ORIGIN = torch.tensor([0, 1, 2, 3, 0, 1])
SPECS = {
    "softmax": RouterSpec(3),
    "plain": RouterSpec(3, renormalise=False, scaling_factor=2.5),
    "sigmoid": RouterSpec(3, "sigmoid", num_groups=4, top_groups=2),
    "sqrt_softplus": RouterSpec(3, "sqrt_softplus", group_score="max"),
    "after": RouterSpec(3, softmax_after_topk=True, scaling_factor=0.5),
    "all": RouterSpec(8),
    "one": RouterSpec(1, "sigmoid", renormalise=False),
}


def draw(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=FP64).requires_grad_(grad)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("tokens", [6, 0])
@pytest.mark.parametrize("name", SPECS)
def test_the_router_has_the_gradient_of_autograd(name: str, tokens: int) -> None:
    logits, spec = draw(tokens, 8), SPECS[name]
    wanted, index, _ = route_ref(logits, spec)
    upstream = torch.randn_like(wanted)
    (grad,) = torch.autograd.grad(wanted, logits, upstream)
    weights, chosen = ops.router_topk(logits, spec)
    assert torch.equal(chosen, index)
    torch.testing.assert_close(weights, wanted)
    (got,) = torch.autograd.grad(weights, logits, upstream)
    torch.testing.assert_close(got, grad, rtol=1e-12, atol=1e-14)
    apart = router_topk_backward_ref(logits.detach(), index, upstream, spec)
    torch.testing.assert_close(apart, grad, rtol=1e-12, atol=1e-14)


def test_the_gradient_of_an_expert_far_below_is_a_number() -> None:
    logits = torch.tensor([[-1e4, 1.0, 2.0, 3.0]], requires_grad=True)
    weights, _ = ops.router_topk(logits, RouterSpec(2, "sqrt_softplus"))
    (grad,) = torch.autograd.grad(weights.square().sum(), logits)
    assert torch.isfinite(grad).all()
    assert grad[0, 0] == 0.0


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_differentiated_as_by_autograd(name: str) -> None:
    hidden = (6 * draw(50, 10, grad=False)).requires_grad_()
    out = ACTIVATIONS[name](hidden)
    upstream = torch.randn_like(out)
    (wanted,) = torch.autograd.grad(out, hidden, upstream)
    got = differentiate(name, hidden.detach(), upstream)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gathered", [True, False])
def test_the_backward_through_the_second_product(name: str, gathered: bool) -> None:
    depth = 10 if name in GATED else 5
    hidden, scale, second = draw(6, depth), draw(6), draw(3, 7, 5, grad=False)
    act = ACTIVATIONS[name](hidden) * scale.unsqueeze(1)
    upstream = draw(4 if gathered else 6, 7, grad=False)
    rows = upstream[ORIGIN] if gathered else upstream
    out = torch.cat([act[:2] @ second[0].T, act[2:] @ second[2].T])
    wanted = torch.autograd.grad(out, (hidden, scale), rows)
    with torch.no_grad():
        grad_hidden, again, grad_scale = ops.down_backward(
            upstream, second, hidden, scale, OFFSETS, activation=name,
            origin_R=ORIGIN if gathered else None,
        )  # fmt: skip
    # The routing weights are fp32 inside.
    torch.testing.assert_close(again, act, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad_hidden, wanted[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad_scale.double(), wanted[1], rtol=1e-6, atol=1e-6)


def test_rows_from_nowhere_give_no_gradient() -> None:
    source = draw(4, 3)
    out = ops.gather_rows(source, torch.tensor([0, -1, 2, 0]))
    assert torch.equal(out[1], torch.zeros(3, dtype=FP64))
    (grad,) = torch.autograd.grad(out.sum(), source)
    assert grad[:, 0].tolist() == [2.0, 0.0, 1.0, 0.0]


REGISTERED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "grouped_gemm": lambda: (draw(6, 7), draw(3, 5, 7), OFFSETS, False, draw(3, 5), draw(6)),
    "weight_gradient": lambda: (
        draw(6, 5, grad=False), draw(4, 7, grad=False), OFFSETS, ORIGIN, "right", FP64,
    ),
    "up_projection": lambda: (
        draw(4, 7), draw(3, 10, 7), draw(6), OFFSETS, "swiglu", ORIGIN, draw(3, 10),
    ),
    "down_backward": lambda: (
        draw(4, 7, grad=False), draw(3, 7, 5, grad=False), draw(6, 10, grad=False),
        draw(6, grad=False), OFFSETS, "clamped_swiglu", ORIGIN,
    ),
    "gather_rows": lambda: (draw(4, 7), torch.tensor([0, -1, 2, 0])),
    "combine_rows": lambda: (
        draw(4, 7), torch.tensor([0, 2, -1]), torch.tensor([0, 1, 3]), torch.rand(3),
    ),
    "expert_index": lambda: (torch.tensor([0, 2, 1, 9]), 3),
    "router_topk": lambda: (draw(4, 8), None, 2, "softmax", False, True, 1.0, 1, 1, "max"),
    "router_topk_backward": lambda: (
        draw(4, 8, grad=False), torch.tensor([[0, 1]] * 4), draw(4, 2, grad=False),
        2, "softmax", False, True, 1.0, 1, 1, "max",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REGISTERED)
def test_plain_forms_are_registered_as_torch_asks(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.fold_kernels, name), REGISTERED[name]())


ROWS, FIRST, SCALE = torch.randn(6, 7), torch.randn(3, 10, 7), torch.rand(6)
SECOND = torch.randn(3, 7, 5)
REFUSED: dict[str, Callable[[], Any]] = {
    r"top_k=9 .* 1\.\.8": lambda: ops.router_topk(torch.randn(4, 8), RouterSpec(9)),
    r"scores='sofmax' .* one of softmax, sigmoid": lambda: ops.router_topk(
        torch.randn(4, 8), RouterSpec(2, scores="sofmax")  # type: ignore[arg-type]
    ),
    r"bias \(1,\) is not one number": lambda: ops.router_topk(
        torch.randn(4, 8), RouterSpec(2), torch.zeros(1)
    ),
    r"router_topk: logits \(8,\)": lambda: ops.router_topk(torch.randn(8), RouterSpec(2)),
    r"gather='middle' must be": lambda: ops.weight_gradient(
        ROWS, ROWS, OFFSETS, origin_R=ORIGIN, gather="middle"  # type: ignore[arg-type]
    ),
    r"6 rows on the left meet 5": lambda: ops.weight_gradient(ROWS, ROWS[:5], OFFSETS),
    r"left is torch.float32, and right": lambda: ops.weight_gradient(ROWS, ROWS.half(), OFFSETS),
    r"bias_eN is \(1, 10\) and must be \[3, 10\]": lambda: ops.grouped_gemm(
        ROWS, FIRST, OFFSETS, bias_eN=torch.zeros(1, 10), scale_R=SCALE
    ),
    r"scale_R is \(1,\) and must be \[6\]": lambda: ops.grouped_gemm(
        ROWS, FIRST, OFFSETS, bias_eN=torch.zeros(3, 10), scale_R=SCALE[:1]
    ),
    r"offsets_e1 is torch.float32 and must be int32": lambda: ops.grouped_gemm(
        ROWS, FIRST, OFFSETS.float()
    ),
    r"offsets_e1 is \(3,\) and must be \[3 \+ 1\]": lambda: ops.grouped_gemm(
        ROWS, FIRST, OFFSETS[1:]
    ),
    r"weight is torch.float16 and must be torch.float32": lambda: ops.grouped_gemm(
        ROWS, FIRST.half(), OFFSETS
    ),
    r"weight is \(10, 7\)": lambda: ops.grouped_gemm(ROWS, FIRST[0], OFFSETS),
    r"rows_RK is \(7,\)": lambda: ops.grouped_gemm(ROWS[0], FIRST, OFFSETS),
    r"up_projection: scale_R is \(6, 1\)": lambda: ops.up_projection(
        ROWS, FIRST, SCALE.unsqueeze(1), OFFSETS
    ),
    r"origin_R is \(5,\) and must be \[6\]": lambda: ops.up_projection(
        ROWS, FIRST, SCALE, OFFSETS, origin_R=ORIGIN[:5]
    ),
    r"down_backward: hidden_RO is \(6, 5\)": lambda: ops.down_backward(
        ROWS, SECOND, torch.randn(6, 5), SCALE, OFFSETS
    ),
    r"down_backward: activation='silu' must be": lambda: ops.down_backward(
        ROWS, SECOND, torch.randn(6, 10), SCALE, OFFSETS, activation="silu"
    ),
    r"gather_rows: source_SD is \(7,\)": lambda: ops.gather_rows(ROWS[0], ORIGIN),
    r"origin_R is torch.float32": lambda: ops.gather_rows(ROWS, ORIGIN.float()),
    r"scale_P is \(2,\)": lambda: ops.combine_rows(ROWS, ORIGIN, OFFSETS, SCALE[:2]),
    r"quantize_rows: \(128,\) has 1": lambda: ops.quantize_rows(torch.randn(128)),
    r"are of `quantize_rows` and weights": lambda: ops.fp8_grouped_gemm(
        ops.quantize_blocks(torch.randn(1, 128, 128)), ops.quantize_rows(torch.randn(6, 128)),
        OFFSETS, dtype=torch.float32,
    ),
    r"sizes \[7\] are not 1 counts": lambda: ops.fp8_grouped_gemm(
        ops.quantize_rows(torch.randn(6, 128)), ops.quantize_blocks(torch.randn(1, 128, 128)),
        torch.tensor([0, 6], dtype=torch.int32), dtype=torch.float32, sizes=[7],
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_do_not_fit_are_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_offsets_of_either_integer_serve() -> None:
    wanted = ops.grouped_gemm(ROWS, FIRST, OFFSETS)
    assert torch.equal(ops.grouped_gemm(ROWS, FIRST, OFFSETS.long()), wanted)
