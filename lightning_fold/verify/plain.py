"""How a single process trains with a feature: the form that all plain files share; torch alone."""

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
