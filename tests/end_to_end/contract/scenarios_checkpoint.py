"""Saving and resuming: sharded folders, consolidated files, what each holds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import ModelCheckpoint

from contract.models import Lit, mixtral
from contract.scenarios_parity import OPTIONS, Option, parts_of, whole
from contract.worker import Context


def _trainer(context: Context, *, epochs: int, sharded: bool, **options: Any) -> pl.Trainer:
    saved = {} if context.world == 0 else {"save_distributed_checkpoint": sharded}
    return context.trainer(max_epochs=epochs, strategy=context.strategy(**saved), **options)


def _module(context: Context, option: Option, seed: int = 5) -> Lit:
    module = option.kind(mixtral(seed=seed, **option.model), parts=parts_of(context), **option.lit)
    option.prepare(module)
    return module


def resume(context: Context) -> dict[str, Any]:
    """Two epochs, the second from a checkpoint into other weights. Option: FORM_LINE."""
    form, _, line = context.option.partition("_")
    option, sharded = OPTIONS[line], form == "sharded"
    first = _trainer(context, epochs=1, sharded=sharded, **option.trainer)
    first.fit(_module(context, option))
    path = context.folder / "epoch.ckpt"
    first.save_checkpoint(path)
    module = _module(context, option, seed=77)
    second = _trainer(context, epochs=2, sharded=sharded, **option.trainer)
    second.fit(module, ckpt_path=str(path))
    return {"after": whole(second, dict(module.named_parameters())), "steps": second.global_step}


def uninterrupted(context: Context) -> dict[str, Any]:
    """The same two epochs in one run."""
    option = OPTIONS[context.option]
    module = _module(context, option)
    trainer = _trainer(context, epochs=2, sharded=True, **option.trainer)
    trainer.fit(module)
    return {"after": whole(trainer, dict(module.named_parameters())), "steps": trainer.global_step}


def written(context: Context) -> dict[str, Any]:
    """A consolidated file of one epoch, for others to read."""
    option = OPTIONS[context.option]
    trainer = _trainer(context, epochs=1, sharded=False, **option.trainer)
    trainer.fit(_module(context, option))
    trainer.save_checkpoint(context.folder / "epoch.ckpt")
    return {}


def adopted(context: Context) -> dict[str, Any]:
    """Resume what another world wrote. Option: WORLD_LINE_MAPPING."""
    world, _, rest = context.option.partition("_")
    line, _, mapping = rest.rpartition("_")
    path = context.root / f"run{world}" / "files" / f"written-{line}@{mapping}" / "epoch.ckpt"
    option = OPTIONS[line]
    module = _module(context, option, seed=77)
    trainer = _trainer(context, epochs=2, sharded=False, **option.trainer)
    trainer.fit(module, ckpt_path=str(path))
    return {"after": whole(trainer, dict(module.named_parameters())), "steps": trainer.global_step}


class Watch(pl.Callback):
    """Counts the whole checkpoints on disk whenever a batch begins."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder, self.form = folder, form
        self.whole: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        found = list(self.folder.glob("*.ckpt"))
        if self.form == "sharded":
            found = [path for path in found if (path / "manifest.json").exists()]
        self.whole.append(len(found))


def rotated(context: Context) -> dict[str, Any]:
    """Saves behind training, one kept: there is always a whole one once there was one."""
    sharded = not context.option.endswith("whole")
    keep = ModelCheckpoint(
        context.folder / "kept", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max"
    )
    watch = Watch(context.folder / "kept", "sharded" if sharded else "whole")
    trainer = context.trainer(
        max_epochs=2,
        strategy=context.strategy(save_distributed_checkpoint=sharded, async_save=True),
        callbacks=[keep, watch],
        enable_checkpointing=True,
    )
    option = OPTIONS["adamw"]
    module = _module(context, option)
    trainer.fit(module)
    after = whole(trainer, dict(module.named_parameters()))
    again = _module(context, option, seed=77)
    resumed = _trainer(context, epochs=2, sharded=sharded)
    resumed.fit(again, ckpt_path=keep.best_model_path)
    return {
        "files": sorted(p.name for p in (context.folder / "kept").iterdir()),
        "whole": watch.whole,
        "after": after,
        "resumed": whole(resumed, dict(again.named_parameters())),
        "steps": trainer.global_step,
    }


