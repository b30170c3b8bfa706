"""Files that appear complete or not at all: names beside the final one, renames, space, checksums.

A save writes `.NAME.partial` beside `NAME` and renames it at the very end, so whatever bears the
final name is whole. A checkpoint that is replaced goes only after the new one is in its place.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CHUNK = 1 << 22
# Room for headers, metadata and the file system's own blocks.
_SLACK = 1 << 20


def partial_of(path: Path) -> Path:
    """Where a save writes before it is whole."""
    return path.with_name(f".{path.name}.partial")


def publish(partial: Path, path: Path) -> None:
    """Give a complete checkpoint its final name, in place of what bears it now."""
    sync_folder(partial if partial.is_dir() else partial.parent)
    if not os.path.lexists(path) or (partial.is_file() and not path.is_dir()):
        partial.replace(path)
        sync_folder(path.parent)
        return
    replaced = _aside(path)
    if _exchange(partial, path):
        partial.rename(replaced)
    else:
        path.rename(replaced)
        partial.rename(path)
    sync_folder(path.parent)
    _delete(replaced)


def recover(path: Path) -> None:
    """Bring back what a save had moved aside when it was killed between its two renames."""
    replaced = _aside(path)
    if replaced.exists() and not os.path.lexists(path):
        replaced.rename(path)


def remove(path: Path) -> None:
    """Delete a checkpoint, file or folder; no half of a folder ever bears its name."""
    if path.is_dir() and not path.is_symlink():
        doomed = path.with_name(f".{path.name}.removed")
        _delete(doomed)
        path.rename(doomed)
        _delete(doomed)
    else:
        path.unlink(missing_ok=True)


def clear_partial(path: Path) -> None:
    """Delete what an earlier save of `path` left unfinished."""
    _delete(partial_of(path))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all; its folder must exist."""
    try:
        with written(partial_of(path)) as file:
            file.write(content)
        publish(partial_of(path), path)
    finally:
        clear_partial(path)


def check_space(path: Path, num_bytes: int) -> None:
    """Make sure that `num_bytes` fit beside what is there.

    Raises:
        OSError: They do not; nothing is written yet.
    """
    folder = next(p for p in (path, *path.parents) if p.is_dir())
    free = shutil.disk_usage(folder).free
    needed = num_bytes + _SLACK
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"it needs {needed / 2**20:,.1f} MiB, {free / 2**20:,.1f} MiB are free under "
            f"{folder}. Free space, keep fewer checkpoints (`save_top_k`) or change `dirpath`",
        )


def make_folder(folder: Path) -> None:
    """Create the folder that checkpoints go into.

    Raises:
        OSError: It cannot be; says what to change.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{folder} cannot be created: {error.strerror}. Change `dirpath` or the folder's "
            "permissions",
        ) from error


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A new file, on the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names at once where the system can: then no moment has neither checkpoint."""
    _delete(_aside(second))
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(first), os.fsencode(second)
    status: int = rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    return status == 0


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
