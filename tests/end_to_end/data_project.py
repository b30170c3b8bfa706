"""A project whose ranks write down what they read: `python data_project.py SCENARIO FOLDER JSON`.

One process per rank, started by `test_resume_data`; each leaves FOLDER/SCENARIO.RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_fold import FoldedMoEStrategy
from lightning_fold.data import TextFile, WindowDataset, tokenize
from lightning_fold.model.decoder import DecoderConfig
from lightning_fold.module import FoldedLitModule

# Not a multiple of the global batch: the last step of an epoch has half as many.
SAMPLES, GLOBAL_BATCH, SEQ_LEN = 44, 8, 15
SAVED_AT_STEP = 9


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of this file's text, each with its number."""

    def __init__(self) -> None:
        text = Path(__file__).read_bytes()
        self.windows = WindowDataset(tokenize([TextFile("text", text)]).tokens, SEQ_LEN)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**self.windows[index], "sample": torch.tensor(index)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """Batches from `first`, `count` of them."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        windows = Windows()
        return (windows[self.first + i] for i in range(self.count))


class Reading(FoldedLitModule):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(
            DecoderConfig(
                hidden_size=16,
                num_hidden_layers=2,
                mlp_only_layers=(0,),
                num_attention_heads=2,
                num_key_value_heads=2,
                intermediate_size=16,
                num_experts=4,
                moe_intermediate_size=8,
            )
        )
        self.read: list[dict[str, Any]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        samples = batch.pop("sample").tolist()
        loss = super().training_step(batch, batch_idx)
        self.read.append(
            {
                "epoch": self.trainer.current_epoch,
                "batch": batch_idx,
                "step": self.trainer.global_step,
                "samples": samples,
                "loss": loss.item(),
            }
        )
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        del batch["sample"]
        super().validation_step(batch, batch_idx)


class SavesOnce(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == SAVED_AT_STEP:
            trainer.save_checkpoint(self.path)


def trainer_of(*, sharded: bool = True, callbacks: Any = (), **mapping: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=FoldedMoEStrategy(save_distributed_checkpoint=sharded, **mapping),
        max_epochs=3,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def loader_of(dp: int, workers: int) -> DataLoader[Any]:
    return DataLoader(
        Windows(),
        batch_size=GLOBAL_BATCH // dp,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def fit(
    *,
    sharded: bool,
    workers: int = 0,
    save: str | None = None,
    resume: str | None = None,
    **mapping: int,
) -> list[dict[str, Any]]:
    """Train three epochs, saving in the middle of the second, or from there."""
    callbacks = [SavesOnce(save)] if save else []
    trainer = trainer_of(sharded=sharded, callbacks=callbacks, **mapping)
    module = Reading()
    trainer.fit(module, loader_of(trainer.strategy.folding.dp, workers), ckpt_path=resume)
    return module.read


def stream(*, stage: str, differ: bool, counts: list[int], **mapping: int) -> str:
    """Read a stream that differs between ranks, or ends sooner on one; returns what is said."""
    rank = int(os.environ["RANK"])
    data = DataLoader(Stream(rank * 8 if differ else 0, counts[rank] * 2), batch_size=2)
    trainer, module = trainer_of(**mapping), Reading()
    try:
        trainer.fit(module, data) if stage == "fit" else trainer.validate(module, data)
    except Exception as error:
        return str(error)
    return ""


def main() -> None:
    scenario, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run = stream if "stage" in options else fit
    result = folder / f"{scenario}.{os.environ.get('RANK', '0')}.json"
    text = json.dumps(run(**options))
    result.with_suffix(".partial").write_text(text)
    result.with_suffix(".partial").rename(result)


if __name__ == "__main__":
    main()
