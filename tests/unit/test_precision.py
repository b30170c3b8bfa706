"""Precision plugins: which are accepted, how they clip, and the scaler's overflow flag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn

from lightning_fold import FoldedMoEStrategy, precision
from lightning_fold.precision import FoldedGradScaler


def _install(plugin: Precision) -> list[torch.Tensor]:
    norms: list[torch.Tensor] = []
    precision.install(plugin, on_norm=norms.append, device=lambda: torch.device("cpu"))
    return norms


def _optimizer(*gradient: float) -> torch.optim.SGD:
    param = nn.Parameter(torch.zeros(len(gradient)))
    param.grad = torch.tensor(gradient)
    return torch.optim.SGD([param], lr=1.0)


@pytest.mark.parametrize(
    "plugin",
    [
        Precision(),
        DoublePrecision(),
        HalfPrecision("bf16-true"),
        MixedPrecision("bf16-mixed", "cpu"),
        MixedPrecision("16-mixed", "cpu", FoldedGradScaler("cpu")),
    ],
    ids=lambda plugin: plugin.precision,
)
def test_supported_precisions_clip_over_the_meshes(plugin: Precision) -> None:
    norms, optimizer = _install(plugin), _optimizer(3.0, 4.0)
    plugin.clip_gradients(optimizer, 1.0)
    assert [float(norm) for norm in norms] == [5.0]
    (param,) = optimizer.param_groups[0]["params"]
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))


def test_clipping_by_value_records_no_norm() -> None:
    plugin = Precision()
    norms, optimizer = _install(plugin), _optimizer(3.0, -0.5)
    plugin.clip_gradients(optimizer, 1.0, "value")  # type: ignore[arg-type]
    (param,) = optimizer.param_groups[0]["params"]
    assert param.grad.tolist() == [1.0, -0.5]
    assert norms == []


class EnginePrecision(Precision):
    precision: Any = "transformer-engine"


class OwnPrecision(Precision):
    """A user's plugin of a supported name: what it changes is not known."""


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (HalfPrecision("16-true"), "'16-true' .HalfPrecision"),
        (EnginePrecision(), "'transformer-engine' .EnginePrecision"),
        (OwnPrecision(), "'32-true' .OwnPrecision"),
    ],
    ids=["16-true", "transformer-engine", "own"],
)
def test_other_precisions_are_refused_with_the_legal_ones(plugin: Precision, name: str) -> None:
    strategy = FoldedMoEStrategy()
    with pytest.raises(ValueError, match=f"{name}.* is not supported .*legal: 32-true, 64-true"):
        strategy.precision_plugin = plugin


def test_lightnings_scaler_is_replaced_with_its_settings() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    _install(plugin)
    assert type(plugin.scaler) is FoldedGradScaler
    assert plugin.scaler.get_scale() == 8.0
    assert plugin.scaler.get_growth_interval() == 3


@pytest.mark.parametrize("gradient", [(4.0, float("inf")), (float("nan"), 4.0)], ids=["inf", "nan"])
def test_an_overflow_skips_the_step_and_halves_the_scale(gradient: tuple[float, ...]) -> None:
    scaler, optimizer = FoldedGradScaler("cpu", init_scale=4.0), _optimizer(*gradient)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    (param,) = optimizer.param_groups[0]["params"]
    assert param.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 2.0


def test_finite_gradients_are_unscaled_once() -> None:
    scaler, optimizer = FoldedGradScaler("cpu", init_scale=4.0), _optimizer(4.0, 8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    (param,) = optimizer.param_groups[0]["params"]
    assert param.tolist() == [-1.0, -2.0]
    assert scaler.get_scale() == 4.0
