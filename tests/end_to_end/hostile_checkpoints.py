"""Checkpoints that must not be resumed from, made from one that may: `prepare(name, folder)`.

The good one is written by the command line itself, once, as a folder; its file form by `convert`.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_fold.checkpoint.convert import convert
from lightning_fold.checkpoint.manifest import entries_of, read_manifest, write_manifest

GOOD = "good.ckpt"
TRAP = "executed"


def write_good(config: dict[str, Any], folder: Path) -> None:
    """Train one step of `config` in a process and keep its checkpoint in both forms."""
    folder.mkdir()
    saving = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": ".", "filename": "good", "every_n_train_steps": 1},
    }
    trainer = {**config["trainer"], "devices": 1, "callbacks": [saving]}
    trainer["enable_checkpointing"] = True
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "trainer": trainer}))
    command = [str(Path(sys.executable).with_name("lightning-fold")), "fit"]
    subprocess.run([*command, "--config", "config.yaml"], cwd=folder, check=True, timeout=120)
    convert(folder / GOOD, folder / f"file.{GOOD}")


def prepare(damage: str, good: Path, folder: Path) -> None:
    """Put a copy of the good checkpoint into `folder` as `x.ckpt` and damage it."""
    form, _, kind = damage.partition(": ")
    source, target = good / (GOOD if form == "folder" else f"file.{GOOD}"), folder / "x.ckpt"
    copy: Callable[..., Any] = shutil.copytree if form == "folder" else shutil.copy
    copy(source, target)
    if kind:
        _DAMAGES[damage](target)


class _Trap:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {TRAP}",)


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _shard(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def _pickle_in_index(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Trap()))
    write_manifest(folder, entries_of(folder, read_manifest(folder)))


def _pickle_in_meta(folder: Path) -> None:
    torch.save({"epoch": _Trap()}, folder / "meta.pt")
    write_manifest(folder, entries_of(folder, read_manifest(folder)))


def _pickle_in_file(path: Path) -> None:
    torch.save({**torch.load(path, weights_only=True), "callbacks": _Trap()}, path)


def _without(path: Path, key: str) -> None:
    whole = torch.load(path, weights_only=True)
    del whole[key]
    torch.save(whole, path)


def _renamed(path: Path) -> None:
    whole = torch.load(path, weights_only=True)
    state = whole["state_dict"]
    whole["state_dict"] = {name.replace("q_proj", "query"): value for name, value in state.items()}
    torch.save(whole, path)


_DAMAGES: dict[str, Callable[[Path], object]] = {
    "folder: missing shard": lambda path: _shard(path).unlink(),
    "folder: truncated shard": lambda path: _cut(_shard(path)),
    "folder: flipped bit": lambda path: _flip(_shard(path)),
    "folder: unfinished": lambda path: (path / "manifest.json").unlink(),
    "folder: pickle in the index": _pickle_in_index,
    "folder: pickle in the meta": _pickle_in_meta,
    "folder: hollow": lambda path: [file.unlink() for file in path.iterdir()],
    "file: truncated": _cut,
    "file: flipped bit": _flip,
    "file: pickle": _pickle_in_file,
    "file: empty": lambda path: path.write_bytes(b""),
    "file: text": lambda path: path.write_text("not a checkpoint\n" * 100),
    "file: without weights": lambda path: _without(path, "state_dict"),
    "file: without optimizer": lambda path: _without(path, "optimizer_states"),
    "file: other names": _renamed,
}
