"""What a dispatcher is: `dispatch` sends rows to their experts, `combine` brings outputs back.

State between the two is a value that the first returns and the second takes: two microbatches may
be in flight.
"""

# Shapes.  T local tokens   K top-k   S rows that arrived   R = pairs of a row and an expert
#          e local experts   D model width

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from fold_kernels.permute import sort_by_expert
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing

State = TypeVar("State")
Work = Callable[[], None]


class Dispatcher(Protocol[State]):
    """Moves rows between token owners and expert owners.

    Every rank of the ep and etp axes must call both methods for every layer, also with zero tokens.
    """

    def dispatch(
        self, x_TD: Tensor, routing: Routing, *, meanwhile: Work | None = None
    ) -> tuple[ExpertRows, State]:
        """Rows for this rank's experts, each once, and what `combine` needs.

        Args:
            x_TD: Local tokens.
            routing: Their experts. Rows that it drops are neither sent nor computed.
            meanwhile: Local work to call, at most once, while rows are on the wire; a dispatcher
                that has nothing on the wire leaves it.
        """
        ...

    def combine(self, out_SD: Tensor, state: State) -> Tensor:
        """Sum of the expert outputs of every local token, [T, D]; zero where all are dropped.

        Args:
            out_SD: Sum over this rank's experts of every row that `dispatch` gave, in its order.
            state: From that `dispatch`.
        """
        ...


def expand(
    source_SD: Tensor, ids_SK: Tensor, weights_SK: Tensor, counts_e: Tensor, sizes: list[int]
) -> ExpertRows:
    """Pair every arrived row with the local experts that take it.

    Args:
        source_SD: Rows as they arrived.
        ids_SK: Local experts of every row; an id outside of [0, e) is none.
        weights_SK: Their weights.
        counts_e: Rows per local expert.
        sizes: The same on the host: they say, without a synchronisation, how many pairs there are.
    """
    outside = (ids_SK < 0) | (ids_SK >= len(sizes))
    order, _ = sort_by_expert(ids_SK.masked_fill(outside, len(sizes)))
    order_R = order[: sum(sizes)]
    return ExpertRows(
        source_SD=source_SD,
        origin_R=order_R // ids_SK.shape[1],
        weights_R=weights_SK.reshape(-1).index_select(0, order_R),
        counts_e=counts_e,
        sizes=sizes,
    )
