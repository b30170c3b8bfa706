"""Tile shapes of the Triton kernels, as data: the same problem runs the same program on all ranks.

A table maps (op, kind of shape) to a tile, and is named after the capability it was made for.
What was measured on a GPU takes the place of the built-in tiles (`measured.py`). Nothing here
times anything. The built-in tiles compile for sm_90 without spilling (`make aot`); none was ever
timed.
"""

from __future__ import annotations

from dataclasses import dataclass

OPS = ("up", "gemm", "down_backward", "wgrad")
# Below this many rows an expert, tiles of 128 rows would be half empty (DeepGEMM #98).
FEW_ROWS = 256
NARROW = 128


@dataclass(frozen=True)
class Tile:
    """How one kernel cuts its work.

    Attributes:
        m: Rows of a tile; of one step in `wgrad`.
        n: Columns of a tile; of each half in `up`.
        k: Depth of one step; second side of a tile in `wgrad`.
        stages: Steps in flight.
        warps: Warps of a program.
        group: Tiles of rows that walk the columns together.
        split: Parts of the epilogue of `down_backward`.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int
    group: int = 8
    split: int = 2

    def __post_init__(self) -> None:
        """Refuse what no kernel can run.

        Raises:
            ValueError: Names the field.
        """
        for name, value in vars(self).items():
            # Stages alone may be any number.
            whole = type(value) is int and value >= 1
            if not whole or (name != "stages" and value & (value - 1)):
                kind = "positive" if name == "stages" else "a power of two"
                raise ValueError(f"{name}={value!r} of a tile must be {kind}.")
        if self.split not in (2, 4):
            raise ValueError(f"split={self.split} of a tile must be 2 or 4.")
        if min(self.m, self.n, self.k) < 16:
            raise ValueError(f"m={self.m} n={self.n} k={self.k} of a tile must be 16 at least.")

    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {
            "BLOCK_M": self.m,
            "BLOCK_N": self.n,
            "BLOCK_K": self.k,
            "GROUP": self.group,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# Spill-free on sm_90 with Triton 3.6.0 and 3.7.0 (kernels.md 3.3); order of preference is
# reasoned, not measured.
BUILT_IN: dict[str, Tile] = {
    "up/many": Tile(128, 128, 64, stages=3, warps=8),
    "up/few": Tile(64, 128, 64, stages=3, warps=4),
    "up/narrow": Tile(128, 64, 64, stages=4, warps=8),
    "gemm/many": Tile(128, 256, 64, stages=3, warps=8),
    "gemm/few": Tile(64, 256, 64, stages=4, warps=4),
    "gemm/narrow": Tile(128, 128, 64, stages=4, warps=8),
    "down_backward/many": Tile(128, 128, 64, stages=3, warps=8, split=4),
    "down_backward/few": Tile(64, 128, 64, stages=4, warps=4, split=4),
    "down_backward/narrow": Tile(128, 64, 64, stages=4, warps=8, split=2),
    "wgrad/many": Tile(64, 128, 128, stages=4, warps=8),
    "wgrad/few": Tile(64, 128, 128, stages=4, warps=8),
    "wgrad/narrow": Tile(64, 128, 128, stages=4, warps=8),
}

# Further tiles that compile as well: what a sweep on a GPU tries beside the built-in ones.
CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "up": (
        Tile(128, 128, 64, stages=4, warps=8),
        Tile(64, 128, 64, stages=4, warps=4),
    ),
    "gemm": (
        Tile(128, 256, 64, stages=4, warps=8),
        Tile(128, 128, 64, stages=4, warps=4),
        Tile(64, 128, 64, stages=4, warps=4),
    ),
    "down_backward": (Tile(128, 128, 64, stages=4, warps=8, split=4),),
    "wgrad": (Tile(64, 128, 256, stages=3, warps=8),),
}


def kind_of(*, rows: int, experts: int, width: int) -> str:
    """The part of a key that describes a shape; `width` is that of the result."""
    if width <= NARROW:
        return "narrow"
    return "few" if rows < FEW_ROWS * experts else "many"
