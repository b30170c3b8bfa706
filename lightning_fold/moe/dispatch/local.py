"""Dispatch without communication: every expert is whole on this rank (ep = etp = 1)."""

# Shapes.  T local tokens   K top-k   N = T*K routed rows   E all experts   D model width
#          S rows that arrived   R = pairs of a row and an expert

from __future__ import annotations

import torch
from torch import Tensor

from fold_kernels.permute import sort_by_expert
from lightning_fold.moe.dispatch.base import Work
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing
from lightning_fold.topology.comm import Comm


class LocalDispatcher:
    """Permutes rows into expert order and back. One host synchronisation a layer, for sizes."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def dispatch(
        self, x_TD: Tensor, routing: Routing, *, meanwhile: Work | None = None
    ) -> tuple[ExpertRows, None]:
        """See `Dispatcher`; S = T and R = N less what is dropped. Leaves `meanwhile`."""
        order_N, _ = sort_by_expert(routing.kept_index_TK())
        counts_E = routing.counts_E()
        numbers = torch.cat([counts_E, routing.nan_mark(0)])
        *sizes, mark = self.comm.to_host(numbers, why="group sizes of the expert GEMMs")
        if mark:
            routing.refuse_nan([self.comm.global_rank + 1])
        order_R = order_N[: sum(sizes)]
        rows = ExpertRows(
            source_SD=x_TD,
            origin_R=order_R // routing.top_k,
            weights_R=routing.weights_TK.reshape(-1).index_select(0, order_R),
            counts_e=counts_E,
            sizes=sizes,
        )
        return rows, None

    def combine(self, out_SD: Tensor, state: None) -> Tensor:
        """See `Dispatcher`: a token's experts are all here."""
        return out_SD
