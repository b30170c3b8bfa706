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

import torch
from torch import Tensor

from fold_kernels.permute import order_of_chunks, permute, sort_by_expert, unpermute
from lightning_fold.moe.dispatch.base import Work
from lightning_fold.moe.dispatch.wire import Splits, Wire
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing
from lightning_fold.topology.comm import Comm


@dataclass(frozen=True)
class SentRows:
    """Everything `combine` needs.

    Attributes:
        order_N: Row of a token that is sent i-th; those that are not sent come last.
        inverse_N: Place of every row in that order.
        splits: Row counts of both exchanges.
        copies: Rows per token, K where each goes to one expert.
    """

    order_N: Tensor
    inverse_N: Tensor
    splits: Splits
    copies: int

    def bring_home(self, rows_SD: Tensor) -> Tensor:
        """Sum the rows of every token; those that were not sent count as zero."""
        missing = self.order_N.shape[0] - rows_SD.shape[0]
        rows_ND = torch.nn.functional.pad(rows_SD, (0, 0, 0, missing)) if missing else rows_SD
        return unpermute(rows_ND, self.order_N, self.inverse_N, self.copies)


class AllToAllDispatcher:
    """Sends every routed row over ep and etp. One host synchronisation a layer, for the sizes.

    The exchange of the sizes overlaps the permutation.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.wire = Wire(comm)

    def dispatch(
        self, x_TD: Tensor, routing: Routing, *, meanwhile: Work | None = None
    ) -> tuple[ExpertRows, SentRows]:
        """See `Dispatcher`. Collective over ep and etp."""
        counts_E = routing.counts_E()
        rows_P = counts_E.view(self.comm.size("ep"), -1).sum(1)
        told = self.wire.start_counts(routing, counts_E, rows_P)
        order_N, inverse_N = sort_by_expert(routing.kept_index_TK())
        relayed = self.wire.relay_counts(told)
        rows_ND = permute(x_TD, order_N, inverse_N, routing.top_k)
        weights_N1 = routing.weights_TK.reshape(-1, 1).index_select(0, order_N)
        counts = self.wire.agree(routing, rows_P, relayed)
        splits, sent = counts.splits, sum(counts.splits.send)
        rows, weights = (self.wire.send(x[:sent], splits) for x in (rows_ND, weights_N1))
        if meanwhile is not None:
            meanwhile()
        # Rows arrive by etp peer, then source, then expert.
        origin_R = order_of_chunks(counts.pairs_PSe.flatten(0, 1), sum(splits.experts))
        arrived = ExpertRows(
            source_SD=self.wire.arrive(rows, splits),
            origin_R=origin_R,
            weights_R=self.wire.arrive(weights, splits).squeeze(1).index_select(0, origin_R),
            counts_e=counts.pairs_PSe.sum((0, 1)),
            sizes=splits.experts,
        )
        return arrived, SentRows(order_N, inverse_N, splits, routing.top_k)

    def combine(self, out_SD: Tensor, state: SentRows) -> Tensor:
        """See `Dispatcher`. Collective over etp and ep."""
        return state.bring_home(self.wire.send_back(out_SD, state.splits))
