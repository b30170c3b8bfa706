"""Reading metrics.csv as Lightning writes it, the summary, and the pictures of RunReport."""

import json
import os

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_fold.callbacks import (
    MFUMonitor,
    ModelShape,
    RunReport,
    ValidateAtStart,
    report,
    summarise,
)
from lightning_fold.callbacks.__main__ import main, newest_run
from lightning_fold.callbacks.report import read_metrics
from lightning_fold.topology.folding import Folding

# Lightning's own, on torch 2.13; and the toy has no worker processes to gain from.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers"
)

PNG = b"\x89PNG"
SHAPE = ModelShape(8, 16, 8, 8, moe_layers=1, top_k=2, expert_width=4)


class Toy(LightningModule):
    """A weight that falls by exactly 1 per step; both losses are its value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(30.0))

    def training_step(self, batch, batch_idx):
        self.log("train_loss", self.weight)
        return self.weight

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.weight)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        return DataLoader(torch.ones(64, 4), batch_size=2)

    def val_dataloader(self):
        return DataLoader(torch.ones(2, 4), batch_size=2)


class FoldedStrategy(SingleDeviceStrategy):
    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.folding = Folding.from_world(1)


def make_trainer(folder, *, report=None, **options):
    settings = {
        "accelerator": "cpu",
        "max_steps": 12,
        "log_every_n_steps": 2,
        "val_check_interval": 4,
        "num_sanity_val_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": CSVLogger(folder, name="", version=""),
        "callbacks": [MFUMonitor(shape=SHAPE, peak_flops=1e9), report or RunReport()],
    }
    return Trainer(**{**settings, **options})


@pytest.fixture
def node_widths(monkeypatch):
    """The node widths that rank maps were drawn with; they are drawn all the same."""
    widths, draw = [], report.draw_rank_map

    def recorded(folding, path, *, gpus_per_node):
        widths.append(gpus_per_node)
        draw(folding, path, gpus_per_node=gpus_per_node)

    monkeypatch.setattr(report, "draw_rank_map", recorded)
    return widths


def test_validate_before_fit_gives_the_summary_of_a_real_run(tmp_path):
    trainer, module = make_trainer(tmp_path), Toy()
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    result = summarise(tmp_path, "tp1cp1dp1pp1-etp1ep1edp1")
    metrics = read_metrics(tmp_path / "metrics.csv")
    # Validated before the first step, and after steps 4, 8 and 12.
    assert metrics["val_loss"].values == [30.0, 26.0, 22.0, 18.0]
    assert metrics["val_loss"].steps == [0, 3, 7, 11]
    assert metrics["train_loss"].steps == [1, 3, 5, 7, 9, 11]
    assert list(result) == [
        "mapping",
        "val_loss_start",
        "val_loss_end",
        "tokens_per_s",
        "mfu",
        "steps",
    ]
    assert result["mapping"] == "tp1cp1dp1pp1-etp1ep1edp1"
    assert (result["val_loss_start"], result["val_loss_end"], result["steps"]) == (30.0, 18.0, 12)
    rates = metrics["fold/tokens_per_s"].values
    assert min(rates) <= result["tokens_per_s"] <= max(rates)
    assert 0 < result["mfu"] < 1


def test_a_validation_after_the_fit_counts_the_steps_exactly(tmp_path):
    trainer, module = make_trainer(tmp_path, val_check_interval=1.0, max_steps=11), Toy()
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    result = summarise(tmp_path, "")
    assert (result["val_loss_end"], result["steps"]) == (19.0, 11)


HEADER = "step,epoch,val_loss,train_loss,fold/tokens_per_s,fold/mfu\n"


def write_csv(folder, *rows):
    path = folder / "metrics.csv"
    path.write_text(HEADER + "".join(row + "\n" for row in rows))
    return path


def test_empty_cells_belong_to_no_series(tmp_path):
    path = write_csv(tmp_path, "0,0,5.5,,,", "9,0,,4.5,100,", "9,0,4.0,,,")
    metrics = read_metrics(path)
    assert metrics["val_loss"] == ([0, 9], [5.5, 4.0])
    assert metrics["train_loss"] == ([9], [4.5])
    assert "fold/mfu" not in metrics
    assert "step" not in metrics


def test_medians_leave_out_the_first_fifth(tmp_path):
    rates = [1, 2, 100, 110, 120, 130, 140, 150, 160, 170]
    rows = [f"{10 * i + 9},0,,3.0,{rate},{rate / 1000}" for i, rate in enumerate(rates)]
    write_csv(tmp_path, "0,0,5.5,,,", *rows, "99,0,2.0,,,")
    result = summarise(tmp_path, "m")
    assert (result["tokens_per_s"], result["mfu"]) == (135.0, 0.135)
    assert result["steps"] == 100


def test_a_summary_without_a_peak_has_no_mfu(tmp_path):
    write_csv(tmp_path, "0,0,5.5,,,", "9,0,,4.5,100,", "9,0,4.0,,,")
    assert summarise(tmp_path, "m")["mfu"] is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["9,0,5.0,,100,", "19,0,4.0,,100,"], r"rows at steps \[9, 19\](.|\n)*ValidateAtStart"),
        (["0,0,5.5,,100,"], r"rows at steps \[0\]"),
        (["0,0,5.5,,,", "9,0,4.0,,,"], r"no fold/tokens_per_s(.|\n)*Add MFUMonitor"),
    ],
    ids=["no-start", "no-end", "no-throughput"],
)
def test_a_run_without_the_needed_rows_is_refused(tmp_path, rows, message):
    write_csv(tmp_path, *rows)
    with pytest.raises(ValueError, match=message):
        summarise(tmp_path, "m")


def test_both_pictures_lie_in_the_run_folder(tmp_path, node_widths):
    trainer = make_trainer(tmp_path, strategy=FoldedStrategy(), report=RunReport(gpus_per_node=4))
    trainer.fit(Toy())
    for name in ("loss.png", "rank_map.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    assert node_widths == [4]
    found = json.loads((tmp_path / "rank_map.json").read_text())
    assert found["mapping_id"] == "tp1cp1dp1pp1-etp1ep1edp1"


def test_dirpath_is_made_and_taken_for_both_pictures(tmp_path, node_widths):
    own = tmp_path / "own"
    trainer = make_trainer(tmp_path, strategy=FoldedStrategy(), report=RunReport(own))
    trainer.fit(Toy())
    assert {path.name for path in own.iterdir()} == {"loss.png", "rank_map.png", "rank_map.json"}
    assert node_widths == [1]


def test_a_strategy_without_a_mapping_gets_the_loss_only(tmp_path, node_widths):
    make_trainer(tmp_path).fit(Toy())
    assert (tmp_path / "loss.png").exists()
    assert node_widths == []


def test_validation_at_start_begins_the_curve_and_the_command_prints_it(tmp_path, capsys):
    callbacks = [MFUMonitor(shape=SHAPE, peak_flops=1e9), ValidateAtStart(), RunReport()]
    make_trainer(tmp_path, strategy=FoldedStrategy(), callbacks=callbacks).fit(Toy())
    metrics = read_metrics(tmp_path / "metrics.csv")
    assert metrics["val_loss"].values == [30.0, 26.0, 22.0, 18.0]
    assert metrics["val_loss"].steps[0] == 0
    assert metrics["train_loss"].steps == [1, 3, 5, 7, 9, 11]
    assert main([str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    result = json.loads(last.removeprefix("result: "))
    assert (result["val_loss_start"], result["val_loss_end"], result["steps"]) == (30.0, 18.0, 12)
    assert result["mapping"] == "tp1cp1dp1pp1-etp1ep1edp1"


def test_command_takes_the_newest_run_and_refuses_a_folder_without_one(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "no metrics.csv" in capsys.readouterr().err
    assert main([]) == 2
    for age, name in enumerate(["version_1", "version_0"]):
        (tmp_path / name).mkdir()
        os.utime(write_csv(tmp_path / name), (1e9 - age, 1e9 - age))
    assert newest_run(tmp_path) == tmp_path / "version_1"
