"""What a checkpoint holds, told without loading it: names, shapes, dtypes, step, mapping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fold.checkpoint import folder
from lightning_fold.checkpoint.folder import WEIGHTS
from lightning_fold.checkpoint.manifest import read_manifest, verify_files
from lightning_fold.checkpoint.meta import OWN
from lightning_fold.checkpoint.safe_reader import read_index, tensors_of
from lightning_fold.checkpoint.tensor_entry import TensorEntry
from lightning_fold.checkpoint.tensor_file import open_tensors


def summarise(path: Path) -> dict[str, Any]:
    """Primitives about a folder or file: no tensor's data is read. Local.

    Returns:
        `form`, `step`, `epoch`, `mapping` (None where nobody noted them), `bytes` of all tensors,
        `weights` and `optimizer` as lists of {name, shape, dtype}.

    Raises:
        ValueError: It is damaged, incomplete, or of no known kind.
    """
    return _of_folder(path) if folder.looks_sharded(path) else _of_file(path)


def summary_text(summary: Mapping[str, Any]) -> str:
    """The summary as a table of text."""
    rows = [*summary["weights"], *summary["optimizer"]]
    names = max((len(row["name"]) for row in rows), default=0)
    shapes = max((len(str(row["shape"])) for row in rows), default=0)
    lines = [f"{row['name']:<{names}}  {row['shape']!s:<{shapes}}  {row['dtype']}" for row in rows]
    told = {key: summary[key] for key in ("form", "mapping", "step", "epoch")}
    head = "  ".join(f"{key} {'unknown' if v is None else v}" for key, v in told.items())
    counts = f"{len(summary['weights'])} weights, {len(summary['optimizer'])} optimizer tensors"
    return "\n".join([*lines, "", head, f"{counts}, {summary['bytes'] / 2**20:,.2f} MiB"])


def _of_folder(path: Path) -> dict[str, Any]:
    entries = read_manifest(path)
    # Sizes only: reading every byte is left to loading.
    verify_files(path, entries, part=0, parts=0)
    meta = folder.read_meta(path)
    rows = [
        _row(name, item.size, item.properties.dtype)
        for name, item in tensors_of(read_index(path)).items()
    ]
    weights = [row for row in rows if row["name"].startswith(f"{WEIGHTS}.")]
    for row in weights:
        row["name"] = row["name"].removeprefix(f"{WEIGHTS}.")
    others = [row for row in rows if row not in weights]
    return _summary("sharded folder", meta, weights, others)


def _of_file(path: Path) -> dict[str, Any]:
    file = open_tensors(path)
    weights = [_row(name, entry.shape, entry.dtype) for name, entry in file.entries.items()]
    others = [
        _row(f"optimizers.{i}.{index}.{key}", value.shape, value.dtype)
        for i, optimizer in enumerate(file.meta.get("optimizer_states", []))
        for index, values in optimizer["state"].items()
        for key, value in values.items()
        if isinstance(value, TensorEntry)
    ]
    form = "consolidated file" if "state_dict" in file.meta else "weights"
    return _summary(form, file.meta, weights, others)


def _row(name: str, shape: Any, dtype: Any) -> dict[str, Any]:
    size = math.prod(shape) * dtype.itemsize
    kind = str(dtype).removeprefix("torch.")
    return {"name": name, "shape": list(shape), "dtype": kind, "bytes": size}


def _summary(
    form: str, meta: Mapping[str, Any], weights: list[Any], others: list[Any]
) -> dict[str, Any]:
    own = meta.get(OWN, {})
    return {
        "form": form,
        "mapping": own.get("mapping") if isinstance(own, Mapping) else None,
        "step": meta.get("global_step"),
        "epoch": meta.get("epoch"),
        "bytes": sum(row["bytes"] for row in [*weights, *others]),
        "weights": weights,
        "optimizer": others,
    }
