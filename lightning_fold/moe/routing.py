"""The routing decision as a value; the model's own router makes it."""

# Shapes.  T local tokens   K top-k   N = T*K routed rows   E all experts

from __future__ import annotations

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
    """

    index_TK: Tensor
    weights_TK: Tensor
    num_experts: int

    @property
    def top_k(self) -> int:
        """K."""
        return self.index_TK.shape[1]

    def counts_E(self) -> Tensor:
        """Routed rows per expert, int64, on device and without a host synchronisation."""
        # scatter_add, not bincount: bincount reads its maximum back to the host on CUDA.
        ids_N = self.index_TK.reshape(-1)
        zeros_E = ids_N.new_zeros(self.num_experts)
        return zeros_E.scatter_add(0, ids_N, torch.ones_like(ids_N))
