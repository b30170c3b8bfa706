"""Which stages are whose, and what keeps the places of modules that are another's."""

# Shapes.  B sequences   S tokens   D model width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fold.pipeline.layout import Layout, StageLayers
from lightning_fold.pipeline.probe import plain_attributes


@dataclass(frozen=True)
class Placement:
    """Which stages a rank of the pipeline runs.

    Attributes:
        layout: What each stage owns.
        ranks: Rank of every stage.
        rank: This rank.
    """

    layout: Layout
    ranks: tuple[int, ...]
    rank: int

    @property
    def own(self) -> tuple[StageLayers, ...]:
        """The stages of this rank."""
        pairs = zip(self.layout.stages, self.ranks, strict=True)
        return tuple(stage for stage, rank in pairs if rank == self.rank)

    @property
    def has_first(self) -> bool:
        """Whether this rank runs the first stage."""
        return self.ranks[0] == self.rank

    @property
    def has_last(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.ranks[-1] == self.rank

    def ranks_of(self, wanted: Callable[[StageLayers], bool]) -> tuple[int, ...]:
        """Ranks of the stages that satisfy `wanted`, each once."""
        pairs = zip(self.layout.stages, self.ranks, strict=True)
        return tuple(dict.fromkeys(rank for stage, rank in pairs if wanted(stage)))


class Foreign(nn.Module):
    """Keeps the place of a module that another stage owns."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(plain_attributes(module))
        self.place = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Never called in a step."""
        raise RuntimeError(f"{self.place} belongs to another pipeline stage, not to this rank")


class Hollow(nn.Module):
    """Keeps the place of an embedding: what it returns has the shape, and nothing reads it."""

    def __init__(self, module: nn.Module, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.__dict__.update(plain_attributes(module))
        self.width, self.dtype = width, dtype

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Zeros [B, S, D] that take no memory."""
        return x.new_zeros((), dtype=self.dtype).expand(*x.shape[:2], self.width)
