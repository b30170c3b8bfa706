"""What a dispatcher is: `dispatch` sends rows to their experts, `combine` brings outputs back.

State between the two is a value that the first returns and the second takes: two microbatches may
be in flight.
"""

# Shapes.  T local tokens   K top-k   S rows that arrived   D model width

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing

State = TypeVar("State")


class Dispatcher(Protocol[State]):
    """Moves rows between token owners and expert owners.

    Every rank of the ep and etp axes must call both methods for every layer, also with zero tokens.
    """

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, State]:
        """Rows for this rank's experts, each once, and what `combine` needs."""
        ...

    def combine(self, out_SD: Tensor, state: State) -> Tensor:
        """Sum of the expert outputs of every local token, [T, D].

        Args:
            out_SD: Sum over this rank's experts of every row that `dispatch` gave, in its order.
            state: From that `dispatch`.
        """
        ...
