"""Dispatch without communication: every expert is whole on this rank (ep = etp = 1)."""

# Shapes.  T local tokens   K top-k   N = T*K routed rows   E all experts   D model width
#          S rows that arrived   R = pairs of a row and an expert

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fold_kernels.permute import sort_by_expert
from lightning_fold.moe.dispatch.base import SegmentedDispatcher, Trip
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing


@dataclass(frozen=True)
class Sorted:
    """The order of all rows, and rows per expert with the mark of NaN, on device."""

    order_N: Tensor
    counts_E: Tensor
    mark: Tensor


@dataclass(frozen=True)
class Here:
    """The kept rows, and how many each expert has."""

    order_R: Tensor
    counts_E: Tensor
    sizes: list[int]


class LocalDispatcher(SegmentedDispatcher[Sorted, Here]):
    """Permutes rows into expert order and back. One host synchronisation a layer, for sizes."""

    def begin(self, routing: Routing) -> Sorted:
        """See `SegmentedDispatcher`; local."""
        order_N, _ = sort_by_expert(routing.kept_index_TK())
        return Sorted(order_N, routing.counts_E(), routing.nan_mark(0))

    def pack(self, x_TD: Tensor, routing: Routing, begun: Sorted) -> tuple[Tensor, ...]:
        """Tokens and routing weights as they are: S = T."""
        return x_TD, routing.weights_TK

    def settle(self, routing: Routing, begun: Sorted) -> Trip[Here]:
        """See `SegmentedDispatcher`; no hop."""
        numbers = torch.cat([begun.counts_E, begun.mark])
        *sizes, mark = self.comm.to_host(numbers, why="group sizes of the expert GEMMs")
        if mark:
            routing.refuse_nan([self.comm.global_rank + 1])
        return Trip((), None, Here(begun.order_N[: sum(sizes)], begun.counts_E, sizes))

    def arrive(self, parts: tuple[Tensor, ...], trip: Trip[Here]) -> ExpertRows:
        """See `SegmentedDispatcher`; R = N less what is dropped."""
        x_TD, weights_TK = parts
        here = trip.state
        return ExpertRows(
            source_SD=x_TD,
            origin_R=here.order_R // weights_TK.shape[1],
            weights_R=weights_TK.reshape(-1).index_select(0, here.order_R),
            counts_e=here.counts_E,
            sizes=here.sizes,
        )

    def bring_home(self, rows_ND: Tensor, trip: Trip[Here]) -> Tensor:
        """A token's experts are all here."""
        return rows_ND
