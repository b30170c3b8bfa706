"""MFUMonitor on a clock that only the toy model moves, and the table and measurement of peaks."""

import logging
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_fold.callbacks import MFUMonitor, ModelShape, mfu, peak, register_device
from lightning_fold.callbacks.flops import training_flops
from lightning_fold.callbacks.mfu import data_parallel_size, tokens_of_batch
from lightning_fold.callbacks.report import read_metrics

SHAPE = ModelShape(8, 16, 8, 8, moe_layers=1, top_k=2, expert_width=4)
BATCH, SEQUENCE = 2, 5
TOKENS = BATCH * SEQUENCE
FLOPS = training_flops(SHAPE, tokens=TOKENS, sequence_length=SEQUENCE)


class Clock:
    """Seconds that pass only when the model says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Toy(LightningModule):
    """A training batch takes 2 s, of the first step 50 s, a validation batch 1000 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.layer = clock, nn.Linear(SEQUENCE, 1)

    def training_step(self, batch, batch_idx):
        self.clock.now += 50.0 if self.trainer.global_step == 0 else 2.0
        loss = self.layer(batch["input_ids"].float()).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.clock.now += 1000.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        ids = torch.arange(SEQUENCE)
        return DataLoader([{"input_ids": ids}] * 80, batch_size=BATCH)

    def val_dataloader(self):
        return DataLoader([{"input_ids": torch.arange(SEQUENCE)}], batch_size=1)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(mfu, "perf_counter", clock)
    return clock


def fit(monitor, clock, folder, *, callbacks=(), **options):
    settings = {
        "max_steps": 20,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 5,
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": CSVLogger(folder, name="", version=""),
    }
    trainer = Trainer(**{**settings, **options}, callbacks=[monitor, *callbacks])
    trainer.fit(Toy(clock))
    return trainer, read_metrics(folder / "metrics.csv")


# Lightning's own, on torch 2.13; and the toy has no worker processes to gain from.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers"
)


def test_rates_are_tokens_and_flops_over_the_seconds_of_the_training_loop(clock, tmp_path):
    _, metrics = fit(MFUMonitor(shape=SHAPE, peak_flops=1e4), clock, tmp_path)
    assert metrics["fold/tokens_per_s"].steps == [4, 9, 14, 19]
    # The 50 s of the first step lie before the first window.
    assert metrics["fold/tokens_per_s"].values == pytest.approx([TOKENS / 2] * 4)
    assert metrics["fold/tflops_per_device"].values == pytest.approx([FLOPS / 2e12] * 4)
    assert metrics["fold/mfu"].values == pytest.approx([FLOPS / 2 / 1e4] * 4)
    assert metrics["fold/tokens"].values == [5 * TOKENS, 10 * TOKENS, 15 * TOKENS, 20 * TOKENS]


def test_the_progress_bar_shows_loss_tokens_per_second_and_mfu(clock, tmp_path):
    trainer, _ = fit(MFUMonitor(shape=SHAPE, peak_flops=1e4), clock, tmp_path)
    assert {"train_loss", "fold/tokens_per_s", "fold/mfu"} <= set(trainer.progress_bar_metrics)
    assert not {"fold/tokens", "fold/tflops_per_device"} & set(trainer.progress_bar_metrics)


def test_validation_and_the_checkpoint_after_it_are_not_training_time(clock, tmp_path):
    class SlowCheckpoint(Callback):
        def on_validation_end(self, trainer, pl_module):
            clock.now += 500.0

    _, metrics = fit(
        MFUMonitor(shape=SHAPE, peak_flops=1e4),
        clock,
        tmp_path,
        callbacks=[SlowCheckpoint()],
        limit_val_batches=1,
        val_check_interval=3,
        num_sanity_val_steps=1,
    )
    assert metrics["fold/tokens_per_s"].values == pytest.approx([TOKENS / 2] * 4)


def test_accumulated_batches_all_count_and_rates_are_logged_per_step(clock, tmp_path):
    _, metrics = fit(
        MFUMonitor(shape=SHAPE, peak_flops=1e4),
        clock,
        tmp_path,
        accumulate_grad_batches=2,
        max_steps=10,
    )
    assert metrics["fold/tokens_per_s"].steps == [4, 9]
    assert metrics["fold/tokens_per_s"].values == pytest.approx([TOKENS / 2] * 2)
    assert metrics["fold/tokens"].values == [10 * TOKENS, 20 * TOKENS]


def test_a_second_fit_starts_to_count_anew(clock, tmp_path):
    monitor = MFUMonitor(shape=SHAPE, peak_flops=1e4)
    fit(monitor, clock, tmp_path / "a")
    clock.now += 7000.0
    _, metrics = fit(monitor, clock, tmp_path / "b")
    assert metrics["fold/tokens_per_s"].values == pytest.approx([TOKENS / 2] * 4)
    assert metrics["fold/tokens"].values[0] == 5 * TOKENS


def test_batch_tokens_replaces_the_count(clock, tmp_path):
    monitor = MFUMonitor(shape=SHAPE, peak_flops=1e4, batch_tokens=lambda batch: (6, 3))
    _, metrics = fit(monitor, clock, tmp_path)
    flops = training_flops(SHAPE, tokens=6, sequence_length=3)
    assert metrics["fold/tokens_per_s"].values == pytest.approx([3.0] * 4)
    assert metrics["fold/mfu"].values == pytest.approx([flops / 2 / 1e4] * 4)


def test_a_wider_window_needs_more_log_steps(clock, tmp_path):
    monitor = MFUMonitor(shape=SHAPE, peak_flops=1e4, window_size=4)
    _, metrics = fit(monitor, clock, tmp_path)
    assert metrics["fold/tokens_per_s"].steps == [14, 19]


