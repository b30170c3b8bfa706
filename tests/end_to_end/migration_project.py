"""An ordinary Lightning project: a module around a Hugging Face Mixtral, padded text, AdamW.

Nothing here knows of folding but `strategy_of`, the one line that a user changes.
"""

import json
import pydoc_data.topics
import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, MixtralConfig

PAD = 256


def strategy_of(name: str):
    if name == "ddp":
        return "ddp"
    from lightning_fold import FoldedMoEStrategy

    degrees = {"dp2ep2": (1, 2), "tp2ep2": (2, 2)}
    tp, ep = degrees[name]
    return FoldedMoEStrategy(tensor_parallel_size=tp, expert_parallel_size=ep)


class Project(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.1)


def texts() -> list[bytes]:
    """Windows of unequal length over real prose."""
    corpus = "".join(pydoc_data.topics.topics.values()).encode()
    windows = [corpus[i * 64 : i * 64 + 20 + (i * 37) % 41] for i in range(240)]
    return [window for window in windows if len(window) > 4]


def collate(windows: list[bytes]) -> dict[str, torch.Tensor]:
    width = max(map(len, windows))
    ids = torch.full((len(windows), width), PAD)
    for row, window in enumerate(windows):
        ids[row, : len(window)] = torch.tensor(list(window))
    real = ids != PAD
    return {
        "input_ids": ids,
        "attention_mask": real.long(),
        "labels": ids.masked_fill(~real, -100),
    }


def main(strategy: str, devices: int, out: str) -> None:
    warnings.filterwarnings("ignore")
    seed_everything(3)
    windows = texts()
    train = DataLoader(windows[:200], batch_size=4, shuffle=True, collate_fn=collate)
    validation = DataLoader(windows[200:], batch_size=4, collate_fn=collate)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy_of(strategy),
        max_steps=20,
        limit_val_batches=1.0,
        val_check_interval=20,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Project(), train, validation)
    if trainer.is_global_zero:
        with open(out, "w") as file:
            json.dump({"val_loss": trainer.callback_metrics["val_loss"].item()}, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
