"""Differentiable rows on the wire: what runs between start and wait overlaps, in backward too.

The two ends are two nodes of the graph, tied by an empty tensor. In backward the gradient leaves
where `wait` was called and is waited for where the rows left. Autograd runs the nodes in between,
which are younger than the one and older than the other, while it travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.autograd import Function

from lightning_fold.topology.comm import Comm, Pending


@dataclass(frozen=True)
class Hop:
    """One collective that rows go through; their gradient goes through its transpose.

    Attributes:
        kind: `exchange` is an all-to-all; `gather` concatenates the peers' rows; `scatter` sums
            them, and each peer keeps its own.
        axis: Whose ranks take part; each of them enters, also with zero rows.
        sizes: Rows to each peer of an exchange, or rows of each peer.
        recv: Rows from each peer of an exchange; empty for the others.
    """

    kind: Literal["exchange", "gather", "scatter"]
    axis: str
    sizes: Sequence[int]
    recv: Sequence[int] = ()

    @property
    def transposed(self) -> Hop:
        """The way back."""
        if self.kind == "exchange":
            return Hop("exchange", self.axis, self.recv, self.sizes)
        return Hop("scatter" if self.kind == "gather" else "gather", self.axis, self.sizes)

    def start(self, rows: Tensor, comm: Comm) -> Pending:
        """Send rows on their way. Collective over `axis`; knows no autograd."""
        if self.kind == "exchange":
            return comm.start_all_to_all_rows(rows, self.sizes, self.recv, axis=self.axis)
        if self.kind == "gather":
            return comm.start_all_gather_rows(rows, self.sizes, axis=self.axis)
        return comm.start_reduce_scatter_rows(rows, self.sizes, axis=self.axis)


def travel(rows: Tensor, comm: Comm, hops: Sequence[Hop]) -> Tensor:
    """Rows after some hops, one after the other. Collective over their axes."""
    for hop in hops:
        rows = RowsInFlight(rows, comm, hop).wait()
    return rows


class RowsInFlight:
    """Rows that have left; `wait` must be called once and gives them.

    Args:
        rows: The rows that leave.
        comm: Collectives.
        hop: What they go through; None where they stay.
    """

    def __init__(self, rows: Tensor, comm: Comm, hop: Hop | None) -> None:
        self._trip = None if hop is None else _Trip(comm, hop)
        # An empty tensor that ties the two ends together in the graph.
        self._tie: Tensor = rows if self._trip is None else _Depart.apply(rows, self._trip)

    def wait(self) -> Tensor:
        """The rows that arrive."""
        if self._trip is None:
            return self._tie
        out: Tensor = _Arrive.apply(self._tie, self._trip)
        return out


class _Trip:
    """What both ends share; `pending` is what the one has started and the other waits for."""

    def __init__(self, comm: Comm, hop: Hop) -> None:
        self.comm, self.hop = comm, hop
        self.pending: Pending | None = None

    def land(self) -> Tensor:
        assert self.pending is not None, "rows in flight are waited for once"
        out, self.pending = self.pending.wait(), None
        return out


class _Depart(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.pending = trip.hop.start(rows, trip.comm)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, tie: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.land(), None


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, tie: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.land()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        trip.pending = trip.hop.transposed.start(grad, trip.comm)
        return grad.new_empty(0), None
