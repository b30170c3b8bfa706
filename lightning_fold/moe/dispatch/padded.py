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
from lightning_fold.moe.dispatch.base import SegmentedDispatcher, Trip
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing
from lightning_fold.topology.in_flight import Hop


@dataclass(frozen=True)
class Slots:
    """Which row takes which slot.

    Attributes:
        order_Z: int64, routed row in every slot; N for an empty one.
        inverse_N: int64, slot of every routed row; Z for one that is dropped.
        top_k: K.
        num_experts: E.
    """

    order_Z: Tensor
    inverse_N: Tensor
    top_k: int
    num_experts: int


class PaddedDispatcher(SegmentedDispatcher[Slots, Slots]):
    """Even exchanges over ep and etp, for any degrees. No host synchronisation."""

    def begin(self, routing: Routing) -> Slots:
        """See `SegmentedDispatcher`; local, `routing.slots` is equal on all peers."""
        return fill_slots(routing)

    def pack(self, x_TD: Tensor, routing: Routing, begun: Slots) -> tuple[Tensor, ...]:
        """A row and its weight for every slot."""
        order, inverse = begun.order_Z, begun.inverse_N
        weights_N1 = routing.weights_TK.reshape(-1, 1)
        rows = permute(x_TD, order, inverse, routing.top_k, holes=True)
        return rows, permute(weights_N1, order, inverse, 1, holes=True)

    def settle(self, routing: Routing, begun: Slots) -> Trip[Slots]:
        """See `SegmentedDispatcher`; local, all sizes are known."""
        ep, rows = self.comm.size("ep"), begun.order_Z.shape[0]
        even = [rows // ep] * ep
        hops = self.route_of(
            Hop("exchange", "ep", even, even), Hop("gather", "etp", [rows] * self.comm.size("etp"))
        )
        return Trip(hops, None, begun)

    def arrive(self, parts: tuple[Tensor, ...], trip: Trip[Slots]) -> ExpertRows:
        """See `SegmentedDispatcher`."""
        source_SD, weights_S1 = parts
        slots = trip.state
        local = slots.num_experts // self.comm.size("ep")
        each = slots.order_Z.shape[0] // slots.num_experts
        origin_R = _by_expert(source_SD, local, slots=each)
        return ExpertRows(
            source_SD=source_SD,
            origin_R=origin_R,
            weights_R=weights_S1.squeeze(1).index_select(0, origin_R),
            counts_e=origin_R.new_full((local,), origin_R.shape[0] // local),
            sizes=[origin_R.shape[0] // local] * local,
        )

    def bring_home(self, rows_ND: Tensor, trip: Trip[Slots]) -> Tensor:
        """See `SegmentedDispatcher`."""
        slots = trip.state
        return unpermute(rows_ND, slots.order_Z, slots.inverse_N, slots.top_k, holes=True)


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
    return Slots(order_Z, inverse_N, routing.top_k, routing.num_experts)


def _by_expert(source_SD: Tensor, local: int, *, slots: int) -> Tensor:
    """Arrived rows by expert; they arrive by etp peer, then source, then expert, then slot."""
    places = torch.arange(source_SD.shape[0], device=source_SD.device)
    return places.view(-1, local, slots).transpose(0, 1).reshape(-1)
