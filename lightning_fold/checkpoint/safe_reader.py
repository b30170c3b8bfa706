"""Reads DCP's index without executing it: the file is a pickle, and a folder may come from anyone.

Only the plain classes that torch writes there are built; anything else is refused by name. Items
that are not tensors are refused too: DCP would unpickle them.
"""

from __future__ import annotations

import collections
import importlib
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

INDEX = ".metadata"
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
_PATHS = {
    (module, kind)
    for module in ("pathlib", "pathlib._local")
    for kind in ("Path", "PosixPath", "PurePosixPath")
}


class SafeReader(FileSystemReader):
    """DCP's reader of a folder, by an index that has been read without executing it.

    Args:
        folder: The folder.
        index: What `read_index` gave; it may serve any number of readers.
    """

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        self._index.storage_meta = self._index.storage_meta or StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index


def read_index(folder: Path) -> Metadata:
    """The index of a folder: names, sizes, dtypes and places of its tensors.

    Raises:
        ValueError: It is damaged, holds other than tensors, or asks for a class to be built.
    """
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _Unpickler(file).load()
        _check(index)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:
        # A damaged pickle may raise anything.
        raise ValueError(
            f"{path} cannot be read, it is damaged: {type(error).__name__}: {error}"
        ) from error
    metadata: Metadata = index
    return metadata


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The index by name; all items are tensors."""
    return {
        name: item
        for name, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return getattr(importlib.import_module(module), name)
        if (module, name) in _PATHS:
            return pathlib.PurePosixPath
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise ValueError(
            f"it asks for {module}.{name} to be executed, which no checkpoint of this package "
            "does. Do not use this folder unless you trust it; it is not read."
        )


def _check(index: Any) -> None:
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ValueError("it is no index of a sharded checkpoint")
    for name, item in index.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            raise ValueError(f"{name} is no tensor but a pickled object, which is not read")
    for place in index.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it places data outside its folder, in {place.relative_path}")
