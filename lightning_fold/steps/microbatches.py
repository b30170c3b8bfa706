"""Cut one Lightning batch by rows into microbatches, and weigh them.

A microbatch counts by its target tokens, as the mean loss of the whole batch would count them;
by its rows where the batch has no labels. Rows are dealt evenly, the first microbatches taking
the remainder: nothing is padded, and nothing is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_fold.model.context.parallel import IGNORED
from lightning_fold.topology.sequence import balanced_sizes

SHIFTED, UNSHIFTED = "shift_labels", "labels"


@dataclass(frozen=True)
class Pieces:
    """The microbatches of one batch.

    Attributes:
        batches: As the user's batch, each with its own rows.
        rows: Rows of each.
        weights: Share of each in the loss; they sum to 1.
    """

    batches: tuple[Any, ...]
    rows: tuple[int, ...]
    weights: tuple[float, ...]


def rows_of(batch: Any) -> int:
    """Rows of a batch: the leading size of `input_ids`, else of its first tensor.

    Raises:
        ValueError: It has no tensor with rows.
    """
    named = batch.get("input_ids") if isinstance(batch, Mapping) else None
    first = [named] if isinstance(named, Tensor) and named.dim() else []
    for tensor in (*first, *_tensors(batch)):
        if tensor.dim():
            return int(tensor.shape[0])
    raise ValueError(
        "the batch has no tensor with rows, so it cannot be cut into microbatches. Return tensors "
        "[B, ...] from the loader, or implement `split_batch(batch, num_microbatches)` in the "
        "LightningModule."
    )


def split(batch: Any, count: int) -> Pieces:
    """Cut `batch` into `count` microbatches of its rows, in order.

    A tensor with one row where the batch has several, or without rows, is in each of them whole.

    Raises:
        ValueError: The batch has fewer rows, or a tensor has another number of them.
    """
    rows = rows_of(batch)
    if not 1 <= count <= rows:
        raise ValueError(
            f"a batch of {rows} rows cannot be cut into {count} microbatches. Legal "
            f"num_microbatches: 1 to {rows}.  Change `num_microbatches` or the loader's batch size."
        )
    sizes = balanced_sizes(rows, count)
    starts = [sum(sizes[:i]) for i in range(count)]

    def part(tensor: Tensor, start: int, size: int) -> Tensor:
        if tensor.dim() == 0 or (tensor.shape[0] == 1 and rows > 1):
            return tensor
        if tensor.shape[0] != rows:
            raise ValueError(
                f"a tensor of the batch has shape {list(tensor.shape)}, and the batch has {rows} "
                "rows: nothing tells how to cut it into microbatches. Implement "
                "`split_batch(batch, num_microbatches)` in the LightningModule."
            )
        return tensor.narrow(0, start, size)

    batches = tuple(
        apply_to_collection(batch, Tensor, part, start=start, size=size)
        for start, size in zip(starts, sizes, strict=True)
    )
    return weighed(batches, sizes)


def weighed(batches: Sequence[Any], rows: Sequence[int] | None = None) -> Pieces:
    """Microbatches with their weights; one host synchronisation where there are labels."""
    rows = tuple(rows_of(batch) for batch in batches) if rows is None else tuple(rows)
    counts = [_targets(batch) for batch in batches]
    numbers: list[float] = list(rows)
    if all(count is not None for count in counts):
        told: list[int] = torch.stack([c for c in counts if c is not None]).tolist()
        numbers = list(told) if sum(told) else numbers
    total = sum(numbers)
    return Pieces(tuple(batches), rows, tuple(number / total for number in numbers))


def _targets(batch: Any) -> Tensor | None:
    """Targets of the batch that count in a loss; None where it does not say."""
    if not isinstance(batch, Mapping):
        return None
    for name in (SHIFTED, UNSHIFTED):
        labels = batch.get(name)
        if isinstance(labels, Tensor) and labels.dim() > 1:
            own = labels if name == SHIFTED else labels[:, 1:]
            return (own != IGNORED).sum()
    return None


def fresh(batch: Any) -> Any:
    """The same tensors in containers of their own: a step may pop what it has read."""
    return apply_to_collection(batch, Tensor, lambda tensor: tensor)


def fingerprint(batch: Any) -> int:
    """A number that tells batches of different shapes apart, equal on all ranks for equal ones."""
    text = repr([(tuple(t.shape), str(t.dtype)) for t in _tensors(batch)])
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found
