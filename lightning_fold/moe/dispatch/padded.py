"""Dispatch with static shapes: every rank sends every expert exactly C rows.

Rows that are missing are zeros with weight zero, written by the sender: they add nothing to any
output or gradient. Sizes are known without asking the device, so a layer needs no host
synchronisation and its collectives are even ones. That costs the bytes and the products of the
empty slots. NaN routing weights are not noticed here: noticing would be a synchronisation.
"""

# Shapes.  T local tokens   K top-k   N = T*K routed rows   E all experts   e local experts
#          C slots   Z = E*C rows sent   S = R = e*C*ep*etp rows that arrive   D model width

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fold_kernels.permute import permute, sort_by_expert, unpermute
from lightning_fold.moe.dispatch.base import Work
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing
from lightning_fold.topology.comm import Comm, exchange_rows, gather_rows, reduce_scatter_rows
from lightning_fold.topology.in_flight import RowsInFlight, start_exchange, start_gather


@dataclass(frozen=True)
class Slots:
    """Which row takes which slot.

    Attributes:
        order_Z: int64, routed row in every slot; N for an empty one.
        inverse_N: int64, slot of every routed row; Z for one that is dropped.
        top_k: K.
    """

    order_Z: Tensor
    inverse_N: Tensor
    top_k: int


class PaddedDispatcher:
    """Even exchanges over ep and etp, for any degrees. No host synchronisation."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def dispatch(
        self, x_TD: Tensor, routing: Routing, *, meanwhile: Work | None = None
    ) -> tuple[ExpertRows, Slots]:
        """See `Dispatcher`. Collective over ep and etp; `routing.slots` is equal on all peers."""
        slots = fill_slots(routing)
        weights_N1 = routing.weights_TK.reshape(-1, 1)
        order, inverse = slots.order_Z, slots.inverse_N
        rows = self._send(permute(x_TD, order, inverse, routing.top_k, holes=True))
        weights = self._send(permute(weights_N1, order, inverse, 1, holes=True))
        if meanwhile is not None:
            meanwhile()
        source_SD = self._arrive(rows)
        local = routing.num_experts // self.comm.size("ep")
        origin_R = _by_expert(source_SD, local, slots=order.shape[0] // routing.num_experts)
        arrived = ExpertRows(
            source_SD=source_SD,
            origin_R=origin_R,
            weights_R=self._arrive(weights).squeeze(1).index_select(0, origin_R),
            counts_e=origin_R.new_full((local,), origin_R.shape[0] // local),
            sizes=[origin_R.shape[0] // local] * local,
        )
        return arrived, slots

    def combine(self, out_SD: Tensor, state: Slots) -> Tensor:
        """See `Dispatcher`. Collective over etp and ep."""
        sent = self._even(state.order_Z.shape[0])
        each = self._gathered(state.order_Z.shape[0])
        rows = reduce_scatter_rows(out_SD, self.comm, each, "etp")
        rows = exchange_rows(rows, self.comm, send=sent, recv=sent, axis="ep")
        return unpermute(rows, state.order_Z, state.inverse_N, state.top_k, holes=True)

    def _send(self, rows: Tensor) -> RowsInFlight:
        if self.comm.size("ep") == 1:
            return start_gather(rows, self.comm, self._gathered(rows.shape[0]), "etp")
        sent = self._even(rows.shape[0])
        return start_exchange(rows, self.comm, send=sent, recv=sent, axis="ep")

    def _arrive(self, rows: RowsInFlight) -> Tensor:
        arrived = rows.wait()
        if self.comm.size("ep") == 1:
            return arrived
        return gather_rows(arrived, self.comm, self._gathered(arrived.shape[0]), "etp")

    def _even(self, rows: int) -> list[int]:
        ep = self.comm.size("ep")
        return [rows // ep] * ep

    def _gathered(self, rows: int) -> list[int]:
        return [rows] * self.comm.size("etp")


def fill_slots(routing: Routing) -> Slots:
    """Give every kept row a slot of its expert, in token order.

    The rows that an expert keeps fit: the capacity that dropped rows is at most `routing.slots`.
    """
    assert routing.slots is not None, "static shapes need a capacity"
    each, ids_N = routing.slots, routing.kept_index_TK().reshape(-1)
    _, place_N = sort_by_expert(ids_N)
    counts_E = routing.counts_E()
    starts = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0))
    slot_N = ids_N * each + place_N - starts.index_select(0, ids_N)
    size = routing.num_experts * each
    inverse_N = slot_N.where(ids_N < routing.num_experts, size)
    rows_N = torch.arange(ids_N.shape[0], device=ids_N.device)
    empty = ids_N.new_full((size + 1,), ids_N.shape[0])
    order_Z = empty.scatter(0, inverse_N, rows_N)[:size]
    return Slots(order_Z, inverse_N, routing.top_k)


def _by_expert(source_SD: Tensor, local: int, *, slots: int) -> Tensor:
    """Arrived rows by expert; they arrive by etp peer, then source, then expert, then slot."""
    places = torch.arange(source_SD.shape[0], device=source_SD.device)
    return places.view(-1, local, slots).transpose(0, 1).reshape(-1)
