"""The sharded checkpoint: a folder written by DCP, each rank its own shards, and `meta.pt`.

The folder is written under a temporary name and renamed, so that an interrupted save leaves
nothing that looks whole. `meta.pt` holds primitives and tensors only, and is read with
`weights_only=True`. First expert projections are stored in their live [E, 2, F, D] form.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

META = "meta.pt"
# Key of the mapping id in the meta of a folder.
MAPPING = "lightning_fold.mapping"
_PRIMITIVES: tuple[type[Any], ...] = (bool, int, float, str, bytes)


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


def load_sharded(
    path: Path, *, module: nn.Module, optimizers: list[Optimizer], mapping: str
) -> dict[str, Any]:
    """Fill `module` and `optimizers` from the folder `path`; return its meta.

    Collective over all ranks.

    Raises:
        ValueError: The folder was written by another model or under another mapping, or is damaged.
    """
    meta = _read_meta(path, mapping)
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {"state_dict": module.state_dict()}
    if optimizers:
        state["optimizers"] = {
            str(i): _wanted(module, optimizer, stepped=_holds(saved, f"optimizers.{i}.state."))
            for i, optimizer in enumerate(optimizers)
        }
        if not _holds(saved, "optimizers."):
            raise ValueError(
                f"{path} holds no optimizer state, as ModelCheckpoint(save_weights_only=True) "
                "writes it, so training cannot resume from it. Load the weights before `fit`."
            )
    try:
        load(state, checkpoint_id=path)
    except (CheckpointException, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read into this model: {_last_line(error)}. Either its files are "
            "damaged, or another model or other optimizers wrote it."
        ) from error
    for i, optimizer in enumerate(optimizers):
        _fill(module, optimizer, state["optimizers"][str(i)])
    return meta


def live_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State of `optimizer` by parameter name, on its live shards; empty before its first step.

    torch starts an optimizer that has not stepped by a step with zero gradients, which Adam counts.
    """
    stepped = bool(optimizer.state)
    state: dict[str, Any] = dict(get_optimizer_state_dict(module, optimizer))
    if not stepped:
        optimizer.state.clear()
        state["state"] = {}
    return state


def remove(path: Path) -> None:
    """Delete a checkpoint, file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read_meta(path: Path, mapping: str) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = torch.load(path / META, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = f"{type(error).__name__}: {_last_line(error)}"
        raise ValueError(f"{path / META} cannot be read, it is damaged: {reason}") from error
    written = meta.pop(MAPPING, mapping)
    if written != mapping:
        raise ValueError(
            f"{path} was written under mapping {written}, this run has {mapping}, and resharding a "
            "folder is not verified yet. Resume under the same mapping, or from a consolidated "
            "checkpoint (save_distributed_checkpoint=False), which has none."
        )
    return meta


def _holds(saved: Mapping[str, Any], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in saved)


def _wanted(module: nn.Module, optimizer: Optimizer, *, stepped: bool) -> dict[str, Any]:
    """What to read for `optimizer`: started by torch, so that its moments exist to be filled."""
    state: dict[str, Any] = dict(get_optimizer_state_dict(module, optimizer))
    return state if stepped else {**state, "state": {}}


def _fill(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    if state["state"]:
        set_optimizer_state_dict(module, optimizer, state)
        return
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


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
    if value is None or isinstance(value, Tensor):
        return value
    for kind in _PRIMITIVES:
        if isinstance(value, kind):
            # Not as it is: a numpy scalar is a float, and weights_only=True refuses its class.
            return kind(value)
    replaced.append(where.lstrip("."))
    return str(value)


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
