"""One stored tensor, and the reading of the byte runs that an index of it asks for.

Reads by `pread`: pages of a mapped file would count as resident memory. How a file says where its
tensors lie is `tensor_file`'s.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

DimIndex: TypeAlias = slice | Tensor
"""Indices of one dimension: a slice, or a 1-D tensor of integers in any order."""


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor.

    Attributes:
        path: The file.
        shape: Sizes.
        dtype: Element type.
        stride: Elements between neighbours of each dimension, as stored.
        start: Byte of the file at which element [0, ..., 0] lies.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def read_entry(entry: TensorEntry, index: Sequence[DimIndex] | None = None) -> Tensor:
    """Read a tensor, or the part of it where every dimension's index is met. Local.

    Args:
        entry: The tensor.
        index: One index per dimension; None reads all.

    Returns:
        A contiguous tensor on CPU in the stored dtype, which owns its memory. Only the bytes of
        the part are read, but for tensors that are stored with gaps or overlaps.

    Raises:
        ValueError: The file ends before the tensor does.
    """
    if index is None:
        return _read_whole(entry)
    if len(index) != len(entry.shape):
        raise ValueError(f"{len(index)} indices for a tensor of shape {entry.shape}")
    each = [_indices(i, size) for i, size in zip(index, entry.shape, strict=True)]
    # A transposed view is read in its stored order and turned back.
    order = sorted(range(len(each)), key=lambda dim: -entry.stride[dim])
    if not _is_dense(entry, order):
        return _read_gapped(entry)[torch.meshgrid(*each, indexing="ij")].contiguous()
    stored = torch.empty([len(each[dim]) for dim in order], dtype=entry.dtype)
    if stored.numel():
        runs = _runs([entry.shape[dim] for dim in order], [each[dim] for dim in order])
        _fill(stored, entry, runs)
    return stored.permute([order.index(dim) for dim in range(len(order))]).contiguous()


def _read_whole(entry: TensorEntry) -> Tensor:
    # Without an index per dimension: that of a long vector would be larger than the vector.
    order = sorted(range(len(entry.shape)), key=lambda dim: -entry.stride[dim])
    if not _is_dense(entry, order):
        return _read_gapped(entry).contiguous()
    stored = torch.empty([entry.shape[dim] for dim in order], dtype=entry.dtype)
    if stored.numel():
        _fill(stored, entry, [(0, entry.numel)])
    return stored.permute([order.index(dim) for dim in range(len(order))]).contiguous()


def _is_dense(entry: TensorEntry, order: list[int]) -> bool:
    """Whether the elements, in stored order, lie one after the other."""
    expected = 1
    for dim in reversed(order):
        if entry.shape[dim] != 1 and entry.stride[dim] != expected:
            return entry.numel == 0
        expected *= entry.shape[dim]
    return True


def _read_gapped(entry: TensorEntry) -> Tensor:
    """Read all that lies between the first and the last element."""
    sizes = zip(entry.shape, entry.stride, strict=True)
    span = sum((size - 1) * step for size, step in sizes) + 1
    flat = torch.empty(span, dtype=entry.dtype)
    _fill(flat, entry, [(0, span)])
    return flat.as_strided(entry.shape, entry.stride)


def _indices(index: DimIndex, size: int) -> Tensor:
    if isinstance(index, slice):
        return torch.arange(size)[index]
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise IndexError(f"indices {int(index.min())} to {int(index.max())} of {size}")
    return index.to("cpu", torch.int64)


def _runs(shape: list[int], index: list[Tensor]) -> list[tuple[int, int]]:
    """(first element, count) of each contiguous run of the stored order, as the result has them."""
    partial = [dim for dim, i in enumerate(index) if not _is_whole(i, shape[dim])]
    if not partial:
        return [(0, math.prod(shape))]
    block, starts = math.prod(shape), torch.zeros(1, dtype=torch.int64)
    for dim in range(partial[-1]):
        block //= shape[dim]
        starts = (starts[:, None] + index[dim] * block).flatten()
    # The last partial dimension by runs and not by elements, of which there may be very many.
    block //= shape[partial[-1]]
    firsts, counts = _neighbours(index[partial[-1]], torch.ones_like(index[partial[-1]]))
    starts = (starts[:, None] + firsts * block).flatten()
    counts = (counts * block).repeat(len(starts) // len(counts))
    starts, counts = _neighbours(starts, counts)
    return list(zip(starts.tolist(), counts.tolist(), strict=True))


def _is_whole(index: Tensor, size: int) -> bool:
    return len(index) == size and bool((index == torch.arange(size)).all())


def _neighbours(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Join runs that begin where the one before ends."""
    begins = torch.ones(len(starts), dtype=torch.bool)
    begins[1:] = starts[1:] != starts[:-1] + counts[:-1]
    # A closing zero, so that index -1 is the end of nothing.
    ends = torch.cat([counts.cumsum(0), torch.zeros(1, dtype=torch.int64)])
    first = torch.nonzero(begins).flatten()
    last = torch.cat([first[1:], torch.tensor([len(starts)])]) - 1
    return starts[first], ends[last] - ends[first - 1]


def _fill(out: Tensor, entry: TensorEntry, runs: list[tuple[int, int]]) -> None:
    """Read runs of elements, one after the other, into the memory of `out`."""
    data: Any = out.view(-1).view(torch.uint8).numpy()
    target = memoryview(data)
    width, done = entry.dtype.itemsize, 0
    descriptor = os.open(entry.path, os.O_RDONLY)
    try:
        for first, count in runs:
            part = target[done : done + count * width]
            _read_fully(descriptor, part, entry.start + first * width, entry.path)
            done += count * width
    finally:
        os.close(descriptor)


def _read_fully(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    while len(target):
        # One call moves at most 2 GiB.
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise ValueError(f"{path} is truncated: it ends at byte {offset}.")
        target, offset = target[count:], offset + count
