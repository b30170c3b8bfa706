"""From a sharded folder to a consolidated file and back, one tensor at a time, without ranks.

The folder names parameters everywhere; a file numbers those of its optimizers, so the way back
needs their names: files of this package hold them, and where there is one parameter group that
lists all parameters in order, as `self.parameters()` does, they are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_fold.checkpoint import consolidated, files, folder
from lightning_fold.checkpoint.folder import OPTIMIZERS, WEIGHTS
from lightning_fold.checkpoint.meta import OWN
from lightning_fold.checkpoint.optimizer_state import by_name
from lightning_fold.checkpoint.peers import Peers
from lightning_fold.checkpoint.safe_reader import read_index, tensors_of
from lightning_fold.checkpoint.tensor_entry import TensorEntry, read_entry

_ALIGNMENT = 64


def convert(source: Path, target: Path, *, weights_only: bool = False) -> None:
    """Write the other form of a checkpoint. Local.

    Args:
        source: A sharded folder, or a consolidated file of this package or of plain Lightning.
        target: Does not exist yet.
        weights_only: Leave optimizer states out.

    Raises:
        ValueError: The source is damaged, the target exists, or a file does not tell which
            parameter belongs to which state.
        CheckpointError: The target could not be written.
    """
    if target.exists():
        raise ValueError(f"{target} exists already. Remove it, or choose another target.")
    if folder.looks_sharded(source):
        _to_file(source, target, weights_only=weights_only)
    elif source.is_file():
        _to_folder(source, target, weights_only=weights_only)
    else:
        raise ValueError(f"{source} is neither a sharded folder nor a file.")


def halved_names(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of first expert projections among a user's shapes, which folders hold halved.

    The structure that `model.inspect` looks for: [E, 2F, D] beside a `down_proj` [E, D, F].
    """
    return [name for name, shape in shapes.items() if _is_first_projection(name, shape, shapes)]


def _is_first_projection(
    name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]
) -> bool:
    down = shapes.get(name.removesuffix("gate_up_proj") + "down_proj", ())
    if not name.endswith("gate_up_proj") or len(shape) != 3 or len(down) != 3:
        return False
    return (shape[0], shape[1], shape[2]) == (down[0], 2 * down[2], down[1])


# Folder to file.


def _to_file(source: Path, target: Path, *, weights_only: bool) -> None:
    meta = folder.verify_folder(source, Peers())
    own = meta.pop(OWN, {})
    index = read_index(source)
    stored = {
        name: item
        for name, item in tensors_of(index).items()
        if not weights_only or name.startswith(f"{WEIGHTS}.")
    }
    sizes = {name: _num_bytes(item.size, item.properties.dtype) for name, item in stored.items()}
    # The tensors lie in a file of their own until the last one has been read.
    files.check_space(target, 2 * sum(sizes.values()))
    with _mapped(target, sizes) as buffers:
        tensors = {
            name: buffers[name].view(item.properties.dtype).view(item.size)
            for name, item in stored.items()
        }
        for name, tensor in tensors.items():
            folder.read_tensors(source, {name: tensor}, Peers(), index=index)
        states = [] if weights_only else own.get("optimizers", [])
        checkpoint = {**meta, **_whole(tensors, own, states)}
        consolidated.write_file(target, checkpoint)


