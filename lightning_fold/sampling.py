"""Where training is in its data: one global order per epoch, and the way back into the middle of it.

Samples are dealt in a global order that depends on the seed and the epoch alone. A step of dp ranks with batches of b
takes the next dp * b of them, so any dp with the same global batch sees the same samples in the same steps, and a
position is one number. Workers only fetch ahead; they change nothing. Holds no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import DistributedSampler


@dataclass(frozen=True)
class DataPosition:
    """How far an epoch has been read.

    Attributes:
        epoch: The epoch, as the sampler counts it.
        consumed: Samples of it that training has used, over all ranks.
        global_batch: Samples of one step over all dp ranks when it was written.
    """

    epoch: int
    consumed: int
    global_batch: int

    def to_dict(self) -> dict[str, int]:
        """Primitives, for a checkpoint."""
        return asdict(self)


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that can begin one epoch in its middle.

    The length stays that of a whole epoch: Lightning's loops count the batches before the position themselves.

    Args:
        like: The sampler to continue; its dataset, ranks, order and seed are taken over.
        position: Where to begin; other epochs begin at their start.
    """

    def __init__(self, like: DistributedSampler[Any], position: DataPosition | None) -> None:
        super().__init__(
            like.dataset,
            num_replicas=like.num_replicas,
            rank=like.rank,
            shuffle=like.shuffle,
            seed=like.seed,
            drop_last=like.drop_last,
        )
        self.set_epoch(like.epoch)
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        if self.position is None or self.position.epoch != self.epoch:
            return iter(indices)
        # Dealt round robin: the first n samples of the global order are n / replicas of each rank.
        return iter(indices[self.position.consumed // self.num_replicas :])


def check_global_batch(position: DataPosition, *, global_batch: int, dp: int) -> None:
    """Refuse to resume inside an epoch with another number of samples a step.

    Raises:
        ValueError: The samples of a step would not be those of an uninterrupted run.
    """
    if position.consumed and position.global_batch != global_batch:
        legal = f" ({position.global_batch // dp} per dp rank)" if not position.global_batch % dp else ""
        raise ValueError(
            f"the checkpoint lies inside epoch {position.epoch}, written with a global batch of "
            f"{position.global_batch} samples; now dp * batch_size = {dp} * {global_batch // dp} = "
            f"{global_batch}. Change `batch_size` so that the product is {position.global_batch}{legal}."
        )
