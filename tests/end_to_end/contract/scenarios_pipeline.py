"""What only a pipeline changes: how steps are cut and joined, who decides on learning rates."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader

from contract.models import VOCABULARY, Lit, batches, mixtral
from contract.scenarios_parity import whole
from contract.worker import Context


class Watched(Lit):
    """Halves its learning rate when a metric stays where it is."""

    monitor = "val_loss"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.1
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor},
        }


class Rates(pl.Callback):
    """Remembers the learning rate of every epoch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def plateau(context: Context) -> dict[str, Any]:
    """Learning rates, epochs and metrics, monitored on a validation and on a training metric."""
    results: dict[str, Any] = {}
    for monitor in ("val_loss", "train_loss"):
        module, rates = Watched(mixtral()), Rates()
        module.monitor = monitor
        stop = EarlyStopping(monitor, patience=3, min_delta=1.0, check_on_train_epoch_end=True)
        trainer = context.trainer(max_epochs=8, limit_val_batches=2, callbacks=[rates, stop])
        trainer.fit(module)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results[monitor] = {"rates": rates.seen, "metrics": metrics}
    return results


class Serving(Lit):
    """Returns more than one tensor from predictions, and something from validation."""

    def __init__(self, *args: Any, keep: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keep = keep
        self.validated: list[Any] = []

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        ids = batch.pop("input_ids")
        return {"logits": self.model(input_ids=ids, logits_to_keep=self.keep).logits, "ids": [ids]}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(input_ids=batch.pop("input_ids")).logits[:, -1].argmax(-1)

    def on_validation_batch_end(self, outputs: Any, *args: Any, **kwargs: Any) -> None:
        self.validated.append(outputs)


def served(context: Context) -> dict[str, Any]:
    """What predictions and callbacks of validation get, of whole batches."""
    results: dict[str, Any] = {}
    for keep in (0, 1):
        module = Serving(mixtral(), keep=keep)
        trainer = context.trainer(limit_val_batches=2)
        (batch,) = trainer.predict(module, DataLoader(batches(5), batch_size=5))  # type: ignore[arg-type]
        results[f"logits-{keep}"] = batch["logits"]
        results[f"ids-{keep}"] = torch.cat(batch["ids"])
        trainer.validate(module, verbose=False)
        results[f"validated-{keep}"] = torch.stack(module.validated)
    return results


class Preferring(Lit):
    """Compares two answers, which takes two calls of the model, or one of both together."""

    def score(self, logits: Tensor, ids: Tensor) -> Tensor:
        picked = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
        return picked.squeeze(-1).sum(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scores = [
            self.score(self.model(input_ids=batch[name]).logits, batch[name])
            for name in ("chosen", "rejected")
        ]
        return self._loss(*scores)

    def pipeline_forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(input_ids=torch.cat([batch["chosen"], batch["rejected"]]))

    def pipeline_loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        chosen, rejected = output.logits.chunk(2)
        scores = self.score(chosen, batch["chosen"]), self.score(rejected, batch["rejected"])
        return self._loss(*scores)

    def _loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        loss = -nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
        self.log("preferred", (chosen > rejected).double().mean(), on_step=True, on_epoch=True)
        return loss


def own_loss(context: Context) -> dict[str, Any]:
    """A module with `pipeline_forward` and `pipeline_loss`."""
    pairs = zip(batches(12), batches(12, seed=4), strict=True)
    rows = [{"chosen": a["input_ids"], "rejected": b["input_ids"]} for a, b in pairs]
    return _trained(context, Preferring(mixtral(), rows=rows))


class Packing(Lit):
    """Batches of one row, which holds documents one after the other."""

    def split_batch(self, batch: dict[str, Tensor], num_microbatches: int) -> list[Any]:
        """As many pieces as there are documents, or fewer, of any length."""
        starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        return [
            {name: value[:, start:end] for name, value in batch.items()}
            for start, end in pairwise([*starts[:num_microbatches], None])
        ]

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=None)  # type: ignore[arg-type]


def packed(context: Context) -> dict[str, Any]:
    """Documents of different lengths, without padding; the last batch has fewer than asked for."""
    generator = torch.Generator().manual_seed(6)
    rows = []
    for lengths in ((5, 9, 4, 7), (8, 3, 6), (11, 6)):
        ids = torch.randint(1, VOCABULARY, (1, sum(lengths)), generator=generator)
        position = torch.cat([torch.arange(n) for n in lengths])[None]
        labels = ids.masked_fill(position == 0, -100)
        rows.append({"input_ids": ids, "position_ids": position, "labels": labels})
    return _trained(context, Packing(mixtral(), rows=rows))


def _trained(context: Context, module: Lit) -> dict[str, Any]:
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer = context.trainer()
    trainer.fit(module)
    return {
        "before": before,
        "after": whole(trainer, dict(module.named_parameters())),
        "losses": torch.stack(module.losses),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }
