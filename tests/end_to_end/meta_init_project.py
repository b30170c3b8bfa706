"""Runs jobs on the ranks that are started: `python meta_init_project.py FOLDER JOBS.json`.

A job builds a module, sets it up under a mapping, trains for some steps, and leaves its whole
weights as a file. `plain` trains on one device without this package's strategy.
"""

from __future__ import annotations

import json
import os
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
from lightning_fold.model.hf import build_causal_lm

MAPPINGS: dict[str, dict[str, int]] = {
    "one": {},
    "dp2": {},
    "dp4": {},
    "etp2": {"expert_tensor_parallel_size": 2},
    "tp2ep2": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    "tp2ep2etp2": {
        "tensor_parallel_size": 2,
        "expert_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    },
    "tp4ep4": {"tensor_parallel_size": 4, "expert_parallel_size": 4},
}
TINY = {
    "vocab_size": 67,  # tp does not divide it
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(kind: str) -> torch.nn.Module:
    if kind == "decoder":
        extra = {"mlp_only_layers": (1,), "intermediate_size": 32, "attention_bias": True}
        sizes = {"num_experts": 4, "moe_intermediate_size": 12}
        shared = {"shared_expert_intermediate_size": 8}
        return Decoder(DecoderConfig(**{**TINY, **extra, **sizes, **shared}))
    if kind == "tied":
        sizes = {"num_experts": 4, "moe_intermediate_size": 12, "tie_word_embeddings": True}
        return Decoder(DecoderConfig(**{**TINY, **sizes}))
    sizes = {"num_experts_per_tok": 2, "max_position_embeddings": 32}
    if kind == "mixtral":
        sizes |= {"num_local_experts": 4, "intermediate_size": 12, "head_dim": 4}
    else:
        sizes |= {"num_experts": 4, "moe_intermediate_size": 12}
    return build_causal_lm(kind, TINY | sizes)


class Project(pl.LightningModule):
    """As a user writes it; `configure_model` is where Lightning lets a strategy choose."""

    def __init__(self, kind: str, *, early: bool) -> None:
        super().__init__()
        self.kind = kind
        self.model: Any = build(kind) if early else None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(self.kind)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def train_dataloader(self) -> DataLoader[Any]:
        ids = torch.randint(67, (4, 8), generator=torch.Generator().manual_seed(3))
        return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=4)


def run(job: dict[str, Any], folder: Path) -> None:
    torch.manual_seed(job.get("seed", 11))
    plain = job["mapping"] == "plain"
    strategy: Any = "auto"
    if not plain:
        options = {key: job[key] for key in ("meta_init", "init_from") if key in job}
        if "init_from" in options:
            options["init_from"] = str(folder / options["init_from"])
        strategy = FoldedMoEStrategy(**MAPPINGS[job["mapping"]], **options)
    module = Project(job["kind"], early=plain)
    if plain:
        module.double().load_state_dict(torch.load(folder / job["init_from"]))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if plain else int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        precision=job.get("precision", "64-true"),
        max_steps=job.get("steps", 0),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module)
    state = module.state_dict() if plain else strategy.consolidate(module.state_dict())
    if state:
        torch.save(dict(state), folder / f"{job['out']}.pt")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for job in json.loads(Path(sys.argv[2]).read_text()):
        print(f"--- {job['out']}", flush=True)
        run(job, folder)


if __name__ == "__main__":
    main()
