"""Dispatch by gathering all tokens of ep x etp; outputs are reduce-scattered back.

Every rank computes its experts' part of every token. Every token travels to all P ranks whatever K
is, so it is cheap for tiny ep only: fewer rows than `all_to_all` where K exceeds P, never fewer
than `dedup`, but no permutation and plain collectives. Tokens that a capacity drops, and padding,
travel with the rest; no expert computes them.
"""

# Shapes.  T local tokens   K top-k   S tokens of all peers, by etp peer and then ep peer
#          E all experts   e local experts   c = E + 2 numbers   D model width

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fold.moe.dispatch.base import Work, expand
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing
from lightning_fold.topology.comm import Comm, gather_rows, reduce_scatter_rows
from lightning_fold.topology.in_flight import RowsInFlight, start_gather


@dataclass(frozen=True)
class Peers:
    """Whose tokens are here, on the host.

    Attributes:
        near: Tokens of each ep peer.
        far: Tokens that each etp peer has gathered over ep.
        experts: Rows of each local expert.
    """

    near: list[int]
    far: list[int]
    experts: list[int]


class AllGatherDispatcher:
    """Gathers over ep, then etp. One host synchronisation a layer, for the token counts."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def dispatch(
        self, x_TD: Tensor, routing: Routing, *, meanwhile: Work | None = None
    ) -> tuple[ExpertRows, Peers]:
        """See `Dispatcher`. Collective over ep and etp."""
        told = self._start_counts(routing)
        first = self.comm.rank("ep") * (routing.num_experts // self.comm.size("ep"))
        index_TK = routing.kept_index_TK().int()
        counts_e, peers = self._agree(routing, told)
        rows, weights, index = (
            self._send(part, peers) for part in (x_TD, routing.weights_TK, index_TK)
        )
        if meanwhile is not None:
            meanwhile()
        arrived = expand(
            self._arrive(rows, peers),
            weights_SK=self._arrive(weights, peers),
            ids_SK=self._arrive(index, peers).long() - first,
            counts_e=counts_e,
            sizes=peers.experts,
        )
        return arrived, peers

    def combine(self, out_SD: Tensor, state: Peers) -> Tensor:
        """See `Dispatcher`. Collective over etp and ep."""
        rows_MD = reduce_scatter_rows(out_SD, self.comm, state.far, "etp")
        return reduce_scatter_rows(rows_MD, self.comm, state.near, "ep")

    def _start_counts(self, routing: Routing) -> Tensor:
        """Tokens, mark of NaN and rows per expert of every peer, [etp, ep, c]."""
        ep, etp = self.comm.size("ep"), self.comm.size("etp")
        counts_E = routing.counts_E()
        tokens = torch.full_like(counts_E[:1], routing.index_TK.shape[0])
        mine = torch.cat([tokens, routing.nan_mark(self.comm.global_rank), counts_E])
        near = self.comm.all_gather_rows(mine.unsqueeze(0), [1] * ep, axis="ep")
        return self.comm.all_gather_rows(near, [ep] * etp, axis="etp").view(etp, ep, -1)

    def _agree(self, routing: Routing, told_QPc: Tensor) -> tuple[Tensor, Peers]:
        etp, ep, _ = told_QPc.shape
        tokens_QP, marks_QP = told_QPc[..., 0], told_QPc[..., 1]
        counts_E = told_QPc[..., 2:].sum((0, 1))
        counts_e = counts_E.view(ep, -1)[self.comm.rank("ep")]
        near_P = tokens_QP[self.comm.rank("etp")]
        parts = [near_P, tokens_QP.sum(1), marks_QP.reshape(-1), counts_e]
        flat = self.comm.to_host(torch.cat(parts), why="token counts of the peers")
        rest = flat[ep + etp :]
        routing.refuse_nan(rest[: ep * etp])
        return counts_e, Peers(flat[:ep], flat[ep : ep + etp], rest[ep * etp :])

    def _send(self, rows: Tensor, peers: Peers) -> RowsInFlight:
        if self.comm.size("ep") == 1:
            return start_gather(rows, self.comm, peers.far, "etp")
        return start_gather(rows, self.comm, peers.near, "ep")

    def _arrive(self, rows: RowsInFlight, peers: Peers) -> Tensor:
        if self.comm.size("ep") == 1:
            return rows.wait()
        return gather_rows(rows.wait(), self.comm, peers.far, "etp")
