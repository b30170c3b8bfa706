"""What of Lightning is refused with sharded models, on one process."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn
from torchmetrics import MeanMetric, SumMetric

from lightning_fold import compat


def _trainer(**attributes: Any) -> Any:
    return SimpleNamespace(**{"callbacks": [], "loggers": [], "world_size": 2, **attributes})


@pytest.mark.parametrize("callback", [StochasticWeightAveraging(1e-2), EMAWeightAveraging()])
def test_weight_averaging_is_refused(callback: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(callback).__name__} keeps whole copies"):
        compat.check_trainer(_trainer(callbacks=[callback]))


def test_a_logged_graph_is_refused_on_several_ranks_only() -> None:
    logger = SimpleNamespace(_log_graph=True)
    with pytest.raises(ValueError, match="runs the model on rank 0 alone"):
        compat.check_trainer(_trainer(loggers=[logger]))
    compat.check_trainer(_trainer(loggers=[logger], world_size=1))


def test_a_program_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node 2 FILE"):
        compat.check_relaunch(2, None)
    compat.check_relaunch(1, None)
    compat.check_relaunch(2, "train.py")


def test_optimizers_on_plain_parameters_are_free() -> None:
    params = [nn.Parameter(torch.zeros(2))]
    compat.check_optimizer(torch.optim.LBFGS(params))
    compat.check_optimizer(torch.optim.SGD(params, lr=0.1, fused=True))


def test_stale_parameters_are_bound_to_those_of_the_same_name() -> None:
    old, kept, new = (nn.Parameter(torch.full((2,), float(i))) for i in range(3))
    optimizer = torch.optim.SGD([{"params": [old]}, {"params": [kept], "lr": 0.5}], lr=0.1)
    compat.rebind_stale_parameters(
        optimizer, current={"a": new, "b": kept}, names_before={id(old): "a", id(kept): "b"}
    )
    assert optimizer.param_groups[0]["params"][0] is new
    assert optimizer.param_groups[1]["params"][0] is kept
    assert optimizer.param_groups[1]["lr"] == 0.5


def test_a_foreign_parameter_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"SGD holds a parameter of shape \(3,\)"):
        compat.rebind_stale_parameters(optimizer, current={}, names_before={})


def test_metrics_sync_over_the_given_ranks_and_can_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def gather(value: torch.Tensor, group: Any) -> list[torch.Tensor]:
        asked.append(group)
        return [value]

    monkeypatch.setattr(compat, "gather_all_tensors", gather)
    module, peers = nn.Module(), object()
    module.total = SumMetric(distributed_available_fn=lambda: True)
    module.own = MeanMetric(process_group="mine")
    compat.sync_metrics_over(module, peers)  # type: ignore[arg-type]
    metric = copy.deepcopy(module.total)
    metric.update(2.0)
    assert float(metric.compute()) == 2.0
    assert asked == [peers]
    assert module.own.dist_sync_fn is None


@pytest.mark.parametrize(
    ("path", "options", "wants"),
    [("runs/x.ckpt", None, False), ("s3://bucket/x.ckpt", None, True), ("x.ckpt", {}, True)],
)
def test_remote_storage_and_options_go_through_a_checkpoint_plugin(
    path: str, options: Any, wants: bool
) -> None:
    assert compat.wants_own_io(TorchCheckpointIO(), path, options) is wants
    assert compat.wants_own_io(AsyncCheckpointIO(), path, options)


@pytest.mark.parametrize(
    ("save_last", "async_save"), [("link", True), ("link", False), (True, True)]
)
def test_a_link_to_checkpoints_behind_training_is_refused(save_last: Any, async_save: bool) -> None:
    trainer: Any = SimpleNamespace(
        callbacks=[ModelCheckpoint(save_last=save_last)], loggers=[], world_size=1
    )
    if save_last == "link" and async_save:
        with pytest.raises(ValueError, match="Change `save_last`"):
            compat.check_trainer(trainer, async_save=async_save)
    else:
        compat.check_trainer(trainer, async_save=async_save)
