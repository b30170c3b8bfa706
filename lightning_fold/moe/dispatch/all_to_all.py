"""Dispatch by all-to-all-v over ep and all-gather-v over etp; the way back mirrors it.

Where rows are, for ep = 2, etp = 2 on four ranks (rank = 2 * ep_rank + etp_rank):

    token owner           after all-to-all (ep)       after all-gather (etp)
    rank 0  own tokens    experts 0.. of ranks 0, 2   experts 0.. of ranks 0, 2, 1, 3
    rank 1  own tokens    experts 0.. of ranks 1, 3   the same rows in another order
    rank 2  own tokens    experts h.. of ranks 0, 2   experts h.. of ranks 0, 2, 1, 3
    rank 3  own tokens    experts h.. of ranks 1, 3   the same rows in another order

A token leaves from exactly one etp rank, so nothing redundant crosses the ep links; etp peers
hold width shards of the same experts, see the same rows, and their partial outputs are summed on
the way back.
"""

# Shapes.  T local tokens   K top-k   N = T*K routed rows   R = S rows that arrive, each for one
#          expert   P etp peers   s ep peers   e local experts   D model width

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fold_kernels.permute import order_of_chunks, permute, sort_by_expert, unpermute
from lightning_fold.moe.dispatch.base import SegmentedDispatcher, Trip
from lightning_fold.moe.dispatch.wire import Counts, Wire
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing
from lightning_fold.topology.comm import Comm, Pending


@dataclass(frozen=True)
class SentRows:
    """Which row went where.

    Attributes:
        order_N: Row of a token that is sent i-th; those that are not sent come last.
        inverse_N: Place of every row in that order.
        copies: Rows per token, K where each goes to one expert.
    """

    order_N: Tensor
    inverse_N: Tensor
    copies: int

    def bring_home(self, rows_SD: Tensor) -> Tensor:
        """Sum the rows of every token; those that were not sent count as zero."""
        missing = self.order_N.shape[0] - rows_SD.shape[0]
        rows_ND = torch.nn.functional.pad(rows_SD, (0, 0, 0, missing)) if missing else rows_SD
        return unpermute(rows_ND, self.order_N, self.inverse_N, self.copies)


@dataclass(frozen=True)
class Told:
    """What has been sent ahead of the rows.

    Attributes:
        sent: Their order.
        rows_P: Rows to each ep peer.
        told: The ep peers' counts, on their way.
    """

    sent: SentRows
    rows_P: Tensor
    told: Pending


@dataclass(frozen=True)
class Agreed:
    """What both ends know: the order here, and the counts of what arrives."""

    sent: SentRows
    counts: Counts


AnyTold = TypeVar("AnyTold", bound=Told)


class TellingDispatcher(SegmentedDispatcher[AnyTold, Agreed]):
    """What `all_to_all` and `dedup` share: ranks tell what comes, and rows take `Wire`'s way."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self.wire = Wire(comm)

    def settle(self, routing: Routing, begun: AnyTold) -> Trip[Agreed]:
        """See `SegmentedDispatcher`. Collective over ep and etp."""
        counts = self.wire.agree(routing, begun.rows_P, begun.told)
        hops = self.route_of(*self.wire.hops(counts.splits))
        return Trip(hops, sum(counts.splits.send), Agreed(begun.sent, counts))

    def bring_home(self, rows_ND: Tensor, trip: Trip[Agreed]) -> Tensor:
        """See `SegmentedDispatcher`."""
        return trip.state.sent.bring_home(rows_ND)


class AllToAllDispatcher(TellingDispatcher[Told]):
    """Sends every routed row over ep and etp. One host synchronisation a layer, for the sizes."""

    def begin(self, routing: Routing) -> Told:
        """See `SegmentedDispatcher`. Collective over ep and etp."""
        counts_E = routing.counts_E()
        rows_P = counts_E.view(self.comm.size("ep"), -1).sum(1)
        told = self.wire.start_counts(routing, counts_E, rows_P)
        order_N, inverse_N = sort_by_expert(routing.kept_index_TK())
        sent = SentRows(order_N, inverse_N, routing.top_k)
        return Told(sent, rows_P, told)

    def pack(self, x_TD: Tensor, routing: Routing, begun: Told) -> tuple[Tensor, ...]:
        """Rows and the weight of each."""
        sent = begun.sent
        weights_N1 = routing.weights_TK.reshape(-1, 1).index_select(0, sent.order_N)
        return permute(x_TD, sent.order_N, sent.inverse_N, sent.copies), weights_N1

    def arrive(self, parts: tuple[Tensor, ...], trip: Trip[Agreed]) -> ExpertRows:
        """See `SegmentedDispatcher`."""
        source_SD, weights_S1 = parts
        counts = trip.state.counts
        # Rows arrive by etp peer, then source, then expert.
        origin_R = order_of_chunks(counts.pairs_PSe.flatten(0, 1), sum(counts.splits.experts))
        return ExpertRows(
            source_SD=source_SD,
            origin_R=origin_R,
            weights_R=weights_S1.squeeze(1).index_select(0, origin_R),
            counts_e=counts.pairs_PSe.sum((0, 1)),
            sizes=counts.splits.experts,
        )
