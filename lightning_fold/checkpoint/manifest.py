"""The manifest of a sharded folder: written last, it names every file with its size and checksum.

A folder without it is an interrupted save. Each rank checks its share of the files on load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fold.checkpoint.files import checksum, written

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and CRC-32 of one file."""

    size: int
    crc32: int


def entries_of(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Entries of files that are complete."""
    return {
        name: FileEntry((folder / name).stat().st_size, checksum(folder / name)) for name in names
    }


def write_manifest(folder: Path, entries: dict[str, FileEntry]) -> None:
    """Write the manifest of a folder whose files are complete."""
    files = {
        name: {"bytes": entry.size, "crc32": entry.crc32} for name, entry in sorted(entries.items())
    }
    with written(folder / MANIFEST) as file:
        file.write(json.dumps({"format": _FORMAT, "files": files}, indent=1).encode())


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Entries by file name.

    Raises:
        ValueError: There is no manifest, or it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {MANIFEST}, which a save writes last: it is no sharded checkpoint, "
            "or an unfinished one. Change `ckpt_path` to a complete checkpoint."
        )
    try:
        content: Any = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}, known is {_FORMAT}")
        return {
            str(name): FileEntry(int(file["bytes"]), int(file["crc32"]))
            for name, file in content["files"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}). Change `ckpt_path` to a "
            "complete checkpoint."
        ) from error


def verify_files(folder: Path, entries: dict[str, FileEntry], *, part: int, parts: int) -> None:
    """Check that all files are there in their size, and the bytes of every `parts`-th one.

    Args:
        folder: Where they lie.
        entries: The manifest's.
        part: The first whose bytes are checked.
        parts: Into how many shares the check is divided; 0 checks sizes alone.

    Raises:
        ValueError: Names the first file that is missing or damaged.
    """
    for name, entry in entries.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ValueError(f"{folder} lacks its file {name}. {_REMEDY}")
        size = path.stat().st_size
        if size != entry.size:
            raise ValueError(
                f"{path} is damaged: it has {size} bytes, {entry.size} were written. {_REMEDY}"
            )
    for name in sorted(entries)[part::parts] if parts else ():
        if checksum(folder / name) != entries[name].crc32:
            raise ValueError(f"{folder / name} is damaged: its checksum differs. {_REMEDY}")


_REMEDY = "Change `ckpt_path` to another checkpoint, or restore the file."
