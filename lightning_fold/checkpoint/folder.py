"""The sharded checkpoint: a folder written by DCP, each rank its own shards, readable anywhere.

    .metadata        DCP's index, read without being executed (`safe_reader`)
    __R_0.distcp     tensors of rank R: weights under `state_dict.NAME`, optimizer states under
                     `optimizers.I.NAME.KEY`; first expert projections in their live [E, 2, F, D]
    meta.pt          primitives
    manifest.json    written last (`manifest`)

The mapping that wrote a folder is noted in its meta and does not matter to the one that reads it.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from lightning_fold.checkpoint.files import (
    check_space,
    clear_partial,
    make_folder,
    partial_of,
    publish,
    recover,
    written,
)
from lightning_fold.checkpoint.manifest import (
    MANIFEST,
    entries_of,
    read_manifest,
    verify_files,
    write_manifest,
)
from lightning_fold.checkpoint.peers import CheckpointError, Peers, last_line
from lightning_fold.checkpoint.safe_reader import INDEX, SafeReader
from lightning_fold.checkpoint.tensor_entry import TensorEntry
from lightning_fold.checkpoint.tensor_file import forbidden_global
from lightning_fold.params import local_tensor

META = "meta.pt"
WEIGHTS, OPTIMIZERS = "state_dict", "optimizers"


def looks_sharded(path: Path) -> bool:
    """Whether `path` is meant as a sharded folder, whole or damaged."""
    return path.is_dir() and any((path / name).exists() for name in (MANIFEST, META, INDEX))


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors, stored ones too, and what modules add by `get_extra_state`."""
    kinds = (Tensor, TensorEntry)
    tensors = {name: value for name, value in state.items() if isinstance(value, kinds)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def flat(optimizer: int, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of an optimizer's state, by their names in a folder."""
    return {
        f"{OPTIMIZERS}.{optimizer}.{name}.{key}": value
        for name, values in state.items()
        for key, value in values.items()
    }


def write_folder(
    path: Path,
    *,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    peers: Peers,
    planner: SavePlanner | None = None,
    counts_plain: bool | None = None,
) -> None:
    """Write a sharded folder; under its final name it appears whole or not at all. Collective.

    Args:
        path: Equal on all ranks.
        tensors: This rank's live tensors by name; names are equal on all ranks of a stage.
        meta: Primitives; the writing rank's count.
        peers: The ranks that hold the model together.
        planner: Of DCP, which reads each tensor when it is written; None writes `tensors`.
        counts_plain: Whether this rank is the first of those that hold its plain tensors and so
            writes them; None where all ranks do.

    Raises:
        CheckpointError: It could not be written. An earlier checkpoint of that name is untouched.
    """
    what = f"saving {path}"
    is_first = peers.is_writer if counts_plain is None else counts_plain
    sizes = peers.gather(_stored_bytes(tensors, is_first=is_first))
    peers.on_writer(lambda: _prepare(path, sum(sizes)), what=what)
    partial = partial_of(path)
    try:
        _write_tensors(partial, tensors, peers, planner)
        own = peers.all_or_none(lambda: _own_entries(partial, peers.rank), what=what)
        peers.on_writer(lambda: _complete(path, meta, own), what=what)
    except (CheckpointError, ValueError) as error:
        if peers.is_writer:
            clear_partial(path)
        raise CheckpointError(
            f"{error}. Nothing of it is kept; earlier checkpoints are untouched."
        ) from error


def verify_folder(path: Path, peers: Peers) -> dict[str, Any]:
    """Check a folder's files and return its meta. Collective.

    Raises:
        ValueError: A file is missing or damaged.
    """

    def check() -> None:
        entries = read_manifest(path)
        verify_files(path, entries, part=peers.rank, parts=peers.size)

    peers.all_or_none(check, what=f"reading {path}")
    return read_meta(path)


def read_tensors(path: Path, tensors: dict[str, Tensor], peers: Peers, *, index: Metadata) -> None:
    """Fill `tensors` in place, each rank its own shards. Collective.

    Args:
        path: The folder.
        tensors: By name in the folder.
        peers: The ranks that read together.
        index: The folder's, as `safe_reader.read_index` gave it.

    Raises:
        ValueError: They cannot be read; `tensors` may be partly filled.
    """
    try:
        with _no_advice():
            load(
                tensors,
                storage_reader=SafeReader(path, index),
                process_group=peers.group,
                no_dist=peers.group is None,
            )
    except (Exception, CheckpointException) as error:
        # DCP wraps whatever a rank raised, in what is no Exception.
        raise ValueError(f"{path} cannot be read: {last_line(error)}") from error


def read_meta(path: Path) -> dict[str, Any]:
    """The primitives of a folder.

    Raises:
        ValueError: The file is damaged or holds more than primitives.
    """
    try:
        meta: dict[str, Any] = torch.load(path / META, weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = forbidden_global(error)
        reason = f"asks for {wanted} to be executed" if wanted else "is damaged"
        raise ValueError(
            f"{path / META} {reason}, and no code of a checkpoint is run. Change `ckpt_path`."
        ) from error
    except Exception as error:
        raise ValueError(
            f"{path / META} cannot be read, it is damaged: {type(error).__name__}: "
            f"{last_line(error)}"
        ) from error
    return meta


def _stored_bytes(tensors: Mapping[str, Tensor], *, is_first: bool) -> int:
    """Bytes that this rank will write; of equal copies the first rank writes one."""
    own = [t for t in tensors.values() if is_first or isinstance(t, DTensor)]
    return sum(local_tensor(t).numel() * t.element_size() for t in own)


def _prepare(path: Path, num_bytes: int) -> None:
    make_folder(path.parent)
    recover(path)
    clear_partial(path)
    check_space(path, num_bytes)
    partial_of(path).mkdir()


def _write_tensors(
    partial: Path, tensors: Mapping[str, Tensor], peers: Peers, planner: SavePlanner | None
) -> None:
    try:
        with _no_advice():
            save(
                dict(tensors),
                # DCP keeps the tensors of a file until it is written; a planner that reads them
                # one by one wants them gone one by one.
                storage_writer=FileSystemWriter(partial, single_file_per_rank=planner is None),
                # Of tensors that several ranks hold, the first one's is the truth, as under DDP.
                planner=planner or DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=peers.group,
                no_dist=peers.group is None,
            )
    except (Exception, CheckpointException) as error:
        # DCP reports a rank's failure on all ranks.
        raise CheckpointError(f"saving {partial.name[1:-8]} failed: {last_line(error)}") from error


@contextmanager
def _no_advice() -> Iterator[None]:
    """Without DCP's remark that one process saves or loads alone, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _own_entries(partial: Path, rank: int) -> Any:
    pattern = re.compile(rf"__{rank}_\d+\.distcp")
    return entries_of(partial, [p.name for p in partial.iterdir() if pattern.fullmatch(p.name)])


def _complete(path: Path, meta: Mapping[str, Any], own: list[Any]) -> None:
    partial = partial_of(path)
    with written(partial / META) as file:
        torch.save(dict(meta), file)
    entries = entries_of(partial, [META, INDEX])
    for more in own:
        entries |= more
    write_manifest(partial, entries)
    publish(partial, path)
