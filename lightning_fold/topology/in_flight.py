"""Differentiable rows on the wire: what runs between start and wait overlaps, in backward too.

The two ends are two nodes of the graph, tied by an empty tensor. In backward the gradient leaves
where `wait` was called and is waited for where the rows left. Autograd runs the nodes in between,
which are younger than the one and older than the other, while it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from lightning_fold.topology.comm import Comm, Pending


def start_exchange(
    x: Tensor, comm: Comm, *, send: Sequence[int], recv: Sequence[int], axis: str
) -> RowsInFlight:
    """`comm.exchange_rows` on the wire. Collective over `axis`."""
    if comm.size(axis) == 1:
        return RowsInFlight(x)
    return RowsInFlight(
        x,
        lambda rows: comm.start_all_to_all_rows(rows, send, recv, axis=axis),
        lambda grad: comm.start_all_to_all_rows(grad, recv, send, axis=axis),
    )


def start_gather(x: Tensor, comm: Comm, sizes: Sequence[int], axis: str) -> RowsInFlight:
    """`comm.gather_rows` on the wire. Collective over `axis`."""
    if comm.size(axis) == 1:
        return RowsInFlight(x)
    return RowsInFlight(
        x,
        lambda rows: comm.start_all_gather_rows(rows, sizes, axis=axis),
        lambda grad: comm.start_reduce_scatter_rows(grad, sizes, axis=axis),
    )


class RowsInFlight:
    """Rows that have left; `wait` must be called once and gives them.

    Args:
        x: The rows that leave.
        run: Starts the collective; None where the rows stay.
        transpose: Starts the one that the gradient goes through.
    """

    def __init__(
        self,
        x: Tensor,
        run: Callable[[Tensor], Pending] | None = None,
        transpose: Callable[[Tensor], Pending] | None = None,
    ) -> None:
        self._trip = None if run is None or transpose is None else _Trip(run, transpose)
        # An empty tensor that ties the two ends together in the graph.
        self._tie: Tensor = x if self._trip is None else _Depart.apply(x, self._trip)

    def wait(self) -> Tensor:
        """The rows that arrive."""
        if self._trip is None:
            return self._tie
        out: Tensor = _Arrive.apply(self._tie, self._trip)
        return out


class _Trip:
    """What both ends share; `pending` is what the one has started and the other waits for."""

    def __init__(
        self, run: Callable[[Tensor], Pending], transpose: Callable[[Tensor], Pending]
    ) -> None:
        self.run, self.transpose = run, transpose
        self.pending: Pending | None = None

    def land(self) -> Tensor:
        assert self.pending is not None, "rows in flight are waited for once"
        out, self.pending = self.pending.wait(), None
        return out


class _Depart(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.pending = trip.run(x)
        return x.new_empty(0)

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
        ctx.trip.pending = ctx.trip.transpose(grad)
        return grad.new_empty(0), None
