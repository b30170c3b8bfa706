"""What a launch asks of the machine."""

from __future__ import annotations

from functools import lru_cache

import torch

from fold_kernels.backend import table_for
from fold_kernels.tables import Tile, kind_of

# Enough to let programs of the interpreter walk several tiles each.
INTERPRETED_PROGRAMS = 3
# Meta tensors stand for those of an H200: `fold_kernels.aot` compiles with them and runs nothing.
COMPILED_PROGRAMS = 132


@lru_cache
def num_programs(device: torch.device) -> int:
    """Persistent programs of a grid: one a streaming multiprocessor."""
    if device.type == "meta":
        return COMPILED_PROGRAMS
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


# Small, since the interpreter computes a tile in Python.
INTERPRETED_TILE = Tile(16, 32, 32, stages=2, warps=4, group=2)


def tile_for(rows: torch.Tensor, op: str, *, experts: int, width: int) -> Tile:
    """The table's tile for a call.

    Args:
        rows: Its rows.
        op: Name of the op.
        experts: How many groups the rows fall into.
        width: Of the result.
    """
    if rows.device.type != "cuda":
        return INTERPRETED_TILE
    kind = kind_of(rows=rows.shape[0], experts=experts, width=width)
    return table_for(rows.device).tiles[f"{op}/{kind}"]
