"""The sharded checkpoint: a folder written by DCP, each rank its own shards, and `meta.pt`.

The folder is written under a temporary name and renamed, so that an interrupted save leaves
nothing that looks whole. `meta.pt` holds primitives and tensors only, and is read with
`weights_only=True`. First expert projections are stored in their live [E, 2, F, D] form.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

META = "meta.pt"
_PRIMITIVES = (int, float, bool, str, bytes, type(None), Tensor)


def is_sharded(path: Path) -> bool:
    """Whether `path` is a complete sharded checkpoint."""
    return (path / META).is_file() and (path / ".metadata").is_file()


def save_sharded(
    path: Path,
    *,
    state: Mapping[str, Any],
    meta: Mapping[str, Any],
    is_writer: bool,
    barrier: Callable[[], None],
) -> list[str]:
    """Write `state` and `meta` as the folder `path`. Collective over all ranks.

    Args:
        path: Equal on all ranks.
        state: Nested dictionaries of live tensors.
        meta: Everything else.
        is_writer: Whether this rank writes `meta` and renames.
        barrier: Waits for all ranks.

    Returns:
        Entries of `meta` that are not primitive and were stored as text.
    """
    partial = path.with_name(f".{path.name}.partial")
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    save(dict(state), checkpoint_id=partial)
    replaced: list[str] = []
    if is_writer:
        torch.save(_primitive(dict(meta), "", replaced), partial / META)
        _move_into_place(partial, path)
    barrier()
    return replaced


def load_sharded(path: Path, *, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Fill `module` and `optimizers` from the folder `path`; return its meta.

    Collective over all ranks.

    Raises:
        ValueError: The folder was written by another model.
    """
    state: dict[str, Any] = {"state_dict": module.state_dict()}
    if optimizers:
        state["optimizers"] = {
            str(i): get_optimizer_state_dict(module, optimizer)
            for i, optimizer in enumerate(optimizers)
        }
    try:
        load(state, checkpoint_id=path)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} does not fit this model or its optimizers: {_last_line(error)}. Load it into "
            "the model that wrote it, with the same optimizers."
        ) from error
    for i, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(module, optimizer, state["optimizers"][str(i)])
    meta: dict[str, Any] = torch.load(path / META, weights_only=True)
    return meta


def remove(path: Path) -> None:
    """Delete a checkpoint, file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _move_into_place(partial: Path, path: Path) -> None:
    """Rename over what is there; the old checkpoint goes only after the new one is in place."""
    old = path.with_name(f".{path.name}.old")
    remove(old)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    remove(old)


def _primitive(value: Any, where: str, replaced: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _primitive(item, f"{where}.{key}", replaced) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_primitive(item, f"{where}[{i}]", replaced) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, _PRIMITIVES):
        return value
    replaced.append(where.lstrip("."))
    return str(value)


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
