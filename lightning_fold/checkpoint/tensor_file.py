"""Parts of tensors out of files: `torch.save` zips, safetensors files and folders of these.

Owns the formats: where in which file each tensor lies. A pickle is never executed and no tensor's
data is touched on opening. Knows nothing of models, shards or what a name means.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lightning_fold.checkpoint.tensor_entry import DimIndex, TensorEntry, read_entry

__all__ = ["INDEX_NAME", "TensorEntry", "TensorFile", "open_tensors"]

INDEX_NAME = "model.safetensors.index.json"
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorFile:
    """An opened file or folder; holds no file descriptor.

    Attributes:
        path: What was opened.
        entries: Tensors of the state dict by name: those under the key `state_dict` where there
            is one, else those at the top level.
        meta: The whole structure of a `torch.save` file with a `TensorEntry` in place of every
            tensor, so `read(meta["optimizer_states"][0]["state"][0]["exp_avg"])` works; the
            `__metadata__` of a safetensors file.
    """

    path: Path
    entries: Mapping[str, TensorEntry]
    meta: Mapping[str, Any]

    def read(self, entry: str | TensorEntry, index: Sequence[DimIndex] | None = None) -> Tensor:
        """Read a part of a tensor as `read_entry` does.

        Args:
            entry: A name of `entries`, or an entry found in `meta`.
            index: One index per dimension; None reads all.
        """
        return read_entry(self.entries[entry] if isinstance(entry, str) else entry, index)


def open_tensors(path: str | Path) -> TensorFile:
    """Open a `torch.save` file, a safetensors file, or a folder of safetensors files. Local.

    Raises:
        ValueError: Nothing there, an unknown kind, a damaged file, a pickle that needs more than
            tensors and primitives, or a missing file of the folder; names the file.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _open_folder(path)
        with path.open("rb") as stream:
            start = stream.read(9)
        if start[:4] == b"PK\x03\x04":
            return _open_zip(path)
        if path.suffix == ".safetensors" or start[8:] == b"{":
            return TensorFile(path, *_open_safetensors(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    known = "a file of torch.save or a .safetensors file"
    if start[:1] == b"\x80":
        known = "in the zip format of torch.save; load it with plain torch and save it again"
    raise ValueError(f"{path} is not {known}, or its beginning is damaged.")


# torch.save


def _open_zip(path: Path) -> TensorFile:
    records = _records(path)
    structure = _load_structure(path)
    if not isinstance(structure, Mapping):
        raise ValueError(f"{path} holds a {type(structure).__name__} and not a state dict.")
    try:
        meta = _as_entries(structure, path, records, where="")
    except RecursionError as error:
        raise ValueError(f"{path} is damaged: its structure has no end.") from error
    named = meta.get("state_dict", meta)
    if not isinstance(named, Mapping):
        raise ValueError(f"{path}: `state_dict` is a {type(named).__name__} and not a mapping.")
    entries = {str(name): e for name, e in named.items() if isinstance(e, TensorEntry)}
    return TensorFile(path, entries, meta)


def _records(path: Path) -> dict[int, int]:
    """Size of each uncompressed record of the zip, by the byte at which its data starts."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
            infos = archive.infolist()
            order = [i for i in infos if i.filename.endswith("/byteorder")]
            if order and archive.read(order[0]).decode(errors="replace") != sys.byteorder:
                raise ValueError(f"{path} was written on a machine of another byte order.")
            return {_data_start(stream, i): i.file_size for i in infos if not i.compress_type}
    except (zipfile.BadZipFile, struct.error, NotImplementedError) as error:
        raise ValueError(f"{path} is damaged or truncated: {error}") from error


def _data_start(stream: Any, info: zipfile.ZipInfo) -> int:
    # The local header may carry other extra bytes, torch's alignment, than the directory.
    stream.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", stream.read(4))
    start: int = info.header_offset + 30 + name + extra
    return start


def _load_structure(path: Path) -> Any:
    """Everything but the data of tensors: fake ones know where in the file theirs starts."""
    try:
        with FakeTensorMode():
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = forbidden_global(error)
        reason = f"asks for {wanted}" if wanted else "is no plain structure"
        raise ValueError(
            f"{path} holds a pickle that {reason}, and no code of a file is run. Save tensors and "
            "primitives only."
        ) from error
    except Exception as error:
        # A damaged pickle can raise anything; no code of the file has run.
        text = next(iter(str(error).splitlines()), "").partition(". ")[0]
        raise ValueError(
            f"{path} is damaged, its structure cannot be read: {type(error).__name__}: {text}"
        ) from error


def forbidden_global(error: pickle.UnpicklingError) -> str | None:
    """What a pickle wanted to be executed, where `weights_only=True` has refused it."""
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    return wanted[1] if wanted else None


def _as_entries(value: Any, path: Path, records: dict[int, int], *, where: str) -> Any:
    if isinstance(value, Tensor):
        return _fake_entry(value, path, records, where)
    if isinstance(value, Mapping):
        return {k: _as_entries(v, path, records, where=f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_as_entries(v, path, records, where=f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _fake_entry(fake: Tensor, path: Path, records: dict[int, int], where: str) -> TensorEntry:
    name = where.lstrip(".")
    if fake.layout != torch.strided or fake.is_quantized or fake.device.type != "cpu":
        raise ValueError(f"{path}: {name} is sparse, quantized or without data.")
    storage = fake.untyped_storage()
    first: int | None = storage._checkpoint_offset
    spans = [(size - 1) * step for size, step in zip(fake.shape, fake.stride(), strict=True)]
    end = (fake.storage_offset() + sum(spans) + 1) * fake.itemsize if fake.numel() else 0
    if first is None or records.get(first, -1) < max(storage.nbytes(), end):
        raise ValueError(f"{path} is damaged: it holds less data than {name} needs.")
    start = first + fake.storage_offset() * fake.itemsize
    return TensorEntry(path, tuple(fake.shape), fake.dtype, fake.stride(), int(start))


# safetensors


def _open_folder(folder: Path) -> TensorFile:
    if (folder / INDEX_NAME).is_file():
        return TensorFile(folder, *_open_indexed(folder))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        hint = ", which `lightning-fold convert` turns into a file"
        kind = f" (it is a sharded checkpoint{hint})" if (folder / ".metadata").exists() else ""
        raise ValueError(f"{folder} holds no .safetensors file{kind}.")
    entries: dict[str, TensorEntry] = {}
    for file in files:
        found, _ = _open_safetensors(file)
        twice = sorted(found.keys() & entries.keys())
        if twice:
            raise ValueError(f"{file} holds {twice[0]}, as {entries[twice[0]].path.name} does.")
        entries |= found
    return TensorFile(folder, entries, {})


def _open_indexed(folder: Path) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    path = folder / INDEX_NAME
    index = _json(path.read_bytes(), path)
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(f"{path} has no `weight_map` of names to files.")
    shards: dict[str, dict[str, TensorEntry]] = {}
    for file in sorted(set(where.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{folder / file} is missing; {path.name} names it.")
        shards[file], _ = _open_safetensors(folder / file)
    for name, file in where.items():
        if name not in shards[file]:
            raise ValueError(f"{folder / file} lacks {name}, which {path.name} places in it.")
    return {name: shards[file][name] for name, file in where.items()}, {}


def _open_safetensors(path: Path) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or 8 + length > size:
            raise ValueError(f"{path} is damaged or truncated: its header ends after the file.")
        header = _json(stream.read(length), path)
    meta = header.pop("__metadata__", {})
    entries = {name: _entry(path, 8 + length, size, name, v) for name, v in header.items()}
    return entries, meta if isinstance(meta, dict) else {}


def _json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its JSON cannot be read ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: its JSON is no mapping.")
    return value


def _entry(path: Path, data: int, size: int, name: str, fields: Any) -> TensorEntry:
    fields = fields if isinstance(fields, dict) else {}
    kind, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{path} is damaged: its header describes {name} wrongly.")
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise ValueError(f"{path}: {name} has dtype {kind}. Legal: {', '.join(_DTYPES)}.")
    begin, end = offsets
    if end - begin != math.prod(shape) * _DTYPES[kind].itemsize:
        raise ValueError(f"{path} is damaged: {name} has other than the bytes of {shape} {kind}.")
    if data + end > size:
        raise ValueError(f"{path} is truncated: {name} ends at byte {data + end} of {size}.")
    return TensorEntry(path, tuple(shape), _DTYPES[kind], _strides(shape), data + begin)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
