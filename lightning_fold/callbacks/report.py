"""What a run leaves behind: the loss curve, the picture of the mapping, one summary.

Invariant: every number comes from `metrics.csv`, the file Lightning's CSVLogger writes, so a
summary can be made again from the run folder alone. Logs nothing and measures nothing.
"""

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_fold.callbacks.run import run_folder, save_figure
from lightning_fold.topology.rank_map import draw_rank_map, rank_map_json

# Entropies in nats per byte that a loss on byte tokens is read against: log 256, and the bigram
# entropy of the text that the recipes train on.
BYTE_REFERENCES = {"uniform": 5.55, "bigram": 2.41}
RANK_MAP = "rank_map.json"
_TRAIN_LOSS = ("train_loss", "train_loss_step", "loss")
_WARM_UP = 0.2


class Series(NamedTuple):
    """One column of `metrics.csv` without its empty cells."""

    steps: list[int]
    values: list[float]


class RunReport(Callback):
    """Writes `loss.png`, `rank_map.png` and `rank_map.json` into the run folder at the end.

    Needs a CSVLogger. The Trainer logs no validation before the first step: add
    `ValidateAtStart` for a curve that starts there.

    Args:
        dirpath: Folder of the pictures; None is the Trainer's log folder.
        references: Horizontal lines of the loss plot by name; None is those of byte tokens, an
            empty mapping draws none.
        unit: Unit of the losses.
        gpus_per_node: Node width in the rank map; None is the Trainer's devices per node.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        references: dict[str, float] | None = None,
        unit: str = "nats per byte",
        gpus_per_node: int | None = None,
    ) -> None:
        super().__init__()
        self.dirpath = dirpath
        self.references = BYTE_REFERENCES if references is None else references
        self.unit = unit
        self.gpus_per_node = gpus_per_node

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer whose metrics leave no file behind."""
        is_trial = getattr(trainer, "fast_dev_run", False)
        if stage == "fit" and not is_trial and _csv_logger(trainer) is None:
            loggers = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "none"
            raise ValueError(
                f"RunReport draws from metrics.csv, and no logger writes it (loggers: {loggers}).\n"
                "Add a CSVLogger to `Trainer(logger=...)`, or remove the callback."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw on rank zero. Collective over all ranks, for the name of the folder."""
        folder, logger = run_folder(trainer, self.dirpath), _csv_logger(trainer)
        if not trainer.is_global_zero or logger is None:
            return
        logger.save()
        folder.mkdir(parents=True, exist_ok=True)
        metrics_csv = Path(logger.log_dir) / "metrics.csv"
        if metrics_csv.exists():
            path = folder / "loss.png"
            draw_loss(metrics_csv, path, references=self.references, unit=self.unit)
        folding = getattr(trainer.strategy, "folding", None)
        if folding is not None:
            (folder / RANK_MAP).write_text(json.dumps(rank_map_json(folding)))
            draw_rank_map(
                folding,
                folder / "rank_map.png",
                gpus_per_node=self.gpus_per_node or trainer.num_devices,
            )


def read_metrics(metrics_csv: str | os.PathLike[str]) -> dict[str, Series]:
    """Read Lightning's sparse CSV into one series per column; `step` itself is none of them."""
    metrics: dict[str, Series] = {}
    with Path(metrics_csv).open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            for name, cell in row.items():
                if cell:
                    series = metrics.setdefault(name, Series([], []))
                    series.steps.append(step)
                    series.values.append(float(cell))
    return metrics


def summarise(run_dir: str | os.PathLike[str], mapping: str) -> dict[str, Any]:
    """Condense `run_dir/metrics.csv` into the keys of the demo's last line.

    `val_loss_start` is the validation before the first step, which `ValidateAtStart` (or a
    `trainer.validate` before `trainer.fit`, with the same Trainer) puts into the file.

    Args:
        run_dir: Folder of `metrics.csv`.
        mapping: Mapping id of the run.

    Returns:
        `mapping`, `val_loss_start`, `val_loss_end`, `tokens_per_s` and `mfu` (medians without the
        first fifth of their rows; `mfu` None where there was no peak), and `steps`, the optimizer
        steps up to the last row.

    Raises:
        ValueError: If there is no validation at step 0, or none after it, or no throughput.
    """
    path = Path(run_dir) / "metrics.csv"
    metrics = read_metrics(path)
    empty = Series([], [])
    validation, throughput = metrics.get("val_loss", empty), metrics.get("fold/tokens_per_s", empty)
    if len(validation.steps) < 2 or validation.steps[0] != 0:
        raise ValueError(
            f"{path}: val_loss has rows at steps {validation.steps[:3]}, a summary needs one at "
            "step 0 and a later one.\nAdd the callback ValidateAtStart and train past a validation."
        )
    if not throughput.values:
        raise ValueError(
            f"{path}: no fold/tokens_per_s.\nAdd MFUMonitor to `Trainer(callbacks=...)`, and train "
            "for at least two times `log_every_n_steps`."
        )
    mfu = metrics.get("fold/mfu")
    return {
        "mapping": mapping,
        "val_loss_start": validation.values[0],
        "val_loss_end": validation.values[-1],
        "tokens_per_s": _steady(throughput.values),
        "mfu": _steady(mfu.values) if mfu else None,
        # Training rows carry the index of their step. Rows of `trainer.validate` carry the steps
        # done, those of a validation inside fit one less.
        "steps": max(throughput.steps[-1] + 1, validation.steps[-1]),
    }


def draw_loss(
    metrics_csv: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    references: Mapping[str, float] = BYTE_REFERENCES,
    unit: str = "nats per byte",
) -> None:
    """Draw train and validation loss against steps and, where logged, tokens."""
    metrics = read_metrics(metrics_csv)
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    train = next((metrics[name] for name in _TRAIN_LOSS if name in metrics), None)
    if train is not None:
        axes.plot(train.steps, train.values, color="tab:blue", alpha=0.5, lw=1, label="train")
    if "val_loss" in metrics:
        axes.plot(*metrics["val_loss"], color="tab:red", lw=2, marker="o", ms=4, label="validation")
    for name, value in references.items():
        axes.axhline(value, color="gray", linestyle="--", linewidth=1)
        axes.annotate(
            f"{name} {value:.2f}",
            (1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            color="dimgray",
        )
    axes.set(xlabel="step", ylabel=f"loss ({unit})", title="Loss")
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    if "fold/tokens" in metrics:
        _add_token_axis(axes, metrics["fold/tokens"])
    save_figure(figure, path)


def _csv_logger(trainer: Trainer) -> CSVLogger | None:
    return next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)


def _steady(values: list[float]) -> float:
    return median(values[int(len(values) * _WARM_UP) :])


def _add_token_axis(axes: Axes, tokens: Series) -> None:
    per_step = tokens.values[-1] / (tokens.steps[-1] + 1)

    def to_millions(steps: Any) -> Any:
        return steps * per_step / 1e6

    def to_steps(millions: Any) -> Any:
        return millions * 1e6 / per_step

    top = axes.secondary_xaxis("top", functions=(to_millions, to_steps))
    top.set_xlabel("tokens (millions)")
