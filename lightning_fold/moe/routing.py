"""The routing decision as a value; the model's own router makes it, a capacity may cut it."""

# Shapes.  T local tokens   K top-k   N = T*K routed rows   E all experts

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Which experts serve which token, and with what weight.

    Attributes:
        index_TK: int64, expert of every routed row. Ids are unique within a token.
        weights_TK: Routing weights, any floating dtype, with gradient.
        num_experts: E.
        kept_TK: bool, False for rows that are neither sent nor computed; None keeps all.
        slots: Rows that every expert gets from every rank, filled up with rows of zeros; None
            sends what there is.
        layer: Name of the experts, for errors.
    """

    index_TK: Tensor
    weights_TK: Tensor
    num_experts: int
    kept_TK: Tensor | None = None
    slots: int | None = None
    layer: str = "experts"

    @property
    def top_k(self) -> int:
        """K."""
        return self.index_TK.shape[1]

    def kept_index_TK(self) -> Tensor:
        """`index_TK` with E where a row is dropped: such rows sort behind all others."""
        if self.kept_TK is None:
            return self.index_TK
        return self.index_TK.masked_fill(~self.kept_TK, self.num_experts)

    def counts_E(self) -> Tensor:
        """Kept rows per expert, int64, on device and without a host synchronisation."""
        # scatter_add, not bincount: bincount reads its maximum back to the host on CUDA.
        ids_N = self.kept_index_TK().reshape(-1)
        counts = ids_N.new_zeros(self.num_experts + 1)
        return counts.scatter_add(0, ids_N, torch.ones_like(ids_N))[:-1]

    def nan_mark(self, rank: int) -> Tensor:
        """`rank` + 1 where a weight is NaN, else 0; int64 [1], to travel with the counts.

        A router whose logits are NaN gives such weights, and ids that mean nothing.
        """
        return self.weights_TK.detach().isnan().any().long().view(1) * (rank + 1)

    def refuse_nan(self, marks: Sequence[int]) -> None:
        """Raise where a mark of `nan_mark` is set.

        Raises:
            ValueError: Names the layer and the ranks.
        """
        ranks = sorted({mark - 1 for mark in marks if mark})
        if ranks:
            raise ValueError(
                f"{self.layer}: NaN routing weights on rank {', '.join(map(str, ranks))}. The "
                "router's logits are NaN or infinite there, so no token has a valid expert. Look "
                "at the hidden states before this layer: too high a learning rate, a loss "
                "without a clip (`gradient_clip_val`), or bad values in the batch."
            )
