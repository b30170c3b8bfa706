"""Collectives by axis name: the one place where this package talks to c10d on the data path.

Owns tracing, byte counting and host synchronisation. FSDP2, DTensor and DCP issue their own
collectives beside it. Every rank of an axis enters every call, also with zero rows; an axis of
size one issues nothing. Uneven exchanges use `all_to_all_single`, the only uneven form that Gloo
has; even ones use the tensor collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_fold.telemetry import CollectiveBytes, Telemetry
from lightning_fold.topology.meshes import Meshes

# torch 2.13 renames the tensor collectives and warns about the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
        if self.size(axis) == 1:
            return x
        self._count(axis, "all_to_all", x)
        out = x.new_empty(sum(recv), *x.shape[1:])
        dist.all_to_all_single(
            out, x.contiguous(), list(recv), list(send), group=self.meshes.group(axis)
        )
        return out

    def all_gather_rows(self, x: Tensor, sizes: Sequence[int], *, axis: str) -> Tensor:
        """Concatenate every peer's rows; peer i holds `sizes[i]`. Collective over `axis`."""
        parts = self.size(axis)
        if parts == 1:
            return x
        if len(set(sizes)) > 1:
            copies = x.repeat(parts, *[1] * (x.dim() - 1))
            return self.all_to_all_rows(copies, [x.shape[0]] * parts, sizes, axis=axis)
        self._count(axis, "all_gather", x)
        out = x.new_empty(sum(sizes), *x.shape[1:])
        _all_gather(out, x.contiguous(), group=self.meshes.group(axis))
        return out

    def reduce_scatter_rows(self, x: Tensor, sizes: Sequence[int], *, axis: str) -> Tensor:
        """Sum over peers, each keeping its own `sizes[rank]` rows. Collective over `axis`."""
        parts = self.size(axis)
        if parts == 1:
            return x
        mine = sizes[self.rank(axis)]
        if len(set(sizes)) > 1:
            received = self.all_to_all_rows(x, sizes, [mine] * parts, axis=axis)
            return received.view(parts, mine, *x.shape[1:]).sum(0)
        self._count(axis, "reduce_scatter", x)
        out = x.new_empty(mine, *x.shape[1:])
        _reduce_scatter(out, x.contiguous(), group=self.meshes.group(axis))
        return out

    def _count(self, axis: str, operation: str, x: Tensor) -> None:
        if self.telemetry.wants(CollectiveBytes):
            self.telemetry.emit(CollectiveBytes(axis, operation, x.numel() * x.element_size()))


class ExchangeRows(Function):
    """`Comm.all_to_all_rows` whose gradient is the exchange back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Comm, send: list[int], recv: list[int], axis: str
    ) -> Tensor:
        """Exchange."""
        ctx.args = comm, send, recv, axis
        return comm.all_to_all_rows(x, send, recv, axis=axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Exchange back."""
        comm, send, recv, axis = ctx.args
        return comm.all_to_all_rows(grad, recv, send, axis=axis), None, None, None, None


class GatherRows(Function):
    """All-gather whose consumers differ between peers: the gradient is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, sizes: list[int], axis: str) -> Tensor:
        """Gather."""
        ctx.args = comm, sizes, axis
        return comm.all_gather_rows(x, sizes, axis=axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Sum the peers' gradients of this rank's rows."""
        comm, sizes, axis = ctx.args
        return comm.reduce_scatter_rows(grad, sizes, axis=axis), None, None, None


class ReduceScatterRows(Function):
    """Sum of the peers' partial rows, scattered: the transpose of `GatherRows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, sizes: list[int], axis: str) -> Tensor:
        """Reduce and scatter."""
        ctx.args = comm, sizes, axis
        return comm.reduce_scatter_rows(x, sizes, axis=axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Gather."""
        comm, sizes, axis = ctx.args
        return comm.all_gather_rows(grad, sizes, axis=axis), None, None, None


class SplitRows(Function):
    """This rank's rows of a tensor that is equal on all peers: the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, sizes: list[int], axis: str) -> Tensor:
        """Slice."""
        ctx.args = comm, sizes, axis
        return x.split(sizes)[comm.rank(axis)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Gather."""
        comm, sizes, axis = ctx.args
        return comm.all_gather_rows(grad, sizes, axis=axis), None, None, None


class GatherReplicated(Function):
    """All-gather whose consumer is the same on all peers: the gradient is a slice, no sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, sizes: list[int], axis: str) -> Tensor:
        """Gather."""
        ctx.args = comm, sizes, axis
        return comm.all_gather_rows(x, sizes, axis=axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Slice."""
        comm, sizes, axis = ctx.args
        return grad.split(sizes)[comm.rank(axis)].contiguous(), None, None, None


class SumOver(Function):
    """Sum of partial results for a consumer that is equal on all peers: gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, axis: str) -> Tensor:
        """Sum."""
        return comm.all_reduce(x, axis=axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Pass."""
        return grad, None, None


class SumGradientOver(Function):
    """Identity before consumers with different shards of a weight: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, axis: str) -> Tensor:
        """Pass."""
        ctx.args = comm, axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Sum."""
        comm, axis = ctx.args
        return comm.all_reduce(grad, axis=axis), None, None
