"""Three ordinary Lightning modules: `python pipeline_project.py STRATEGY DEVICES FOLDER MODULE...`.

In the style of Lightning's documentation; nothing here knows of folding or pipelines but
`strategy_of`, the one line that a user changes. A callback and the modules themselves note every
hook that they get, with the metrics of that moment.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModelForCausalLM, MixtralConfig

VOCABULARY = 23


def strategy_of(name):
    if name == "ddp":
        return "ddp"
    from lightning_fold import FoldedMoEStrategy

    return FoldedMoEStrategy(
        pipeline_parallel_size=2, num_microbatches=3, save_distributed_checkpoint=False
    )


class Hooks(list):
    """Notes hooks by name; a hook that comes again at once is noted once."""

    def note(self, name, trainer):
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        if not self or self[-1] != [name, metrics]:
            self.append([name, metrics])


def noting(base, prefix):
    """Methods that note each hook of `base` and then do what it does."""

    def method(name):
        def hook(self, *args, **kwargs):
            trainer = args[0] if prefix == "callback." else self._trainer
            if trainer is not None:
                trainer.noted.note(prefix + name, trainer)
            return getattr(base, name)(self, *args, **kwargs)

        return hook

    own = [name for name in dir(base) if name.startswith("on_") or name in ("setup", "teardown")]
    return {name: method(name) for name in own if callable(getattr(base, name))}


NotedModule = type("NotedModule", (LightningModule,), noting(LightningModule, "module."))
NotingCallback = type("NotingCallback", (Callback,), noting(Callback, "callback."))


class Transformer(NotedModule):
    def __init__(self):
        super().__init__()
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            initializer_range=0.1,
            use_cache=False,
        )
        # The default of transformers has no fp64.
        config._experts_implementation = "eager"
        self.model = AutoModelForCausalLM.from_config(config)

    def note(self, name, *_):
        self.trainer.noted.note(name, self.trainer)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-2)


class CausalLM(Transformer):
    """The loss of the Hugging Face model itself."""

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        loss = self.model(**batch).loss
        loss.register_hook(lambda _: self.note("backward"))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.note("validation_step")
        self.log("val_loss", self.model(**batch).loss, prog_bar=True)


class OwnLoss(Transformer):
    """A loss of its own, and a second number; both logged by step and by epoch."""

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        loss, correct = self._compare(batch)
        loss.register_hook(lambda _: self.note("backward"))
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_correct", correct, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.note("validation_step")
        loss, correct = self._compare(batch)
        self.log_dict({"val_loss": loss, "val_correct": correct}, sync_dist=True)

    def _compare(self, batch):
        logits = self.model(input_ids=batch["input_ids"]).logits
        targets = batch["labels"][:, 1:].flatten()
        logits = logits[:, :-1].flatten(0, 1)
        counts = targets != -100
        correct = (logits.argmax(-1) == targets)[counts].double().mean()
        return F.cross_entropy(logits, targets), correct


class Measured(OwnLoss):
    """A metric of torchmetrics in validation, another one in training."""

    def __init__(self):
        super().__init__()
        self.acc = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
        self.train_acc = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        targets = batch["labels"][:, 1:].flatten()
        self.train_acc(logits, targets)
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        loss = F.cross_entropy(logits, targets)
        loss.register_hook(lambda _: self.note("backward"))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.note("validation_step")
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        targets = batch["labels"][:, 1:].flatten()
        self.acc(logits, targets)
        self.log("val_acc", self.acc)
        self.log("val_loss", F.cross_entropy(logits, targets))


# The module, what is watched, what counts as better, and how much better it has to be.
MODULES = {
    "causal_lm": (CausalLM, "val_loss", "min", 0.4),
    "own_loss": (OwnLoss, "val_correct", "max", 0.05),
    "measured": (Measured, "val_acc", "max", 0.05),
}


def rows(count, seed):
    """Counting sequences, of which unequally many tokens count in the loss."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for row in range(count):
        start = torch.randint(VOCABULARY, (1,), generator=generator)
        ids = (start + 3 * torch.arange(9)) % VOCABULARY
        labels = ids.clone()
        labels[: row % 4 * 2] = -100
        data.append({"input_ids": ids, "labels": labels})
    return data


def train(name, strategy, devices, folder):
    seed_everything(3)
    kind, monitor, mode, delta = MODULES[name]
    best = ModelCheckpoint(
        folder / "checkpoints",
        monitor=monitor,
        mode=mode,
        save_top_k=2,
        filename="{epoch}-{" + monitor + ":.4f}",
    )
    stop = EarlyStopping(monitor, mode=mode, patience=1, min_delta=delta)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy_of(strategy),
        precision="64-true",
        max_epochs=8,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        logger=CSVLogger(folder, version=0),
        callbacks=[NotingCallback(), best, stop],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.noted = Hooks()
    # The last batch of an epoch has two rows, fewer than microbatches.
    loaders = DataLoader(rows(32, 1), batch_size=6), DataLoader(rows(10, 2), batch_size=5)
    trainer.fit(kind(), *loaders)
    said = {
        "hooks": list(trainer.noted),
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "best": float(best.best_model_score),
        "best_path": Path(best.best_model_path).name,
        "stopped": stop.stopped_epoch,
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(said))
    return trainer


def main(strategy, devices, folder, *names):
    warnings.filterwarnings("ignore")
    for name in names:
        own = Path(folder) / name
        own.mkdir(parents=True, exist_ok=True)
        train(name, strategy, int(devices), own)


if __name__ == "__main__":
    main(*sys.argv[1:])
