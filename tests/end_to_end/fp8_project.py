"""Trains one small decoder by each precision of its experts: `python fp8_project.py FOLDER`.

An ordinary Lightning project; the losses of every step are left as JSON, by precision.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fold import FoldedMoEStrategy
from lightning_fold.model.decoder import Decoder, DecoderConfig

VOCABULARY, STEPS = 61, 24


class Project(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        # Widths of 128, the least that a block of fp8 allows.
        sizes: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128}
        config = DecoderConfig(vocab_size=VOCABULARY, num_hidden_layers=2, num_experts=4, **sizes)
        self.model = Decoder(config)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        ids = torch.randint(VOCABULARY, (16, 24), generator=torch.Generator().manual_seed(3))
        return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=8)


def losses_of(folder: Path, expert_precision: str) -> list[float]:
    torch.manual_seed(11)
    module = Project()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FoldedMoEStrategy(
            expert_precision=expert_precision, activation_checkpointing="selective"
        ),
        precision="bf16-mixed",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module)
    return module.losses


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    losses = {precision: losses_of(folder, precision) for precision in ("bf16", "fp8_block")}
    (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
