"""An ordinary Lightning script under pp=2 whose model, step or loader fails in a named way.

`python pipeline_faults.py FAULT [DEVICES]`; the fault comes at the third step.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_fold import FoldedMoEStrategy
from lightning_fold.model.decoder import Decoder, DecoderConfig

FAULT_STEP = 2
MICROBATCHES = 4
CONFIG = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 4,
    "moe_intermediate_size": 8,
}


class BrokenError(Exception):
    """Of no type that any library knows."""


class Faulty(LightningModule):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.model = Decoder(DecoderConfig(**CONFIG))
        self.fault = fault
        self.calls = 0

    @property
    def is_due(self) -> bool:
        return self.trainer.global_step == FAULT_STEP

    def on_train_start(self) -> None:
        layer = self.model.model.layers[0]
        if self.fault == "raise in a layer":
            layer.register_forward_hook(self.break_layer)

    def break_layer(self, *_) -> None:
        self.calls += self.is_due
        if self.calls == 2:
            raise BrokenError("the layer is broken")

    def on_train_batch_start(self, batch, batch_idx) -> None:
        with Path("steps.txt").open("a") as steps:
            print(os.getpid(), self.global_rank, self.trainer.global_step, file=steps)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        # From here on only the last stage comes.
        self.calls += self.is_due
        if self.is_due and self.calls == 2 and self.fault == "raise in the step":
            raise BrokenError("the sample is broken")
        if self.is_due and self.calls == 2 and self.fault == "kill the last stage":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_due and self.fault == "call twice":
            loss = loss + self.model(**batch).loss
        return None if self.is_due and self.fault == "return nothing" else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Killed(Faulty):
    """The first stage is killed between two actions of a schedule."""

    def break_layer(self, *_) -> None:
        self.calls += self.is_due
        if self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self) -> None:
        self.model.model.layers[0].register_forward_hook(self.break_layer)


class Rows:
    """Rows of a batch, in a list; the faulty ones depend on the rank that reads them."""

    def __init__(self, module: Faulty) -> None:
        self.module = module

    def __len__(self) -> int:
        return 6 * 16

    def __getitem__(self, row: int) -> list[int]:
        return torch.randint(1, 31, (9,), generator=torch.Generator().manual_seed(row)).tolist()

    def collate(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor(rows)
        rank = self.module.global_rank
        if self.module.is_due and self.module.fault == "another shape" and rank == 1:
            ids = ids[:, :-1]
        if self.module.fault == "few rows" and rank % 2:
            ids = ids[: MICROBATCHES - 2]
        return {"input_ids": ids, "labels": ids.clone()}


def main(fault: str, devices: str = "2") -> None:
    warnings.filterwarnings("ignore", module="lightning")
    seed_everything(1)
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy=FoldedMoEStrategy(
            pipeline_parallel_size=2,
            num_microbatches=MICROBATCHES,
            expert_parallel_size=int(devices) // 2,
        ),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = (Killed if fault == "kill the first stage" else Faulty)(fault)
    data = Rows(module)
    trainer.fit(module, DataLoader(data, batch_size=8, collate_fn=data.collate))
    print(f"rank {trainer.global_rank} has done {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
