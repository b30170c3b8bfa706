"""Collectives by axis name: the one place where this package talks to c10d on the data path.

Owns tracing, byte counting and host synchronisation. FSDP2, DTensor and DCP issue their own
collectives beside it. Every rank of an axis enters every call, also with zero rows; an axis of
size one issues nothing. Uneven exchanges use `all_to_all_single`, the only uneven form that Gloo
has; even ones use the tensor collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_fold.telemetry import CollectiveBytes, Flight, Telemetry
from lightning_fold.topology.flight_log import FlightLog
from lightning_fold.topology.meshes import Meshes

# torch 2.13 renames the tensor collectives and warns about the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective on the wire; `wait` must be called once and gives the result.

    Args:
        out: Where the result arrives.
        work: The handle of c10d; None where nothing is outstanding.
        sent: What is sent; kept alive until it has arrived.
        flight: Notes when it leaves, arrives and is waited for; None where nobody asks.
    """

    def __init__(
        self,
        out: Tensor,
        work: Any = None,
        *,
        sent: Tensor | None = None,
        flight: FlightLog | None = None,
    ) -> None:
        self._out, self._work, self._sent = out, work, sent
        self._last: Callable[[Tensor], Tensor] | None = None
        self._flight = flight if work is not None else None
        if self._flight is not None:
            self._flight.watch(work)

    def then(self, last: Callable[[Tensor], Tensor]) -> Pending:
        """The same collective, whose result goes through `last`."""
        self._last = last
        return self

    def wait(self) -> Tensor:
        """The result."""
        if self._flight is not None:
            self._flight.wait(self._work)
        elif self._work is not None:
            self._work.wait()
        self._work = self._sent = self._flight = None
        return self._out if self._last is None else self._last(self._out)