def _whole(
    tensors: Mapping[str, Tensor], own: Mapping[str, Any], states: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The entries of a file, in the user's shapes, its optimizers' parameters by number."""
    halved = frozenset(own.get("halved", ()))

    def user(name: str, tensor: Tensor) -> Tensor:
        return tensor.flatten(1, 2) if name in halved and tensor.dim() == 4 else tensor

    weights = {
        name.removeprefix(f"{WEIGHTS}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{WEIGHTS}.")
    }
    state_dict = {name: user(name, tensor) for name, tensor in weights.items()}
    optimizers = []
    for i, rest in enumerate(states):
        names = [name for group in rest["param_groups"] for name in group["params"]]
        index = {name: number for number, name in enumerate(names)}
        state: dict[int, dict[str, Any]] = {
            index[name]: dict(values) for name, values in rest["values"].items()
        }
        for key, tensor in tensors.items():
            if key.startswith(f"{OPTIMIZERS}.{i}."):
                name, _, kind = key.split(".", 2)[2].rpartition(".")
                state.setdefault(index[name], {})[kind] = user(name, tensor)
        groups = [
            {**group, "params": [index[name] for name in group["params"]]}
            for group in rest["param_groups"]
        ]
        optimizers.append({"state": dict(sorted(state.items())), "param_groups": groups})
    noted = {key: own[key] for key in own if key not in ("optimizers", "extra_state", "order")}
    noted["optimizer_names"] = [[g["params"] for g in rest["param_groups"]] for rest in states]
    named = {**state_dict, **own.get("extra_state", {})}
    # A folder of several stages lists their tensors stage after stage.
    first = {name: named[name] for name in own.get("order", ()) if name in named}
    whole = {"state_dict": {**first, **named}, OWN: noted}
    return {**whole, "optimizer_states": optimizers} if optimizers else whole


@contextmanager
def _mapped(target: Path, sizes: Mapping[str, int]) -> Iterator[dict[str, Tensor]]:
    """Byte buffers on disk beside `target`, each with a storage of its own, and gone afterwards."""
    path = target.with_name(f".{target.name}.tensors")
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    try:
        with path.open("wb") as file:
            file.truncate(max(end, 1))
        yield {
            name: torch.from_numpy(
                np.memmap(path, np.uint8, "r+", offset=offsets[name], shape=(size,))
            )
            if size
            else torch.empty(0, dtype=torch.uint8)
            for name, size in sizes.items()
        }
    finally:
        path.unlink(missing_ok=True)


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


# File to folder.


@dataclass(frozen=True)
class _Stored:
    """A tensor of the file and the shape that the folder gives it."""

    entry: TensorEntry
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        return read_entry(self.entry).view(self.shape)


class _ReadingPlanner(DefaultSavePlanner):
    """Plans with tensors without data, and reads each when it is written."""

    def __init__(self, stored: Mapping[str, _Stored]) -> None:
        super().__init__()
        self._stored = stored

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The data of one tensor."""
        return self._stored[index.fqn].read()


def _to_folder(source: Path, target: Path, *, weights_only: bool) -> None:
    peers = Peers()
    consolidated.verify_file(source, peers)
    checkpoint = consolidated.read_file(source)
    noted = checkpoint.pop(OWN, {})
    state = checkpoint.pop("state_dict")
    weights = {name: e for name, e in state.items() if isinstance(e, TensorEntry)}
    halved = noted.get("halved") or halved_names({n: e.shape for n, e in weights.items()})
    stored = {f"{WEIGHTS}.{name}": _stored(name, e, halved) for name, e in weights.items()}
    saved = checkpoint.pop("optimizer_states", [])
    states = []
    for i, optimizer in enumerate([] if weights_only else saved):
        named = by_name(optimizer, _names(source, i, optimizer, noted, weights))
        states.append(named.rest)
        stored |= {
            f"{OPTIMIZERS}.{i}.{name}.{key}": _stored(name, value, halved)
            for name, values in named.tensors.items()
            for key, value in values.items()
        }
    own = {
        **{key: value for key, value in noted.items() if key != "optimizer_names"},
        "halved": sorted(halved),
        "optimizers": states,
        "extra_state": {name: value for name, value in state.items() if name not in weights},
    }
    tensors = {
        name: torch.empty(item.shape, dtype=item.entry.dtype, device="meta")
        for name, item in stored.items()
    }
    folder.write_folder(
        target,
        tensors=tensors,
        meta={**checkpoint, OWN: own},
        peers=peers,
        planner=_ReadingPlanner(stored),
    )


def _stored(name: str, entry: TensorEntry, halved: Sequence[str]) -> _Stored:
    if name in halved and len(entry.shape) == 3:
        experts, rows, inputs = entry.shape
        return _Stored(entry, (experts, 2, rows // 2, inputs))
    return _Stored(entry, entry.shape)


def _names(
    source: Path,
    i: int,
    optimizer: Mapping[str, Any],
    noted: Mapping[str, Any],
    weights: Mapping[str, TensorEntry],
) -> list[list[str]]:
    """Names of the parameters of an optimizer's groups, in the order of its indices."""
    if i < len(noted.get("optimizer_names", [])):
        names: list[list[str]] = noted["optimizer_names"][i]
        return names
    groups = optimizer["param_groups"]
    named = [group["param_names"] for group in groups if "param_names" in group]
    if len(named) == len(groups):
        return named
    order, moments = list(weights), optimizer["state"]
    fits = len(groups) == 1 and len(groups[0]["params"]) == len(order)
    shaped = all(
        value.shape in ((), weights[order[index]].shape)
        for index, values in moments.items()
        for value in values.values()
        if fits and isinstance(value, TensorEntry)
    )
    if not (fits and shaped):
        raise ValueError(
            f"{source} numbers the parameters of optimizer {i} and does not name them, and its "
            f"{len(groups)} groups do not list all {len(order)} tensors in order. Resume from it "
            "in a run, which knows the order, or convert with --weights-only."
        )
    return [order]