def dropped(context: Context) -> dict[str, Any]:
    """With dropout, a resumed run draws what an uninterrupted one draws."""
    sharded = context.option == "sharded"
    option = OPTIONS["adamw"]

    def module(seed: int) -> Lit:
        model = mixtral(seed=seed, attention_dropout=0.3)
        return option.kind(model, parts=parts_of(context), **option.lit)

    whole_run = _trainer(context, epochs=2, sharded=sharded)
    first = module(5)
    whole_run.fit(first)
    half = _trainer(context, epochs=1, sharded=sharded)
    half.fit(module(5))
    half.save_checkpoint(context.folder / "half.ckpt")
    second, resumed = module(77), _trainer(context, epochs=2, sharded=sharded)
    resumed.fit(second, ckpt_path=str(context.folder / "half.ckpt"))
    return {
        "uninterrupted": whole(whole_run, dict(first.named_parameters())),
        "resumed": whole(resumed, dict(second.named_parameters())),
    }


class Early(pl.Callback):
    """Saves before the first step and after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / "early.ckpt")


def early(context: Context) -> dict[str, Any]:
    """Saving before the first step changes nothing."""
    option = OPTIONS["adamw"]
    module = _module(context, option)
    trainer = _trainer(context, epochs=1, sharded=context.option == "sharded")
    trainer.callbacks.append(Early(context.folder))  # type: ignore[attr-defined]
    trainer.fit(module)
    result = {"after": whole(trainer, dict(module.named_parameters()))}
    again = _module(context, option, seed=77)
    trainer = _trainer(context, epochs=1, sharded=context.option == "sharded")
    trainer.fit(again, ckpt_path=str(context.folder / "early.ckpt"))
    return {**result, "resumed": whole(trainer, dict(again.named_parameters()))}


class Described(Lit):
    """Hyperparameters of every kind; the option "sharded" adds some that are no primitives."""

    def __init__(self, *args: Any, odd: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hparams: dict[str, Any] = {"width": 3, "names": ["a", "b"]}
        if odd:
            hparams |= {"rate": np.float64(0.5), "path": Path("somewhere")}
        self.save_hyperparameters(hparams)


def weights_only(context: Context) -> dict[str, Any]:
    """save_weights_only, rotation, hyperparameters, restarts from it."""
    sharded = context.option == "sharded"
    keep = ModelCheckpoint(
        context.folder / "kept",
        save_top_k=1,
        monitor="val_loss",
        mode="max",
        save_weights_only=True,
    )
    trainer = _trainer(
        context,
        epochs=3,
        sharded=sharded,
        callbacks=[keep],
        enable_checkpointing=True,
        limit_val_batches=1,
    )
    module = Described(mixtral(), odd=sharded, parts=parts_of(context))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    path = keep.best_model_path
    error = ""
    try:
        _trainer(context, epochs=4, sharded=sharded).fit(
            Described(mixtral(), odd=sharded), ckpt_path=path
        )
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    fresh, other = (
        Described(mixtral(seed=77), odd=sharded),
        _trainer(context, epochs=1, sharded=sharded, limit_val_batches=1),
    )
    (loaded,) = other.validate(fresh, ckpt_path=path, verbose=False)
    return {
        "files": sorted(p.name for p in (context.folder / "kept").iterdir()),
        "warned": sorted({str(w.message) for w in caught if "primitive" in str(w.message)}),
        "error": error,
        "best": float(keep.best_model_score or 0),
        "loaded": loaded["val_loss"],
    }
