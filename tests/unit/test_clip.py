"""The gradient norm and clipping on one process."""

import math

import pytest
import torch
from torch import nn

from lightning_fold.params import clip_by_norm, clip_by_value, gradient_norm

CPU = torch.device("cpu")


def _params(*shapes: tuple[int, ...], value: float = 1.0) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.full_like(param, value)
    return params


def test_norm_of_ones_is_the_root_of_their_number() -> None:
    params = _params((3, 5), (7,), ())
    assert float(gradient_norm(params, device=CPU)) == pytest.approx(math.sqrt(23))


def test_parameters_without_gradient_are_skipped() -> None:
    params = [*_params((2, 2)), nn.Parameter(torch.ones(9))]
    assert float(clip_by_norm(params, 1.0, device=CPU)) == pytest.approx(2.0)
    assert params[1].grad is None


def test_norm_accumulates_in_double() -> None:
    (param,) = _params((1,), value=1e30)
    assert float(gradient_norm([param], device=CPU)) == pytest.approx(1e30)


def test_clipping_returns_the_norm_before_and_scales_to_the_bound() -> None:
    params = _params((4, 4), value=3.0)
    assert float(clip_by_norm(params, 0.5, device=CPU)) == pytest.approx(12.0)
    assert float(gradient_norm(params, device=CPU)) == pytest.approx(0.5, rel=1e-5)


def test_a_small_gradient_is_left_alone() -> None:
    (param,) = _params((4,), value=0.1)
    clip_by_norm([param], 1.0, device=CPU)
    assert torch.equal(param.grad, torch.full((4,), 0.1))


def test_clipping_equals_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = _params((3, 4), (5,)), _params((3, 4), (5,))
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm = nn.utils.clip_grad_norm_(theirs, 0.3)
    assert float(clip_by_norm(ours, 0.3, device=CPU)) == pytest.approx(float(norm))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_clip_by_value_clamps_both_signs() -> None:
    (param,) = _params((3,))
    param.grad = torch.tensor([-5.0, 0.2, 7.0])
    clip_by_value([param], 1.0)
    assert param.grad.tolist() == pytest.approx([-1.0, 0.2, 1.0])


def test_no_gradients_have_norm_zero() -> None:
    assert float(gradient_norm([nn.Parameter(torch.ones(2))], device=CPU)) == 0.0
