"""The consolidated checkpoint: one file as a single-device run writes it, renamed when complete.

The file's own format holds a checksum of each record, which torch writes and does not check; here
they are checked before anything is read.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fold.checkpoint.files import (
    check_space,
    clear_partial,
    make_folder,
    partial_of,
    publish,
    written,
)
from lightning_fold.checkpoint.peers import Peers, last_line
from lightning_fold.checkpoint.tensor_entry import TensorEntry, read_entry
from lightning_fold.checkpoint.tensor_file import open_tensors

_CHUNK = 1 << 22
_REMEDY = "Change `ckpt_path` to another checkpoint, or restore the file."


def write_file(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write one file; under its final name it appears whole or not at all. Writing rank only.

    Raises:
        OSError: It could not be written. An earlier checkpoint of that name is untouched.
    """
    make_folder(path.parent)
    clear_partial(path)
    check_space(path, num_bytes_of(checkpoint))
    partial = partial_of(path)
    try:
        with written(partial) as file:
            torch.save(dict(checkpoint), file)
        publish(partial, path)
    except BaseException as error:
        clear_partial(path)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            # torch's writer hides a full disk behind an assertion of its own.
            raise error.__context__ from error
        raise


def verify_file(path: Path, peers: Peers) -> None:
    """Check the file's own checksums, each rank its share of the records. Collective.

    Raises:
        ValueError: The file is damaged, or no checkpoint.
    """
    peers.all_or_none(lambda: _verify(path, peers.rank, peers.size), what=f"reading {path}")


def read_file(path: Path) -> dict[str, Any]:
    """The checkpoint without the data of weights and moments. Local.

    Returns:
        Lightning's dictionary, with a `TensorEntry` for each tensor under `state_dict` and
        `optimizer_states`, from which a rank reads what it owns.

    Raises:
        ValueError: The file holds other than tensors and primitives, or is no checkpoint.
    """
    file = open_tensors(path)
    if "state_dict" not in file.meta:
        raise ValueError(
            f"{path} has no `state_dict`: it is no checkpoint of Lightning. Weights alone are "
            "read by `init_from`. Change `ckpt_path`."
        )
    left = ("state_dict", "optimizer_states")
    return {key: item if key in left else _read(item) for key, item in file.meta.items()}


def num_bytes_of(value: Any) -> int:
    """Bytes of all tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(num_bytes_of(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(num_bytes_of(item) for item in value)
    return 0


def _verify(path: Path, part: int, parts: int) -> None:
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is truncated, or no checkpoint in the zip format of torch. {_REMEDY}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist()[part::parts]:
                with archive.open(record) as file:
                    while file.read(_CHUNK):
                        pass
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {last_line(error)}. {_REMEDY}") from error


def _read(value: Any) -> Any:
    """`value` with its tensors read."""
    if isinstance(value, TensorEntry):
        return read_entry(value)
    if isinstance(value, Mapping):
        return {key: _read(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_read(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
