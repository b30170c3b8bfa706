"""Logging and optimization by microbatches on one process: means, refusals, hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_fold.steps.closure import (
    PipelinedAutomaticOptimization,
    check_module,
    install_closure,
)
from lightning_fold.steps.logs import MicrobatchLogs, _Line
from lightning_fold.steps.metrics import StepMetrics, mirror_metrics, unchanged
from lightning_fold.steps.mirror import Mirror, Spec

# Lightning's advice on loaders and loggers, and what its data loops use of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
WEIGHTS = [0.25, 0.75, 0.0]
Step = Callable[[Any, Tensor], None]


class OneStage(SingleDeviceStrategy):
    """The last stage alone, with a microbatch a row."""

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self.logs = MicrobatchLogs(self.lightning_module, group=None, source=0)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for row, weight in zip(batch.split(1), WEIGHTS, strict=True):
            with self.logs.muted():
                self.lightning_module.validation_step(row * 100, batch_idx)
            with self.logs.microbatch(weight=weight):
                self.lightning_module.validation_step(row, batch_idx)
        self.logs.mirror()


class Module(pl.LightningModule):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.total = SumMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(self, batch)


def logged(step: Step) -> dict[str, Any]:
    """What validation of one batch with rows 1, 2, 4 returns for a step on each row."""
    rows = torch.tensor([[1.0], [2.0], [4.0]])
    strategy = OneStage(accelerator=pl.accelerators.CPUAccelerator(), device="cpu")
    trainer = pl.Trainer(
        strategy=strategy, logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    (metrics,) = trainer.validate(Module(step), DataLoader(rows, batch_size=3), verbose=False)
    return metrics


@pytest.mark.parametrize(
    ("reduce_fx", "value"),
    [("mean", 1.75), ("AVG", 1.75), (torch.sum, 1.75), ("max", 4.0), (torch.min, 1.0)],
)
def test_microbatches_are_combined_by_the_reduction(reduce_fx: Any, value: float) -> None:
    metrics = logged(lambda module, row: module.log("x", row.sum(), reduce_fx=reduce_fx))
    assert metrics == {"x": value}


def test_a_mean_over_nothing_has_no_part_in_the_mean() -> None:
    metrics = logged(lambda module, row: module.log("x", row[row < 4].mean()))
    assert metrics["x"] == pytest.approx(1.75)


def test_a_key_of_weightless_microbatches_only_is_their_mean() -> None:
    def step(module: Any, row: Tensor) -> None:
        if row > 3:
            module.log("late", row.sum())

    assert logged(step) == {"late": 4.0}


def test_a_key_logged_twice_counts_twice_as_in_a_whole_batch() -> None:
    def step(module: Any, row: Tensor) -> None:
        module.log("x", row.sum(), reduce_fx="sum")
        module.log("x", row.sum() * 10, reduce_fx="sum")

    assert logged(step) == {"x": 19.25}


def test_integers_and_halves_become_floats_before_the_mean() -> None:
    def step(module: Any, row: Tensor) -> None:
        module.log("whole", row.sum().long())
        module.log("half", row.sum().bfloat16() + 1 / 64)

    assert logged(step) == {"whole": 1.75, "half": pytest.approx(1.75 + 1 / 64, abs=1e-3)}


def test_metrics_accumulate_microbatches_without_weights() -> None:
    def step(module: Any, row: Tensor) -> None:
        module.total.update(row)
        module.log("total", module.total)

    # Nor with what the muted calls have seen.
    assert logged(step) == {"total": 7.0}


def test_metrics_are_unchanged_by_calls_that_do_not_count() -> None:
    module: Any = nn.Module()
    module.total, module.rows, module.idle = SumMetric(), CatMetric(), MeanMetric()
    module.total.update(1.0)
    module.rows.update(1.0)
    with pytest.raises(KeyError), unchanged(module):
        fail_after_updates(module)
    assert (module.total.compute(), module.rows.compute()) == (1.0, 1.0)
    assert [m.update_count for m in module.children()] == [1, 1, 0]


def fail_after_updates(module: Any) -> None:
    for metric in (module.total, module.rows):
        metric.update(5.0)
    raise KeyError


def test_a_failed_step_leaves_nothing_for_the_next_trainer() -> None:
    results = SimpleNamespace()
    module: Any = nn.Module()
    module.trainer = SimpleNamespace(_results=results)
    logs = MicrobatchLogs(module, group=None, source=0)
    with logs.microbatch(weight=1.0):
        results.log("training_step", "x", torch.tensor(1.0), reduce_fx="mean", on_step=True)
    assert logs._series
    logs.watch(pl.Trainer(barebones=True))
    assert not logs._series


def test_an_own_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Leave `sync_dist_group` out"):
        logged(lambda module, row: module.log("x", row.sum(), sync_dist_group="mine"))


def test_other_arguments_in_another_microbatch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Log a key with the same arguments in all"):
        logged(lambda module, row: module.log("x", row.sum(), prog_bar=bool(row > 1)))


def test_a_metric_outside_of_the_module_is_refused() -> None:
    outside = SumMetric()

    def step(module: Any, row: Tensor) -> None:
        outside.update(row)
        module.log("x", outside, metric_attribute="elsewhere")

    with pytest.raises(ValueError, match=r"'x' in validation_step is no submodule of Module"):
        logged(step)


def test_an_unknown_reduction_is_refused_by_lightning() -> None:
    with pytest.raises(Exception, match=r"Found: median"):
        logged(lambda module, row: module.log("x", row.sum(), reduce_fx=torch.median))


def test_the_collection_is_left_as_it_was() -> None:
    def step(module: Any, row: Tensor) -> None:
        seen.append(module.trainer._results)
        raise KeyError

    seen: list[Any] = []
    with pytest.raises(KeyError):
        logged(step)
    assert "log" not in vars(seen[0])


def test_values_of_the_last_epoch_are_dropped_where_lightning_drops_them() -> None:
    calls: list[Any] = []
    results = SimpleNamespace(
        reset=lambda **options: calls.append(("reset", options)),
        log=lambda *args, **options: calls.append(("log", args)),
    )
    connector = SimpleNamespace(should_reset_tensors=lambda fx: fx == "training_step")
    module: Any = nn.Module()
    module.trainer = SimpleNamespace(
        _results=results, _logger_connector=connector, strategy=SimpleNamespace(reduce=None)
    )
    logs = MicrobatchLogs(module, group=None, source=0)
    for fx in ("training_step", "validation_step"):
        logs._log(_Line(fx, "x", (), None, None), None, None)
    assert calls == [
        ("reset", {"metrics": False, "fx": "training_step"}),
        ("log", ("training_step", "x", None)),
        ("log", ("validation_step", "x", None)),
    ]
    assert connector._current_fx == "validation_step"


# Values of metrics over a step.


def test_step_value_is_that_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.f1 = MulticlassF1Score(3)
    module.all = MetricCollection([MulticlassAccuracy(3), CatMetric()])
    step = StepMetrics(module)
    module.f1(torch.randn(4, 3), torch.randint(3, (4,)))
    logits, labels = torch.randn(7, 3), torch.randint(3, (7,))
    for rows, wanted in zip(logits.split(3), labels.split(3), strict=True):
        with step.watching():
            module.f1(rows, wanted)
            module.all["CatMetric"](rows)
    assert step.value(module.f1) == MulticlassF1Score(3)(logits, labels)
    assert torch.equal(step.value(module.all["CatMetric"]), logits)
    assert step.value(module.all["MulticlassAccuracy"]) is None
    assert module.f1.update_count == 4
    step.clear()
    assert step.value(module.f1) is None


def test_step_values_share_the_group_of_a_metric() -> None:
    class Group:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("a process group cannot be copied")

    module = nn.Module()
    module.total = SumMetric(process_group=Group(), distributed_available_fn=lambda: False)
    step = StepMetrics(module)
    with step.watching():
        module.total(2.0)
    assert step.value(module.total) == 2.0


def test_mirroring_drops_the_cached_value_of_the_source() -> None:
    module: Any = nn.Module()
    module.device = torch.device("cpu")
    module.mean = MeanMetric()
    module.mean.update(3.0)
    assert module.mean.compute() == 3.0
    mirror_metrics(module, group=None, source=0)
    assert module.mean._computed is None
    assert module.mean.compute() == 3.0


def test_packed_tensors_arrive_bit_for_bit() -> None:
    lone = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t()[1:2, :1]
    values = [
        torch.tensor(math.nan),
        torch.tensor([True, False, True]),
        lone.transpose(0, 1),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        torch.tensor(2**60 + 1),
    ]
    mirror = Mirror(None, 0, torch.device("cpu"))
    received = mirror.tensors([Spec.of(value) for value in values], values)
    for one, other in zip(received, values, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        assert (one.dtype, one.shape) == (other.dtype, other.shape)


# The closure and what it cannot do.


def test_progress_is_kept_and_installed_once() -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    loop = trainer.fit_loop.epoch_loop
    progress = loop.automatic_optimization.optim_progress
    install_closure(trainer)
    installed = loop.automatic_optimization
    install_closure(trainer)
    assert isinstance(installed, PipelinedAutomaticOptimization)
    assert loop.automatic_optimization is installed
    assert installed.optim_progress is progress


class Manual(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class FromIterator(pl.LightningModule):
    def training_step(self, dataloader_iter: Any) -> None:
        """Draw a batch."""


class ValidatesFromIterator(pl.LightningModule):
    def validation_step(self, dataloader_iter: Any) -> None:
        """Draw a batch."""


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (Manual(), r"Manual\.automatic_optimization is False"),
        (FromIterator(), r"FromIterator\.training_step takes `dataloader_iter`"),
        (ValidatesFromIterator(), r"ValidatesFromIterator\.validation_step takes"),
    ],
)
def test_steps_that_cannot_be_cut_are_refused(module: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_module(module)


def test_the_search_for_a_batch_size_is_refused() -> None:
    module = pl.LightningModule()
    check_module(module)
    module._trainer = SimpleNamespace(callbacks=[BatchSizeFinder()])  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"BatchSizeFinder .* Remove it"):
        check_module(module)
