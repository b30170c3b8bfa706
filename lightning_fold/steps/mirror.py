"""Copies of small values from the last pipeline stage to the other stages.

Owns the packing of tensors of mixed dtypes into one broadcast. The bits that arrive are the bits
that were sent, on the sender too, so that all stages decide alike. Knows neither logs nor metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Spec:
    """What the receiver of a tensor has to know."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """Shape and dtype of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Size in a packed buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Mirror:
    """The ranks of one pipeline and the one of them that runs the user's step to its end.

    Attributes:
        group: Ranks of the pipeline; None for one rank, which keeps its values.
        source: Group rank of the last stage.
        device: Where the group communicates.
    """

    group: ProcessGroup | None
    source: int
    device: torch.device

    @property
    def is_source(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.group is None or dist.get_rank(self.group) == self.source

    def objects(self, value: T | None) -> T:
        """The source's `value`, pickled. Collective over the group."""
        if self.group is None:
            return cast("T", value)
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=self.source, device=self.device)
        return cast("T", box[0])

    def tensors(self, specs: Sequence[Spec], values: Sequence[Tensor] | None) -> list[Tensor]:
        """The source's `values`, on `device`, in one broadcast. Collective over the group.

        Args:
            specs: Of all values, equal on all ranks.
            values: Read on the source only.
        """
        buffer = torch.empty(
            sum(spec.num_bytes for spec in specs), dtype=torch.uint8, device=self.device
        )
        if self.is_source:
            assert values is not None
            parts = [_as_bytes(value.to(self.device)) for value in values]
            buffer = torch.cat([buffer[:0], *parts])
        if self.group is not None and buffer.numel():
            dist.broadcast(buffer, group=self.group, group_src=self.source)
        pieces = buffer.split([spec.num_bytes for spec in specs])
        return [_from_bytes(piece, spec) for piece, spec in zip(pieces, specs, strict=True)]


def _as_bytes(value: Tensor) -> Tensor:
    # Not `contiguous`, which leaves a lone element its stride, and a view as bytes wants 1.
    packed = value.detach().clone(memory_format=torch.contiguous_format)
    return packed.reshape(-1).view(torch.uint8)


def _from_bytes(piece: Tensor, spec: Spec) -> Tensor:
    # A clone, since a view of wider elements needs an aligned start.
    return piece.clone().view(spec.dtype).reshape(spec.shape)