class Works(tuple[Any, ...]):
    """Handles of several messages, waited for as one."""

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all have arrived."""
        return all(work.is_completed() for work in self)


class Comm:
    """Collectives over the axes of `meshes`.

    Attributes:
        meshes: The meshes whose axes are named in calls.
        telemetry: Receives one `CollectiveBytes` a call when somebody subscribed.
        host_syncs: Number of `to_host` calls so far.
    """

    def __init__(self, meshes: Meshes, telemetry: Telemetry) -> None:
        self.meshes = meshes
        self.telemetry = telemetry
        self.host_syncs = 0

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return self.meshes.size(axis)

    def rank(self, axis: str) -> int:
        """This rank's coordinate on `axis`."""
        return self.meshes.rank(axis)

    @property
    def global_rank(self) -> int:
        """This rank in the world, for messages."""
        return dist.get_rank()

    def to_host(self, tensor: Tensor, *, why: str) -> list[int]:
        """Copy a small integer tensor to the host: the only host synchronisation of the data path.

        Args:
            tensor: One-dimensional, integer.
            why: What the host needs the numbers for.
        """
        assert why, "a host synchronisation needs a reason"
        self.host_syncs += 1
        values: list[int] = tensor.tolist()
        return values

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor:
        """Sum of `x` over `axis`, in a new tensor. Collective over `axis`."""
        out = x.clone(memory_format=torch.contiguous_format)
        if self.size(axis) > 1:
            self._count(axis, "all_reduce", out)
            dist.all_reduce(out, group=self.meshes.group(axis))
        return out

    def all_to_all_rows(
        self, x: Tensor, send: Sequence[int], recv: Sequence[int], *, axis: str
    ) -> Tensor:
        """Send `send[i]` rows to peer i and receive `recv[i]`. Collective over `axis`."""
        return self._all_to_all(x, send, recv, axis=axis, is_async=False).wait()

    def start_all_to_all_rows(
        self,
        x: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        *,
        axis: str,
        tells: bool = False,
    ) -> Pending:
        """`all_to_all_rows` on the wire. Collective over `axis`.

        Args:
            x: Rows.
            send: Rows to each peer.
            recv: Rows from each peer.
            axis: Whose ranks take part.
            tells: Whether it is a few numbers that must not queue behind rows: they have a process
                group of their own where passes are woven.
        """
        return self._all_to_all(x, send, recv, axis=axis, is_async=True, tells=tells)

    def all_gather_rows(self, x: Tensor, sizes: Sequence[int], *, axis: str) -> Tensor:
        """Concatenate every peer's rows; peer i holds `sizes[i]`. Collective over `axis`."""
        return self._gather(x, sizes, axis=axis, is_async=False).wait()

    def start_all_gather_rows(
        self, x: Tensor, sizes: Sequence[int], *, axis: str, tells: bool = False
    ) -> Pending:
        """`all_gather_rows` on the wire. Collective over `axis`; `tells` as above."""
        return self._gather(x, sizes, axis=axis, is_async=True, tells=tells)

    def reduce_scatter_rows(self, x: Tensor, sizes: Sequence[int], *, axis: str) -> Tensor:
        """Sum over peers, each keeping its own `sizes[rank]` rows. Collective over `axis`."""
        return self._reduce_scatter(x, sizes, axis=axis, is_async=False).wait()

    def start_reduce_scatter_rows(self, x: Tensor, sizes: Sequence[int], *, axis: str) -> Pending:
        """`reduce_scatter_rows` on the wire. Collective over `axis`."""
        return self._reduce_scatter(x, sizes, axis=axis, is_async=True)

    def _all_to_all(
        self,
        x: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        *,
        axis: str,
        is_async: bool,
        tells: bool = False,
    ) -> Pending:
        if self.size(axis) == 1:
            return Pending(x)
        self._count(axis, "all_to_all", x)
        x, out = x.contiguous(), x.new_empty(sum(recv), *x.shape[1:])
        sizes, group = (list(recv), list(send)), self.meshes.group(axis, tells=tells)
        flight = None if tells else self._flight(x, axis, "all_to_all", is_async=is_async)
        work = dist.all_to_all_single(out, x, *sizes, group=group, async_op=is_async)
        return Pending(out, work, sent=x, flight=flight)

    def _gather(
        self, x: Tensor, sizes: Sequence[int], *, axis: str, is_async: bool, tells: bool = False
    ) -> Pending:
        parts = self.size(axis)
        if parts == 1:
            return Pending(x)
        if len(set(sizes)) > 1:
            copies, each = x.repeat(parts, *[1] * (x.dim() - 1)), [x.shape[0]] * parts
            return self._all_to_all(copies, each, sizes, axis=axis, is_async=is_async, tells=tells)
        self._count(axis, "all_gather", x)
        x, out = x.contiguous(), x.new_empty(sum(sizes), *x.shape[1:])
        flight = None if tells else self._flight(x, axis, "all_gather", is_async=is_async)
        group = self.meshes.group(axis, tells=tells)
        work = _all_gather(out, x, group=group, async_op=is_async)
        return Pending(out, work, sent=x, flight=flight)

    def _reduce_scatter(
        self, x: Tensor, sizes: Sequence[int], *, axis: str, is_async: bool
    ) -> Pending:
        parts = self.size(axis)
        if parts == 1:
            return Pending(x)
        mine = sizes[self.rank(axis)]
        if len(set(sizes)) > 1:
            pending = self._all_to_all(x, sizes, [mine] * parts, axis=axis, is_async=is_async)
            shape = (parts, mine, *x.shape[1:])
            return pending.then(lambda received: received.view(shape).sum(0))
        self._count(axis, "reduce_scatter", x)
        x, out = x.contiguous(), x.new_empty(mine, *x.shape[1:])
        flight = self._flight(x, axis, "reduce_scatter", is_async=is_async)
        work = _reduce_scatter(out, x, group=self.meshes.group(axis), async_op=is_async)
        return Pending(out, work, sent=x, flight=flight)

    def _flight(self, x: Tensor, axis: str, operation: str, *, is_async: bool) -> FlightLog | None:
        # On a GPU the stream waits and the host's clock says nothing.
        if not (is_async and x.device.type == "cpu" and self.telemetry.wants(Flight)):
            return None
        return FlightLog(axis, operation, self.telemetry)

    def start_shift(self, x: Tensor, *, shape: Sequence[int], axis: str) -> Pending:
        """Begin to send `x` to the next rank of `axis`, the last one's next being the first.

        Collective over `axis`; an empty tensor is not sent.

        Args:
            x: Unchanged until the returned handle has been waited for.
            shape: Of the previous rank's tensor.
            axis: The ring.
        """
        parts, rank, group = self.size(axis), self.rank(axis), self.meshes.group(axis)
        x, received = x.contiguous(), x.new_empty(shape)
        following, previous = (
            dist.get_global_rank(group, (rank + step) % parts) for step in (1, -1)
        )
        ops = [
            dist.P2POp(move, tensor, peer, group)
            for move, tensor, peer in (
                (dist.isend, x, following),
                (dist.irecv, received, previous),
            )
            if tensor.numel()
        ]
        self._count(axis, "shift", x)
        works = Works(dist.batch_isend_irecv(ops) if ops else ())
        return Pending(received, works, sent=x)

    def gather_from_all(self, x: Tensor) -> Tensor:
        """The tensors of all ranks of the world, stacked. Collective over the world."""
        out = x.new_empty(dist.get_world_size(), *x.shape)
        self._count("world", "all_gather", x)
        _all_gather(out.flatten(0, 1) if x.dim() else out, x.contiguous())
        return out

    def start_send(self, tensors: Sequence[Tensor], *, to: int, axis: str) -> Works:
        """Begin to send contiguous `tensors` to the rank `to` of `axis`, which receives as many.

        They stay unchanged until the returned handle says so. Messages between two ranks arrive in
        the order in which both sides name them.
        """
        for tensor in tensors:
            self._count(axis, "send", tensor)
        return self._messages(dist.isend, tensors, to, axis)

    def start_receive(self, buffers: Sequence[Tensor], *, source: int, axis: str) -> Works:
        """Begin to receive into `buffers` what the rank `source` of `axis` sends."""
        return self._messages(dist.irecv, buffers, source, axis)

    def swap(self, own: Tensor, theirs: Tensor, *, peer: int, axis: str) -> None:
        """Send `own` to the rank `peer` of `axis` and receive `theirs` from it. Both call it."""
        group = self.meshes.group(axis)
        other = dist.get_global_rank(group, peer)
        self._count(axis, "swap", own)
        ops = [
            dist.P2POp(dist.isend, own.contiguous(), other, group),
            dist.P2POp(dist.irecv, theirs, other, group),
        ]
        Works(dist.batch_isend_irecv(ops)).wait()

    def _messages(self, move: Any, tensors: Sequence[Tensor], rank: int, axis: str) -> Works:
        group = self.meshes.group(axis)
        peer = dist.get_global_rank(group, rank)
        ops = [dist.P2POp(move, tensor, peer, group) for tensor in tensors if tensor.numel()]
        return Works(dist.batch_isend_irecv(ops) if ops else ())

    def _count(self, axis: str, operation: str, x: Tensor) -> None:
        if self.telemetry.wants(CollectiveBytes):
            self.telemetry.emit(CollectiveBytes(axis, operation, x.numel() * x.element_size()))


