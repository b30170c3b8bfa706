"""What was measured on a kind of GPU: tiles of the kernels, and whether they pay.

A table is a JSON file that `lightning-fold tune` writes. Tables of this package lie in `tables/`,
named `sm_<capability>.json`; a path in `LIGHTNING_FOLD_TILES` comes before them. Without either the
built-in tiles hold and no gain is known, so kernels run only where they are forced.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fold_kernels.tables import BUILT_IN, Tile

FOLDER = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Table:
    """Measurements of one kind of GPU.

    Attributes:
        tiles: Tile by `op/kind of shape`.
        gains: Time of what an op replaces over its own, by `op/kind of shape`.
        capability: Of the GPU, such as (9, 0); None for the built-in tiles.
        origin: Device, versions and date, for people.
    """

    tiles: Mapping[str, Tile] = field(default_factory=lambda: dict(BUILT_IN))
    gains: Mapping[str, float] = field(default_factory=dict)
    capability: tuple[int, int] | None = None
    origin: Mapping[str, str] = field(default_factory=dict)

    def gain_of(self, op: str, kind: str) -> float | None:
        """How many times quicker than what it replaces; None if nobody measured."""
        return self.gains.get(f"{op}/{kind}")

    def write(self, path: Path) -> None:
        """Write a file that is complete or not there."""
        content = {
            "capability": self.capability,
            "origin": dict(self.origin),
            "tiles": {key: asdict(tile) for key, tile in self.tiles.items()},
            "gains": dict(self.gains),
        }
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, indent=1)
                file.write("\n")
            Path(beside).replace(path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise


def read_table(path: Path) -> Table:
    """Read a table; tiles that it does not name are the built-in ones.

    Raises:
        ValueError: The file is missing or holds something else; names it and the key.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _refuse(path, f"cannot be read: {error}") from error
    try:
        major, minor = (int(number) for number in content["capability"])
        tiles = {key: Tile(**value) for key, value in content["tiles"].items()}
        gains = {key: _gain(key, value) for key, value in content["gains"].items()}
        origin = {str(key): str(value) for key, value in content["origin"].items()}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise _refuse(path, f"{type(error).__name__}: {error}") from error
    if unknown := sorted(set(tiles) - set(BUILT_IN)):
        raise _refuse(path, f"no kernel is named {unknown[0]!r}; legal: {', '.join(BUILT_IN)}")
    return Table({**BUILT_IN, **tiles}, gains, (major, minor), origin)


def table_of(capability: tuple[int, int] | None, path: str | None) -> Table:
    """The table for a GPU.

    Args:
        capability: Of the GPU; None where there is none.
        path: File that comes before this package's.

    Raises:
        ValueError: The file cannot be read, or was made on another kind of GPU.
    """
    if path is not None:
        table = read_table(Path(path))
        if capability not in (None, table.capability):
            raise _refuse(
                Path(path), f"it was made for capability {table.capability}, not {capability}"
            )
        return table
    if capability is not None:
        ours = FOLDER / f"sm_{capability[0]}{capability[1]}.json"
        if ours.is_file():
            return read_table(ours)
    return Table()


def _gain(key: str, value: Any) -> float:
    gain = float(value)
    if not 0.0 < gain < math.inf:
        raise ValueError(f"gain {gain} of {key!r} must be positive and finite")
    return gain


def _refuse(path: Path, why: Any) -> ValueError:
    return ValueError(
        f"Table of tiles {path}: {why}. Write one with `lightning-fold tune`, or unset "
        "LIGHTNING_FOLD_TILES."
    )
