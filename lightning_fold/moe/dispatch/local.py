"""Dispatch without communication: every expert is whole on this rank (ep = etp = 1)."""

# Shapes.  T local tokens   K top-k   N = T*K routed rows   E all experts   D model width

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fold_kernels.permute import permute, sort_by_expert, unpermute
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing
from lightning_fold.topology.comm import Comm


@dataclass(frozen=True)
class LocalState:
    """The permutation to undo.

    Attributes:
        order_N: Routed row that comes i-th in expert order.
        inverse_N: Place of every routed row in expert order.
        top_k: K.
    """

    order_N: Tensor
    inverse_N: Tensor
    top_k: int


class LocalDispatcher:
    """Permutes rows into expert order and back. One host synchronisation a layer, for sizes."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, LocalState]:
        """See `Dispatcher`; R = N."""
        order_N, inverse_N = sort_by_expert(routing.index_TK)
        counts_E = routing.counts_E()
        rows = ExpertRows(
            rows_RD=permute(x_TD, order_N, inverse_N, routing.top_k),
            weights_R=routing.weights_TK.reshape(-1).index_select(0, order_N),
            counts_e=counts_E,
            sizes=self.comm.to_host(counts_E, why="group sizes of the expert GEMMs"),
        )
        return rows, LocalState(order_N, inverse_N, routing.top_k)

    def combine(self, rows_RD: Tensor, state: LocalState) -> Tensor:
        """See `Dispatcher`."""
        return unpermute(rows_RD, state.order_N, state.inverse_N, state.top_k)
