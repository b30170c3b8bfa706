"""What the callbacks of this folder ask of a running Trainer: log steps, world sums, the folder.

Invariant: `sum_over_world` and `run_folder` are collective and everything else is local, so a
caller may branch on the rank only after them. Holds no state and draws nothing.
"""

import io
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor

from lightning_fold.checkpoint.files import write_whole


def is_log_step(trainer: Trainer) -> bool:
    """Say whether Lightning writes metrics after this training batch; same on every rank."""
    if trainer.fit_loop._should_accumulate():
        return False
    return trainer._logger_connector.should_update_logs or bool(
        getattr(trainer, "fast_dev_run", False)
    )


def log_value(module: LightningModule, key: str, value: float, *, prog_bar: bool = False) -> None:
    """Log a number that is equal on every rank, or of which rank zero's counts."""
    # A CPU tensor: a float would be copied to the device and read back. Double precision, since
    # a token count passes 2^24 early.
    module.log(key, torch.tensor(value, dtype=torch.float64), prog_bar=prog_bar)


def sum_over_world(values: Tensor) -> Tensor:
    """Sum in place over all ranks. Collective over all ranks.

    `strategy.reduce` does not serve: under FoldedMoEStrategy it spans dp, and tp and cp peers hold
    different tokens (sequence parallel) whose counts have to be added as well.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values


def run_folder(trainer: Trainer, dirpath: str | os.PathLike[str] | None) -> Path:
    """Return `dirpath`, or else the Trainer's log folder. Collective over all ranks."""
    # `log_dir` broadcasts, so it is read whether it is needed or not.
    log_dir = trainer.log_dir
    return Path(dirpath or log_dir or trainer.default_root_dir)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a PNG so that a reader sees the old picture or the new one, never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_whole(path, picture.getvalue())
    return path
