"""One kernel to compile, and what an op must say about its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fold_kernels.aot.gate import Expected
from fold_kernels.tables import Tile

BF16, FP32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


@dataclass(frozen=True)
class Case:
    """One kernel.

    Attributes:
        op: Name of the op.
        variant: Words that its `Op.launch` understands.
        tile: How the work is cut; None where the op has no tiles.
    """

    op: str
    variant: str = ""
    tile: Tile | None = None

    @property
    def words(self) -> list[str]:
        """Words of the variant."""
        return self.variant.split()

    @property
    def cut(self) -> Tile:
        """The tile of an op that has one."""
        assert self.tile is not None, f"{self.op} has no tiles"
        return self.tile

    @property
    def name(self) -> str:
        """Key of the budget: op, tile, variant."""
        return " ".join(filter(None, (self.op, self._tile_in_words(), self.variant)))

    def _tile_in_words(self) -> str:
        if self.tile is None:
            return ""
        cut = f"{self.tile.m}x{self.tile.n}x{self.tile.k} s{self.tile.stages} w{self.tile.warps}"
        return f"{cut} split{self.tile.split}" if self.op == "down_backward" else cut


@dataclass(frozen=True)
class Op:
    """How an op is compiled, and what its kernel is made of.

    Attributes:
        kernel: Name of the kernel that is looked at.
        launch: Calls the host function for so many rows.
        variants: Of every built-in tile; candidates are compiled in the first.
        built_in: Tiles that are used unless a table says otherwise.
        candidates: Tiles that a sweep tries.
        opcodes: Kinds of instructions that must be there on Hopper.
        step_bytes: Bytes of operands that one step of the pipeline loads.
    """

    kernel: str
    launch: Callable[[Case, int], object]
    variants: tuple[str, ...] = ("",)
    built_in: tuple[Tile, ...] = ()
    candidates: tuple[Tile, ...] = ()
    opcodes: tuple[str, ...] = ()
    step_bytes: Callable[[Case], int] = lambda case: 0

    def expected(self, case: Case) -> Expected:
        """What the kernel of a case must look like on Hopper."""
        stages = 0 if case.tile is None else case.tile.stages
        return Expected(self.opcodes, self.step_bytes(case) * stages)


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor with no memory, in place of one on a GPU."""
    return torch.empty(*shape, dtype=dtype, device="meta")
