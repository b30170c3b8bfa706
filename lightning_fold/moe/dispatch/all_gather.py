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

from lightning_fold.moe.dispatch.base import SegmentedDispatcher, Trip, expand
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing
from lightning_fold.topology.comm import Pending
from lightning_fold.topology.in_flight import Hop


@dataclass(frozen=True)
class Peers:
    """Whose tokens are here, on the host unless said.

    Attributes:
        near: Tokens of each ep peer.
        far: Tokens that each etp peer has gathered over ep.
        experts: Rows of each local expert.
        counts_e: The same on device.
        first: The first local expert.
    """

    near: list[int]
    far: list[int]
    experts: list[int]
    counts_e: Tensor
    first: int


class AllGatherDispatcher(SegmentedDispatcher[Pending, Peers]):
    """Gathers over ep, then etp. One host synchronisation a layer, for the token counts."""

    def begin(self, routing: Routing) -> Pending:
        """Tokens, mark of NaN and rows per expert of the ep peers, [ep, c]. Collective."""
        counts_E = routing.counts_E()
        tokens = torch.full_like(counts_E[:1], routing.index_TK.shape[0])
        mine = torch.cat([tokens, routing.nan_mark(self.comm.global_rank), counts_E])
        ones = [1] * self.comm.size("ep")
        return self.comm.start_all_gather_rows(mine.unsqueeze(0), ones, axis="ep", tells=True)

    def pack(self, x_TD: Tensor, routing: Routing, begun: Pending) -> tuple[Tensor, ...]:
        """Tokens, weights and experts, dropped ones numbered E."""
        return x_TD, routing.weights_TK, routing.kept_index_TK().int()

    def settle(self, routing: Routing, begun: Pending) -> Trip[Peers]:
        """See `SegmentedDispatcher`. Collective over etp."""
        ep, etp = self.comm.size("ep"), self.comm.size("etp")
        far = self.comm.start_all_gather_rows(begun.wait(), [ep] * etp, axis="etp", tells=True)
        peers = self._agree(routing, far.wait().view(etp, ep, -1))
        hops = self.route_of(Hop("gather", "ep", peers.near), Hop("gather", "etp", peers.far))
        return Trip(hops, None, peers)

    def arrive(self, parts: tuple[Tensor, ...], trip: Trip[Peers]) -> ExpertRows:
        """See `SegmentedDispatcher`."""
        source_SD, weights_SK, index_SK = parts
        peers = trip.state
        ids_SK = index_SK.long() - peers.first
        return expand(source_SD, ids_SK, weights_SK, counts_e=peers.counts_e, sizes=peers.experts)

    def bring_home(self, rows_ND: Tensor, trip: Trip[Peers]) -> Tensor:
        """The scatter has summed them."""
        return rows_ND

    def _agree(self, routing: Routing, told_QPc: Tensor) -> Peers:
        etp, ep, _ = told_QPc.shape
        tokens_QP, marks_QP = told_QPc[..., 0], told_QPc[..., 1]
        counts_E = told_QPc[..., 2:].sum((0, 1))
        counts_e = counts_E.view(ep, -1)[self.comm.rank("ep")]
        near_P = tokens_QP[self.comm.rank("etp")]
        parts = [near_P, tokens_QP.sum(1), marks_QP.reshape(-1), counts_e]
        flat = self.comm.to_host(torch.cat(parts), why="token counts of the peers")
        rest = flat[ep + etp :]
        routing.refuse_nan(rest[: ep * etp])
        first = self.comm.rank("ep") * (routing.num_experts // ep)
        return Peers(flat[:ep], flat[ep : ep + etp], rest[ep * etp :], counts_e, first)
