"""What a dispatcher is: `dispatch` sends rows to their experts, `combine` brings outputs back.

State between the two is a value that the first returns and the second takes: two microbatches may
be in flight. `SegmentedDispatcher` is one whose work lies in pieces between the collectives, so
that a pipeline can compute something else while rows travel; those built in are of that kind.
"""

# Shapes.  T local tokens   K top-k   N rows packed   S rows that arrived   e local experts
#          R = pairs of a row and an expert   D model width

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from fold_kernels.permute import sort_by_expert
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.in_flight import Hop, RowsInFlight, travel

State = TypeVar("State")
Begun = TypeVar("Begun")
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


@dataclass(frozen=True)
class Trip(Generic[State]):
    """The way of one layer's rows, a value without history.

    Attributes:
        hops: Collectives from here to the experts; the way back is their transpose.
        num_sent: Rows that leave, the first ones of what is packed; None is all.
        state: What the dispatcher needs at either end.
    """

    hops: tuple[Hop, ...]
    num_sent: int | None
    state: State

    @property
    def hops_back(self) -> tuple[Hop, ...]:
        """Collectives from the experts to here."""
        return tuple(hop.transposed for hop in reversed(self.hops))

    def sent(self, part: Tensor) -> Tensor:
        """What leaves of a packed tensor."""
        return part if self.num_sent is None else part[: self.num_sent]


class SegmentedDispatcher(ABC, Generic[Begun, State]):
    """A dispatcher in pieces: `begin`, `pack`, `settle`, hops, `arrive`; hops back, `bring_home`.

    `pack`, `arrive` and `bring_home` are local and differentiable; a recomputation repeats them on
    what `begin` and `settle` have returned, which decide and communicate, and are called once.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    @abstractmethod
    def begin(self, routing: Routing) -> Begun:
        """Order the rows and begin to tell the peers. Collective over ep and etp."""

    @abstractmethod
    def pack(self, x_TD: Tensor, routing: Routing, begun: Begun) -> tuple[Tensor, ...]:
        """Tensors to send, by rows in order of their destinations; the token rows first."""

    @abstractmethod
    def settle(self, routing: Routing, begun: Begun) -> Trip[State]:
        """Learn how many rows go where. Collective over ep and etp.

        Raises:
            ValueError: Routing weights of a rank are NaN; all ranks of ep x etp raise alike.
        """

    @abstractmethod
    def arrive(self, parts: tuple[Tensor, ...], trip: Trip[State]) -> ExpertRows:
        """What has been packed, behind the last hop, as rows for this rank's experts."""

    @abstractmethod
    def bring_home(self, rows_ND: Tensor, trip: Trip[State]) -> Tensor:
        """Sum the rows of every token, which are back in the order in which they left."""

    def dispatch(
        self, x_TD: Tensor, routing: Routing, *, meanwhile: Work | None = None
    ) -> tuple[ExpertRows, Trip[State]]:
        """See `Dispatcher`. Collective over ep and etp."""
        begun = self.begin(routing)
        # Behind `begin`: the exchange of the sizes overlaps the permutation.
        parts = self.pack(x_TD, routing, begun)
        trip = self.settle(routing, begun)
        first, *rest = trip.hops or (None,)
        flying = [RowsInFlight(trip.sent(part), self.comm, first) for part in parts]
        if meanwhile is not None and first is not None:
            meanwhile()
        arrived = tuple(travel(rows.wait(), self.comm, rest) for rows in flying)
        return self.arrive(arrived, trip), trip

    def combine(self, out_SD: Tensor, state: Trip[State]) -> Tensor:
        """See `Dispatcher`. Collective over etp and ep."""
        return self.bring_home(travel(out_SD, self.comm, state.hops_back), state)

    def route_of(self, *hops: Hop) -> tuple[Hop, ...]:
        """Those of the hops that more than one rank takes part in."""
        return tuple(hop for hop in hops if self.comm.size(hop.axis) > 1)


AnySegmented = SegmentedDispatcher[Any, Any]


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