def exchange_rows(
    x: Tensor, comm: Comm, *, send: Sequence[int], recv: Sequence[int], axis: str
) -> Tensor:
    """`Comm.all_to_all_rows` whose gradient is the exchange back."""
    return _paired(
        x,
        lambda rows: comm.all_to_all_rows(rows, send, recv, axis=axis),
        lambda grad: comm.all_to_all_rows(grad, recv, send, axis=axis),
    )


def gather_rows(x: Tensor, comm: Comm, sizes: Sequence[int], axis: str) -> Tensor:
    """All-gather whose consumers differ between peers: the gradient is a reduce-scatter."""
    return _paired(
        x,
        lambda rows: comm.all_gather_rows(rows, sizes, axis=axis),
        lambda grad: comm.reduce_scatter_rows(grad, sizes, axis=axis),
    )


def reduce_scatter_rows(x: Tensor, comm: Comm, sizes: Sequence[int], axis: str) -> Tensor:
    """Sum of the peers' partial rows, scattered: the transpose of `gather_rows`."""
    return _paired(
        x,
        lambda rows: comm.reduce_scatter_rows(rows, sizes, axis=axis),
        lambda grad: comm.all_gather_rows(grad, sizes, axis=axis),
    )


def split_rows(x: Tensor, comm: Comm, sizes: Sequence[int], axis: str) -> Tensor:
    """This rank's rows of a tensor that is equal on all peers: the gradient is gathered."""
    return _paired(
        x,
        lambda rows: _own(rows, comm, sizes, axis),
        lambda grad: comm.all_gather_rows(grad, sizes, axis=axis),
    )


def gather_replicated(x: Tensor, comm: Comm, sizes: Sequence[int], axis: str) -> Tensor:
    """All-gather whose consumer is the same on all peers: the gradient is a slice, no sum."""
    return _paired(
        x,
        lambda rows: comm.all_gather_rows(rows, sizes, axis=axis),
        lambda grad: _own(grad, comm, sizes, axis),
    )


def sum_over(x: Tensor, comm: Comm, axis: str) -> Tensor:
    """Sum of partial results for a consumer that is equal on all peers: gradients pass."""
    return _paired(x, lambda part: comm.all_reduce(part, axis=axis), lambda grad: grad)


def sum_gradient_over(x: Tensor, comm: Comm, axis: str) -> Tensor:
    """Identity before consumers with different shards of a weight: gradients are summed."""
    return _paired(
        x, lambda part: part.view_as(part), lambda grad: comm.all_reduce(grad, axis=axis)
    )


def _own(x: Tensor, comm: Comm, sizes: Sequence[int], axis: str) -> Tensor:
    return x.split(list(sizes))[comm.rank(axis)].contiguous()


def _paired(
    x: Tensor, run: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]
) -> Tensor:
    out: Tensor = _Paired.apply(x, run, transpose)
    return out


class _Paired(Function):
    """A collective and the one that its gradient goes through."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        run: Callable[[Tensor], Tensor],
        transpose: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.transpose = transpose
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None
