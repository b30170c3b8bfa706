"""An ordinary Lightning script whose rank 1 fails in a way named on the command line."""

import email
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fold import FoldedMoEStrategy
from lightning_fold.data import TextDataModule
from lightning_fold.model.decoder import DecoderConfig
from lightning_fold.module import FoldedLitModule

FAULT_STEP = 3
TEXTS = [str(Path(email.__file__).with_name("*.py"))]
CONFIG = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "num_experts": 4,
    "moe_intermediate_size": 8,
}


class BrokenError(Exception):
    """Of no type that any library knows."""


class FaultyModule(FoldedLitModule):
    def __init__(self, config=None, fault: str = "none") -> None:
        super().__init__(DecoderConfig(**CONFIG), warmup_steps=0)
        self.fault = fault

    def training_step(self, batch, batch_idx):
        with Path("steps.txt").open("a") as steps:
            print(os.getpid(), self.global_rank, self.trainer.global_step, file=steps)
        if self.trainer.global_step == FAULT_STEP:
            self.fail()
        if self.fault == "train":
            time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def fail(self) -> None:
        kind, _, ranks = self.fault.partition("@")
        if str(self.global_rank) not in ranks.split(","):
            return
        if kind == "raise":
            raise BrokenError("the sample is broken")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(600)


def main(fault: str, ckpt_path: str = "", devices: str = "2") -> None:
    warnings.filterwarnings("ignore", module="lightning")
    seed_everything(1)
    torch.set_num_threads(1)
    strategy = FoldedMoEStrategy(
        expert_parallel_size=int(devices), collective_timeout_s=6.0 if "hang" in fault else 1800.0
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy=strategy,
        max_steps=100_000 if fault == "train" else 6,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        callbacks=[ModelCheckpoint("checkpoints", save_top_k=0)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TextDataModule(
        TEXTS,
        seq_len=31,
        batch_size=2,
        num_workers=1 if fault == "train" else 0,
    )
    trainer.fit(FaultyModule(fault=fault), data, ckpt_path=ckpt_path or None)


if __name__ == "__main__":
    main(*sys.argv[1:])