def test_a_model_without_config_gets_tokens_per_second_and_one_warning(clock, tmp_path):
    with pytest.warns(UserWarning, match="Toy has no `config`") as caught:
        _, metrics = fit(MFUMonitor(), clock, tmp_path)
    assert sum("MFUMonitor" in str(warning.message) for warning in caught) == 1
    assert metrics["fold/tokens_per_s"].values == pytest.approx([TOKENS / 2] * 4)
    assert "fold/mfu" not in metrics
    assert "fold/tflops_per_device" not in metrics


def test_the_definition_is_printed_once_with_convention_and_measured_peak(
    clock, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(mfu, "measure_matmul_peak", lambda *args, **kwargs: 3e12)
    monitor = MFUMonitor(shape=SHAPE)
    with caplog.at_level(logging.INFO):
        for run in ("a", "b"):
            fit(monitor, clock, tmp_path / run)
    printed = [text for text in caplog.messages if "fold/mfu =" in text]
    assert len(printed) == 1
    assert f"({SHAPE.active_weights:.4g} of them" in printed[0]
    assert "causal attention core" in printed[0]
    assert "3 TFLOP/s (CPU, measured: fp32 matmul on 1 processes at once" in printed[0]


def folded(world, *, dp):
    return SimpleNamespace(
        world_size=world, strategy=SimpleNamespace(folding=SimpleNamespace(dp=dp, pp=1))
    )


def test_tokens_count_once_per_data_parallel_rank():
    assert data_parallel_size(folded(8, dp=2)) == 2
    sampler = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 4, "rank": 0})
    assert data_parallel_size(SimpleNamespace(world_size=8, strategy=sampler)) == 4
    single = SimpleNamespace(world_size=1, strategy=object())
    assert data_parallel_size(single) == 1


def test_global_flops_are_divided_by_all_devices(clock, tmp_path, monkeypatch):
    class Folded(Callback):
        # Between strategy set-up and the monitor's start; the run itself stays one process.
        def on_fit_start(self, trainer, pl_module):
            trainer.strategy.folding = SimpleNamespace(dp=2, pp=1)
            monkeypatch.setattr(type(trainer), "world_size", 8)

    _, metrics = fit(MFUMonitor(shape=SHAPE, peak_flops=1e4), clock, tmp_path, callbacks=[Folded()])
    assert metrics["fold/tokens_per_s"].values == pytest.approx([2 * TOKENS / 2] * 4)
    assert metrics["fold/mfu"].values == pytest.approx([2 * FLOPS / 8 / 2 / 1e4] * 4, rel=1e-3)


def test_tokens_are_found_in_the_usual_batches():
    ids = torch.zeros(3, 7, dtype=torch.long)
    for batch in ({"input_ids": ids}, SimpleNamespace(input_ids=ids), (ids, ids), [ids], ids):
        assert tokens_of_batch(batch) == (21, 7)
    for batch in ({"x": ids}, ("text",), [], torch.tensor(1)):
        with pytest.raises(TypeError, match="Pass `batch_tokens`"):
            tokens_of_batch(batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention": "half"}, "'causal', 'full'"),
        ({"peak_flops": 0.0}, "> 0, or None"),
        ({"window_size": 1}, "2 and more"),
    ],
)
def test_illegal_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MFUMonitor(**arguments)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H20-3e", 148.0),
        ("NVIDIA H800", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_dense_peaks_by_device_name(name, teraflops):
    assert peak.lookup_peak(name, "bf16") == (None if teraflops is None else teraflops * 1e12)


def test_a_registered_device_is_found_and_the_longer_name_wins(monkeypatch):
    monkeypatch.setattr(peak, "_PEAKS", {key: dict(row) for key, row in peak._PEAKS.items()})
    register_device("H200 Turbo", "bf16", 7e15)
    assert peak.lookup_peak("NVIDIA H200 Turbo", "bf16") == 7e15
    assert peak.lookup_peak("NVIDIA H200 Turbo", "fp64") is None
    assert peak.lookup_peak("NVIDIA H200", "bf16") == 989.4e12
    with pytest.raises(ValueError, match="Legal compute types: bf16"):
        register_device("H200", "int4", 1e15)


def test_an_unknown_gpu_has_no_peak_and_one_warning():
    with pytest.warns(UserWarning, match="no bf16 peak is known for 'NVIDIA X1'"):
        assert mfu._peak_of_gpu("NVIDIA X1", "bf16").flops is None
    assert mfu._peak_of_gpu("NVIDIA H200", "bf16").flops == 989.4e12


@pytest.mark.parametrize(
    ("precision", "allows_tf32", "compute_type"),
    [
        ("32-true", False, "fp32"),
        ("32-true", True, "tf32"),
        ("bf16-mixed", True, "bf16"),
        ("bf16-true", False, "bf16"),
        ("16-mixed", False, "fp16"),
        ("64-true", True, "fp64"),
    ],
)
def test_the_peak_is_that_of_the_type_the_precision_multiplies_in(
    precision, allows_tf32, compute_type
):
    assert peak.compute_type_of(precision, allows_tf32=allows_tf32) == compute_type


def test_the_measured_peak_is_the_best_joint_round_and_leaves_the_seed_alone(monkeypatch):
    calls, joint = [], iter([5.0, 9.0, 7.0])

    def sum_over_ranks(rate: float) -> float:
        assert rate > 1e6
        calls.append("sum")
        return next(joint)

    before = torch.random.get_rng_state()
    total = peak.measure_matmul_peak(
        "fp32",
        barrier=lambda: calls.append("barrier"),
        sum_over_ranks=sum_over_ranks,
        seconds=0.01,
        rounds=3,
    )
    assert total == 9.0
    assert calls == ["barrier", "sum"] * 3
    assert torch.equal(torch.random.get_rng_state(), before)
