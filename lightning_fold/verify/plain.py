"""How a single process trains with a feature: the form that all plain files share; torch alone.

Cuts batches into microbatches by itself, so that a fault of the product's own cut shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Share:
    """What a sub-batch counts for where it is one microbatch of its dp rank's batch.

    Attributes:
        loss: Its weight in the loss.
        rows: Its part of the sequences.
    """

    loss: float = 1.0
    rows: float = 1.0


def shares_of(batches: Sequence[Batch], shares: Sequence[Share]) -> Sequence[Share]:
    """`shares`, or one for each whole batch."""
    return shares or [Share()] * len(batches)


def cut(batch: Any, pieces: int) -> list[tuple[Any, Share]]:
    """Rows in order, the first pieces one longer where they do not go up, each with its share.

    Args:
        batch: Tensors [B, ...] in mappings and sequences; a tensor of one row belongs to all.
        pieces: At most B.
    """
    rows = _rows(batch)
    sizes = [rows // pieces + (piece < rows % pieces) for piece in range(pieces)]
    starts = [sum(sizes[:piece]) for piece in range(pieces)]
    return weighed(
        [
            _part(batch, rows, slice(start, start + size))
            for start, size in zip(starts, sizes, strict=True)
        ]
    )


def weighed(batches: Sequence[Any]) -> list[tuple[Any, Share]]:
    """Microbatches with what they count for: their targets, or their rows where none are known."""
    rows = [_rows(batch) for batch in batches]
    targets = [_targets(batch) for batch in batches]
    weights = [t for t in targets if t is not None]
    if len(weights) < len(batches) or not any(weights):
        weights = rows
    return [
        (batch, Share(loss=weight / sum(weights), rows=size / sum(rows)))
        for batch, weight, size in zip(batches, weights, rows, strict=True)
    ]


def _part(value: Any, rows: int, own: slice) -> Any:
    if isinstance(value, Mapping):
        return {key: _part(item, rows, own) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_part(item, rows, own) for item in value)
    return value[own] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value


def _rows(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    if isinstance(batch, Mapping):
        tokens = batch.get("input_ids")
        return _rows(list(batch.values()) if tokens is None else tokens)
    items = batch if isinstance(batch, list | tuple) else ()
    return next((rows for item in items if (rows := _rows(item))), 0)


def _targets(batch: Any) -> int | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return None
    return int((labels[:, 1:] != -100).sum())


class Plain:
    """How a single process trains with a feature; this one trains without any.

    Args:
        model: The plain model; a feature may hook it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def forward_backward(
        self, batches: Sequence[Batch], scale: float, shares: Sequence[Share] = ()
    ) -> list[tuple[Any, Tensor]]:
        """Run the sub-batches of all dp ranks of one forward; accumulate `scale` * their losses.

        Args:
            batches: One of each dp rank.
            scale: Of all losses.
            shares: What each counts for; empty for whole batches.

        Returns:
            The model's output and the loss of each sub-batch, as the dp rank's user sees them.
        """
        results = []
        for batch, share in zip(batches, shares_of(batches, shares), strict=True):
            out = self.model(**batch)
            loss = self.loss(out, batch)
            (loss * share.loss * scale).backward()
            results.append((out, loss.detach()))
        return results

    def loss(self, out: Any, batch: Batch) -> Tensor:
        """The loss of one sub-batch."""
        loss: Tensor = out.loss
        return loss

    def after_step(self) -> None:
        """What happens once the optimizer has made its step."""


@dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        strategy: Arguments of `FoldedMoEStrategy`.
        plain: Makes the plain form for a model.
    """

    strategy: Mapping[str, Any] = field(default_factory=dict)
    plain: Callable[[nn.Module], Plain] = Plain
