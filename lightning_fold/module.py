"""The LightningModule that the recipes train: a causal language model on any strategy.

Owns the optimizer, its schedule and the logged losses (nats per token, so per byte on byte
tokens). Invariant: nothing in it knows about parallelism; strategies "auto", "ddp" and
`FoldedMoEStrategy` train it alike. Not here: the model, the data.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lightning_fold.model.decoder import Decoder, DecoderConfig


class FoldedLitModule(pl.LightningModule):
    """Train a `Decoder` with AdamW, linear warm-up and a cosine decay to `min_lr_ratio`.

    Args:
        config: Sizes and options of the decoder; a mapping of its fields when a checkpoint is
            loaded.
        learning_rate: Peak of the schedule.
        warmup_steps: Optimizer steps of linear warm-up.
        min_lr_ratio: Last learning rate, relative to the peak.
        betas: Decay rates of AdamW's moments.
        weight_decay: Decay of matrices; norms and biases have none.
    """

    def __init__(
        self,
        config: DecoderConfig,
        learning_rate: float = 3e-3,
        warmup_steps: int = 100,
        min_lr_ratio: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        if isinstance(config, Mapping):
            config = DecoderConfig(**config)
        check_schedule(learning_rate, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)
        # Primitives only: torch.load(weights_only=True) and YAML refuse other objects.
        fields = dataclasses.asdict(config) | {"mlp_only_layers": list(config.mlp_only_layers)}
        self.save_hyperparameters(
            {
                "config": fields,
                "learning_rate": learning_rate,
                "warmup_steps": warmup_steps,
                "min_lr_ratio": min_lr_ratio,
                "betas": list(betas),
                "weight_decay": weight_decay,
            }
        )
        self.model = Decoder(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the batch's mean loss."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log `val_loss`, averaged over the epoch and over ranks."""
        loss = self.model(**batch).loss
        self.log("val_loss", loss, prog_bar=True, on_epoch=True, sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log `test_loss`, averaged as `val_loss` is."""
        loss = self.model(**batch).loss
        self.log("test_loss", loss, on_epoch=True, sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the likeliest successor of each token, [B, S]."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return self.model(**inputs).logits.argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW with the schedule stepped once per optimizer step."""
        hparams = self.hparams
        optimizer = torch.optim.AdamW(
            decay_groups(self.model, weight_decay=hparams["weight_decay"]),
            lr=hparams["learning_rate"],
            betas=tuple(hparams["betas"]),
            # One kernel for all parameters. Lightning refuses to clip for it in mixed precision.
            fused="mixed" not in str(self.trainer.precision),
        )
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: learning_rate_factor(
                step,
                total_steps=total,
                warmup_steps=hparams["warmup_steps"],
                min_lr_ratio=hparams["min_lr_ratio"],
            ),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def decay_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into a decayed group and one of norms and biases (vectors)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        _group((p for p in parameters if p.ndim >= 2), weight_decay),
        _group((p for p in parameters if p.ndim < 2), 0.0),
    ]


def learning_rate_factor(
    step: int, *, total_steps: float, warmup_steps: int, min_lr_ratio: float
) -> float:
    """Return the factor on the peak learning rate at `step`, counted from 0.

    An endless run (`total_steps` infinite) stays at the peak after warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if math.isinf(total_steps):
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _group(parameters: Iterable[nn.Parameter], weight_decay: float) -> dict[str, Any]:
    return {"params": list(parameters), "weight_decay": weight_decay}


def check_schedule(learning_rate: float, *, warmup_steps: int, min_lr_ratio: float) -> None:
    """Refuse a schedule that makes no sense.

    Raises:
        ValueError: Names the argument.
    """
    if not learning_rate > 0.0:
        raise ValueError(f"learning_rate={learning_rate} must be above 0. Change `learning_rate`.")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} must be at least 0; 0 means no warm-up.")
    if not 0.0 <= min_lr_ratio <= 1.0:
        raise ValueError(f"min_lr_ratio={min_lr_ratio} must lie in [0, 1]. Change `min_lr_ratio`.")
