"""Dispatch in which a token travels once to an ep rank, however many of its experts are there.

    token with experts 0 1 5, four experts a rank     all_to_all: three rows     dedup: two rows
                                                      0 -> p0  1 -> p0  5 -> p1   0,1 -> p0  5 -> p1

A row travels with K expert numbers of its destination, -1 where it has fewer, and K weights. The
receiver's experts return one sum a row, so the way back carries as few rows; sums over ranks are
made at home. Bytes of rows over those of `all_to_all`: expected distinct ranks of a token over K,
about P/K * (1 - (1 - 1/P)**K), plus 8 bytes a row and choice. It pays from K = 2 on where P is
small: 0.25 for K = 8 over two ranks, 0.45 over four, 0.66 over eight; for K = 2 over eight it is
0.94 and the exchange of numbers and weights costs more than it saves.
"""

# Shapes.  T local tokens   K top-k   P ep ranks   J = min(P, K) most rows of a token
#          N = T*J rows of which U are sent   S rows that arrive   e local experts   D model width

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fold_kernels.permute import permute, sort_by_expert
from lightning_fold.moe.dispatch.all_to_all import (
    Agreed,
    SentRows,
    TellingDispatcher,
    Told,
)
from lightning_fold.moe.dispatch.base import Trip, expand
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing


@dataclass(frozen=True)
class Destinations:
    """To which ep ranks the tokens go.

    Attributes:
        rank_TJ: int64, each rank once and ascending; P where a token goes to fewer than J.
        rows_P: int64, tokens that go to each rank.
    """

    rank_TJ: Tensor
    rows_P: Tensor


@dataclass(frozen=True)
class ToldOnce(Told):
    """`Told`, and where the tokens go."""

    goes: Destinations


class DedupDispatcher(TellingDispatcher[ToldOnce]):
    """Sends a token once to every ep rank that it needs. One host synchronisation a layer."""

    def begin(self, routing: Routing) -> ToldOnce:
        """See `SegmentedDispatcher`. Collective over ep and etp."""
        goes = destinations(routing, self.comm.size("ep"))
        told = self.wire.start_counts(routing, routing.counts_E(), goes.rows_P)
        sent = SentRows(*sort_by_expert(goes.rank_TJ), goes.rank_TJ.shape[1])
        return ToldOnce(sent, goes.rows_P, told, goes)

    def pack(self, x_TD: Tensor, routing: Routing, begun: ToldOnce) -> tuple[Tensor, ...]:
        """Rows, their weights and their experts as the receiver numbers them."""
        sent = begun.sent
        rows_ND, weights_NK = (
            permute(part, sent.order_N, sent.inverse_N, sent.copies)
            for part in (x_TD, routing.weights_TK)
        )
        return rows_ND, weights_NK, self._local_ids(routing, begun.goes, sent.order_N)

    def arrive(self, parts: tuple[Tensor, ...], trip: Trip[Agreed]) -> ExpertRows:
        """See `SegmentedDispatcher`."""
        source_SD, weights_SK, ids_SK = parts
        counts = trip.state.counts
        return expand(
            source_SD,
            ids_SK,
            weights_SK,
            counts_e=counts.pairs_PSe.sum((0, 1)),
            sizes=counts.splits.experts,
        )

    def _local_ids(self, routing: Routing, goes: Destinations, order_N: Tensor) -> Tensor:
        """Experts of every row as its receiver numbers them, int32 [N, K]; -1 for none."""
        each = routing.num_experts // self.comm.size("ep")
        index_NK = routing.kept_index_TK().index_select(0, order_N // goes.rank_TJ.shape[1])
        rank_N1 = goes.rank_TJ.reshape(-1, 1).index_select(0, order_N)
        here = index_NK // each == rank_N1
        return (index_NK - rank_N1 * each).where(here, -1).int()


def destinations(routing: Routing, parts: int) -> Destinations:
    """The ranks of `parts` that hold a kept expert of each token. No host synchronisation."""
    each = routing.num_experts // parts
    # Dropped rows have expert E and so rank P, which sorts last.
    rank_TK = (routing.kept_index_TK() // each).sort(1).values
    leads = rank_TK.diff(dim=1, prepend=torch.full_like(rank_TK[:, :1], -1)) > 0
    leads &= rank_TK < parts
    width = min(parts, rank_TK.shape[1])
    # Places beyond the J-th take what leads nothing, and are cut off.
    slot_TK = (leads.long().cumsum(1) - 1).where(leads, width)
    rank_TJ = torch.full_like(rank_TK[:, :1], parts).repeat(1, width + 1)
    rank_TJ = rank_TJ.scatter(1, slot_TK, rank_TK)[:, :width]
    counts = rank_TK.new_zeros(parts + 1)
    ids = rank_TJ.reshape(-1)
    return Destinations(rank_TJ, counts.scatter_add(0, ids, torch.ones_like(ids))[:-1])
