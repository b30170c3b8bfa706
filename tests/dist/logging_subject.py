"""A module that logs in every way, two stages that run it by microbatches, and what came of it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from lightning_fold import compat
from lightning_fold.steps.closure import check_module, fire_backward_hooks, install_closure
from lightning_fold.steps.logs import MicrobatchLogs

MICROBATCH = 3
CLASSES = 3


class StageEndError(Exception):
    """The user's step came to the layers of the next stage."""


class LastSpread(Metric):
    """Spread of the last rows it saw; its updates need the whole state, and nothing adds up."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.unit = ""
        self.add_state("low", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("high", torch.tensor(-torch.inf), dist_reduce_fx="max")

    def update(self, rows: Tensor) -> None:
        self.unit = "nats"
        self.low = torch.minimum(self.low, rows.min())
        self.high = torch.maximum(self.high, rows.max())

    def compute(self) -> Tensor:
        # As metrics that learn at their first update what they measure.
        return self.high - self.low if self.unit else torch.tensor(-1.0)


class Subject(pl.LightningModule):
    """A classifier of rows, of which some do not count in the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.core = nn.Linear(4, CLASSES)
        self.acc = MulticlassAccuracy(CLASSES)
        self.spread = LastSpread()
        self.never = MeanMetric()
        self.val = MetricCollection(
            {"acc": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}, prefix="val_"
        )
        self.auroc = BinaryAUROC()
        self.own_f1 = MulticlassF1Score(CLASSES)
        self.events: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y, counts = batch
        self.log("constant", 2.0, reduce_fx="sum", on_step=True, on_epoch=True)
        logits = self.core(x)
        losses = nn.functional.cross_entropy(logits, y, reduction="none")
        loss = losses[counts].mean()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("epoch_only", loss, on_step=False, on_epoch=True)
        self.log("synced", 2 * loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("worst", losses.max(), on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("least", losses.min(), on_epoch=True, reduce_fx="min")
        self.log("total", loss, on_epoch=True, reduce_fx=torch.sum, sync_dist=True)
        self.log("by_count", loss, on_epoch=True, batch_size=int(counts.sum()))
        self.log("whole", torch.tensor(7), on_epoch=True)
        if batch_idx % 3 == 1:
            self.log("sometimes", loss.float(), on_step=True, on_epoch=True)
        self.acc(logits, y)
        self.log("acc", self.acc, on_step=True, on_epoch=True, prog_bar=True)
        self.spread(losses)
        self.log("spread", self.spread, on_step=True, on_epoch=False)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Any, prefix: str) -> None:
        x, y, counts = batch
        logits = self.core(x)
        loss = nn.functional.cross_entropy(logits[counts], y[counts])
        self.log(f"{prefix}_loss", loss, sync_dist=True)
        self.log(f"{prefix}_steps", loss, on_step=True, on_epoch=True)
        self.val.update(logits, y)
        self.log_dict(self.val)
        self.auroc.update(logits.softmax(1)[:, 0], (y == 0).long())
        self.log(f"{prefix}_auroc", self.auroc)
        self.own_f1.update(logits, y)

    def on_validation_epoch_end(self) -> None:
        self.log("own_f1", self.own_f1.compute())
        self.own_f1.reset()

    on_test_epoch_end = on_validation_epoch_end

    def on_train_epoch_end(self) -> None:
        self.log("acc_now", self.acc.compute())
        self.log("spread_now", self.spread.compute())

    def on_before_backward(self, loss: Tensor) -> None:
        self.events.append(["on_before_backward", float(loss)])

    def on_after_backward(self) -> None:
        self.events.append(["on_after_backward", self.core.weight.grad is not None])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.events.append(["on_before_zero_grad"])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.events.append(["on_before_optimizer_step", float(self.core.weight.grad.norm())])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.core.parameters(), lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


class TwoStages(DDPStrategy):
    """Rank 1 runs the user's step, by microbatches; rank 0 gets as far as the core.

    A stand-in for a pipeline: rank 0 takes gradients and loss from rank 1.
    """

    in_schedule = False

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        check_module(self.lightning_module)
        install_closure(trainer)
        self.logs = MicrobatchLogs(self.lightning_module, group=dist.group.WORLD, source=1)
        self.logs.watch(trainer)
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        compat.sync_metrics_over(self.lightning_module, alone)
        if dist.get_rank() == 0:
            self.lightning_module.core.register_forward_pre_hook(_end_stage)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Meet all ranks, whose values are copies: the largest of them is each of them."""
        assert not self.in_schedule, "a collective inside the schedule"
        if isinstance(tensor, Tensor):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def training_step(self, batch: Any, *args: Any) -> Tensor:
        module, trainer = self.lightning_module, self.lightning_module.trainer
        with self.precision_plugin.train_step_context():
            loss = self._schedule("training_step", batch, *args)
            self.logs.mirror()
        for parameter in module.core.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.broadcast(parameter.grad, src=1)
        dist.broadcast(loss, src=1)
        fire_backward_hooks(trainer, module, loss)
        return loss

    def validation_step(self, *args: Any) -> None:
        with self.precision_plugin.val_step_context():
            self._schedule("validation_step", *args)
            self.logs.mirror()

    def test_step(self, *args: Any) -> None:
        with self.precision_plugin.test_step_context():
            self._schedule("test_step", *args)
            self.logs.mirror()

    def _schedule(self, name: str, batch: Any, *args: Any) -> Tensor:
        step, windows = getattr(self.lightning_module, name), self._windows
        total = torch.zeros((), dtype=torch.float64)
        with self._in_schedule():
            for rows in zip(*(part.split(MICROBATCH) for part in batch), strict=True):
                weight = int(rows[2].sum()) / int(batch[2].sum())
                if dist.get_rank() == 0:
                    with self.logs.muted():
                        try_step(step, rows, *args)
                    continue
                with self.logs.microbatch(weight=weight):
                    out = step(rows, *args)
                if out is not None and weight:
                    (out["loss"] * weight / windows).backward()
                    total += out["loss"].detach() * weight
        return total

    @property
    def _windows(self) -> int:
        return self.lightning_module.trainer.accumulate_grad_batches

    @contextmanager
    def _in_schedule(self) -> Generator[None, None, None]:
        self.in_schedule = True
        try:
            yield
        finally:
            self.in_schedule = False


def _end_stage(module: nn.Module, args: Any) -> None:
    raise StageEndError


def try_step(step: Any, *args: Any) -> None:
    try:
        step(*args)
    except StageEndError:
        return
    raise AssertionError("the step did not reach the core")


class Recorder(pl.Callback):
    """Notes all that callbacks can see of metrics, whenever they can."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self._note(trainer, "batch")
        self.seen.append(["outputs", float(outputs["loss"])])

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._note(trainer, "epoch")

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._note(trainer, "end")

    def _note(self, trainer: pl.Trainer, what: str) -> None:
        kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
        for kind in kinds:
            metrics = {name: float(value) for name, value in getattr(trainer, kind).items()}
            self.seen.append([what, kind, metrics])


def loader(rows: int, seed: int, batch_size: int = 8) -> Any:
    """Rows of which about half count; the second microbatch of the first batch has none."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=draw)
    y = torch.randint(CLASSES, (rows,), generator=draw)
    counts = torch.rand(rows, generator=draw) < 0.5
    counts[0], counts[-1] = True, True
    counts[MICROBATCH : 2 * MICROBATCH] = False
    return DataLoader(TensorDataset(x, y, counts), batch_size=batch_size)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"max_epochs": 5},
    # 5 batches an epoch: the last window is a part of one.
    "accumulation": {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
    # Ends in the middle of the second epoch, and validates in the middle of epochs.
    "loaders": {"max_steps": 7, "val_check_interval": 2, "log_every_n_steps": 2},
    "resumed": {"max_epochs": 3},
}


def fit_and_test(name: str, folder: Path, strategy: Any = None) -> dict[str, Any]:
    """Train the subject; what its callbacks, loggers and hooks saw."""
    torch.manual_seed(1)
    module, recorder = Subject(), Recorder()
    num_loaders = 2 if name == "loaders" else 1
    monitor = "val_loss/dataloader_idx_0" if num_loaders == 2 else "val_loss"
    if num_loaders == 2:
        module.configure_optimizers = lambda: torch.optim.SGD(module.core.parameters(), lr=0.5)
    best = ModelCheckpoint(folder / "saved", monitor=monitor, save_top_k=1, save_last=True)
    stopping = EarlyStopping(monitor, patience=2 if name == "plain" else 9, min_delta=0.02)
    loaders = loader(36, 5), [loader(20, seed) for seed in (6, 7)[:num_loaders]]

    def trainer(version: int, **more: Any) -> pl.Trainer:
        return pl.Trainer(
            accelerator="cpu",
            precision="64-true",
            callbacks=[recorder, best, stopping],
            logger=CSVLogger(folder, name="csv", version=version),
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            strategy=strategy() if strategy else "auto",
            devices=2 if strategy else 1,
            **{"log_every_n_steps": 1, **OPTIONS[name], **more},
        )

    current = trainer(0, max_epochs=1) if name == "resumed" else trainer(0)
    current.fit(module, *loaders)
    if name == "resumed":
        current = trainer(1)
        current.fit(module, *loaders, ckpt_path=str(folder / "saved" / "last.ckpt"))
    tested = current.test(module, loader(20, 8), verbose=False)
    progress = current.fit_loop.epoch_loop.automatic_optimization.optim_progress
    return {
        "seen": recorder.seen,
        "events": module.events,
        "tested": tested,
        "best": float(best.best_model_score),
        "stopped_epoch": stopping.stopped_epoch,
        "ended": [current.global_step, current.current_epoch],
        "progress": progress.state_dict(),
        "lr": current.optimizers[0].param_groups[0]["lr"],
        "weights": module.core.weight.tolist(),
        "never": module.never.update_count,
    }
