"""ExpertLoadMonitor on one process with a strategy that carries telemetry, and its statistics."""

import math

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_fold.callbacks import ExpertLoadMonitor, expert_load
from lightning_fold.callbacks.expert_load import (
    LoadRecord,
    draw_expert_load,
    load_statistics,
    thin_history,
)
from lightning_fold.callbacks.report import read_metrics
from lightning_fold.checkpoint import files
from lightning_fold.telemetry import RoutingCounts, Telemetry

# Lightning's own, on torch 2.13; and the toy has no worker processes to gain from.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers"
)

FIRST, SECOND = "model.layers.1.mlp", "model.layers.3.mlp"
PNG = b"\x89PNG"


class TelemetryStrategy(SingleDeviceStrategy):
    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.telemetry = Telemetry()


class Toy(LightningModule):
    """Step i routes i rows to expert 0 and one to expert 1 of layer 1; layer 3 is even."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        super().__init__()
        self.layer, self.fails_at = nn.Linear(1, 1), fails_at

    def route(self, layer, counts):
        event = RoutingCounts(layer=layer, counts_E=torch.tensor(counts), training=self.training)
        self.trainer.strategy.telemetry.emit(event)

    def training_step(self, batch, batch_idx):
        if self.trainer.fit_loop.total_batch_idx == self.fails_at:
            raise RuntimeError("the step fails")
        self.route(FIRST, [self.trainer.fit_loop.total_batch_idx, 1, 0, 0])
        self.route(SECOND, [2, 2])
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.route(FIRST, [0, 0, 0, 1000])
        self.route(SECOND, [1000, 0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(torch.ones(64, 1), batch_size=4)

    def val_dataloader(self):
        return DataLoader(torch.ones(4, 1), batch_size=4)


def make_trainer(monitor, folder, **options):
    settings = {
        "strategy": TelemetryStrategy(),
        "max_steps": 10,
        "log_every_n_steps": 4,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": CSVLogger(folder, name="", version=""),
    }
    return Trainer(**{**settings, **options}, callbacks=[monitor])


def test_counts_of_all_steps_since_the_last_log_are_logged_per_layer_and_as_means(tmp_path):
    monitor = ExpertLoadMonitor()
    make_trainer(monitor, tmp_path, val_check_interval=3).fit(Toy())
    metrics = read_metrics(tmp_path / "metrics.csv")
    # Steps 0..3 and 4..7 route 6+4 and 22+4 rows; validation routes none that count.
    first = [4 * 6 / 10, 4 * 22 / 26]
    assert metrics[f"fold/expert_load/{FIRST}/max_over_mean"].values == pytest.approx(first)
    assert metrics[f"fold/expert_load/{FIRST}/dead_fraction"].values == [0.5, 0.5]
    assert metrics[f"fold/expert_load/{SECOND}/max_over_mean"].values == [1.0, 1.0]
    assert metrics[f"fold/expert_load/{SECOND}/entropy"].values == pytest.approx([1.0, 1.0])
    means = [(value + 1) / 2 for value in first]
    assert metrics["fold/expert_load/max_over_mean"].values == pytest.approx(means)
    assert metrics["fold/expert_load/dead_fraction"].values == [0.25, 0.25]
    assert metrics["fold/expert_load/max_over_mean"].steps == [3, 7]


def test_the_history_ends_with_the_steps_after_the_last_log(tmp_path):
    monitor = ExpertLoadMonitor()
    make_trainer(monitor, tmp_path).fit(Toy())
    assert [record.step for record in monitor.history] == [4, 8, 10]
    assert monitor.history[-1].counts[FIRST].tolist() == [8 + 9, 2, 0, 0]


def test_all_layers_are_reduced_in_one_collective_per_log_step(tmp_path, monkeypatch):
    reduced = []

    def sum_of_three_ranks(values):
        reduced.append(values.tolist())
        return values.mul_(3)

    monkeypatch.setattr(expert_load, "sum_over_world", sum_of_three_ranks)
    monitor = ExpertLoadMonitor()
    make_trainer(monitor, tmp_path).fit(Toy())
    assert reduced == [[6, 4, 0, 0, 8, 8], [22, 4, 0, 0, 8, 8], [17, 2, 0, 0, 4, 4]]
    assert monitor.history[0].counts[SECOND].tolist() == [24, 24]


def test_the_event_tensor_is_not_written_to(tmp_path):
    monitor, counts = ExpertLoadMonitor(), torch.tensor([1, 2])
    for _ in range(2):
        monitor._add(RoutingCounts(layer=FIRST, counts_E=counts, training=True))
    assert counts.tolist() == [1, 2]
    assert monitor._counts[FIRST].tolist() == [2, 4]


def test_accumulated_batches_are_all_counted(tmp_path):
    monitor = ExpertLoadMonitor()
    make_trainer(monitor, tmp_path, accumulate_grad_batches=2, max_steps=4).fit(Toy())
    assert [record.step for record in monitor.history] == [4]
    assert monitor.history[0].counts[SECOND].tolist() == [16, 16]


def test_the_picture_lies_in_the_run_folder_or_where_dirpath_says(tmp_path):
    make_trainer(ExpertLoadMonitor(), tmp_path / "run").fit(Toy())
    make_trainer(ExpertLoadMonitor(tmp_path / "own"), tmp_path / "other").fit(Toy())
    for path in (tmp_path / "run" / "expert_load.png", tmp_path / "own" / "expert_load.png"):
        assert path.read_bytes().startswith(PNG)
    assert not (tmp_path / "other" / "expert_load.png").exists()


@pytest.mark.parametrize("fails_at", [None, 5])
def test_nobody_listens_after_the_fit_even_if_it_fails(tmp_path, fails_at):
    monitor = ExpertLoadMonitor()
    trainer = make_trainer(monitor, tmp_path)
    if fails_at is None:
        trainer.fit(Toy())
    else:
        with pytest.raises(RuntimeError, match="the step fails"):
            trainer.fit(Toy(fails_at=fails_at))
    assert not trainer.strategy.telemetry.wants(RoutingCounts)
    assert (tmp_path / "expert_load.png").exists() == (fails_at is None)


def test_a_strategy_without_telemetry_is_refused_at_set_up(tmp_path):
    trainer = make_trainer(ExpertLoadMonitor(), tmp_path, strategy="auto", accelerator="cpu")
    with pytest.raises(
        ValueError, match=r"SingleDeviceStrategy emits no routing counts(.|\n)*Fold"
    ):
        trainer.fit(Toy())


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 5, 5, 5], (1.0, 1.0, 0.0)),
        ([8, 0, 0, 0], (4.0, 0.0, 0.75)),
        ([2, 2, 0, 0], (2.0, 0.5, 0.5)),
        ([0, 0], (1.0, 1.0, 1.0)),
        ([7], (1.0, 1.0, 0.0)),
        ([3, 1], (1.5, (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(2), 0.0)),
    ],
    ids=["even", "one-expert", "half", "no-rows", "single-expert", "three-to-one"],
)
def test_statistics_of_known_loads(counts, expected):
    assert tuple(load_statistics(torch.tensor(counts))) == pytest.approx(expected)


def record(step, *, rows=1):
    return LoadRecord(step, {FIRST: torch.tensor([rows, 0])})


def test_a_long_history_is_joined_without_losing_a_row():
    history = []
    for step in range(1, 2000):
        history = thin_history([*history, record(step)])
        assert len(history) < 512
    assert sum(entry.counts[FIRST][0].item() for entry in history) == 1999
    assert history[-1].step == 1999
    assert [entry.step for entry in history] == sorted({entry.step for entry in history})


def test_an_odd_history_keeps_its_last_record(monkeypatch):
    monkeypatch.setattr(expert_load, "_MAX_RECORDS", 3)
    thinned = thin_history([record(1), record(2), record(3)])
    assert [entry.step for entry in thinned] == [2, 3]
    assert [entry.counts[FIRST][0].item() for entry in thinned] == [2, 1]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_histories_of_any_length_can_be_drawn(tmp_path, length):
    layers = {FIRST: torch.tensor([4, 0, 2, 2]), SECOND: torch.tensor([1, 3])}
    history = [LoadRecord(step + 1, layers) for step in range(length)]
    draw_expert_load(history, tmp_path / "load.png")
    assert [path.name for path in tmp_path.iterdir()] == ["load.png"]


def test_a_failed_write_leaves_the_old_picture(tmp_path, monkeypatch):
    target = tmp_path / "load.png"
    target.write_bytes(b"old")

    def fail(path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(files, "written", fail)
    with pytest.raises(OSError, match="disk full"):
        draw_expert_load([record(1)], target)
    assert target.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1
