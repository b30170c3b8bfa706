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

# Shapes.  T local tokens   K top-k   N = T*K rows sent   M rows after the ep exchange
#          R = S rows after the etp gather, each for one expert
#          E all experts   e local experts   D model width

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fold_kernels.permute import permute, sort_by_expert, unpermute
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.routing import Routing
from lightning_fold.topology.comm import Comm, exchange_rows, gather_rows, reduce_scatter_rows


@dataclass(frozen=True)
class Splits:
    """How many rows go where, on the host.

    Attributes:
        send: Rows to each ep peer.
        recv: Rows from each ep peer.
        gathered: Rows that each etp peer holds after the ep exchange.
        experts: Rows of each local expert after the etp gather.
    """

    send: list[int]
    recv: list[int]
    gathered: list[int]
    experts: list[int]


@dataclass(frozen=True)
class AllToAllState:
    """Everything `combine` needs.

    Attributes:
        order_N: Routed row that is sent i-th.
        inverse_N: Place of every routed row in the send order.
        splits: Row counts of both exchanges.
        top_k: K.
    """

    order_N: Tensor
    inverse_N: Tensor
    splits: Splits
    top_k: int


class AllToAllDispatcher:
    """Dropless dispatch over ep and etp. One host synchronisation a layer, for the split sizes."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, AllToAllState]:
        """See `Dispatcher`. Collective over ep and etp."""
        order_N, inverse_N = sort_by_expert(routing.index_TK)
        counts_PSe, counts_e, splits = self._exchange_counts(routing)
        rows_ND = permute(x_TD, order_N, inverse_N, routing.top_k)
        weights_N1 = routing.weights_TK.reshape(-1, 1).index_select(0, order_N)
        origin_R = _expert_order(counts_PSe, sum(splits.experts))
        rows = ExpertRows(
            source_SD=self._send(rows_ND, splits),
            origin_R=origin_R,
            weights_R=self._send(weights_N1, splits).squeeze(1).index_select(0, origin_R),
            counts_e=counts_e,
            sizes=splits.experts,
        )
        return rows, AllToAllState(order_N, inverse_N, splits, routing.top_k)

    def combine(self, out_SD: Tensor, state: AllToAllState) -> Tensor:
        """See `Dispatcher`. Collective over etp and ep."""
        splits = state.splits
        rows_MD = reduce_scatter_rows(out_SD, self.comm, splits.gathered, "etp")
        rows_ND = exchange_rows(rows_MD, self.comm, send=splits.recv, recv=splits.send, axis="ep")
        return unpermute(rows_ND, state.order_N, state.inverse_N, state.top_k)

    def _send(self, rows: Tensor, splits: Splits) -> Tensor:
        rows = exchange_rows(rows, self.comm, send=splits.send, recv=splits.recv, axis="ep")
        return gather_rows(rows, self.comm, splits.gathered, "etp")

    def _exchange_counts(self, routing: Routing) -> tuple[Tensor, Tensor, Splits]:
        ep, etp = self.comm.size("ep"), self.comm.size("etp")
        sent_Pe = routing.counts_E().view(ep, -1)
        received_Se = self.comm.all_to_all_rows(sent_Pe, [1] * ep, [1] * ep, axis="ep")
        held = self.comm.all_gather_rows(received_Se, [ep] * etp, axis="etp")
        counts_PSe = held.view(etp, ep, -1)
        counts_e = counts_PSe.sum((0, 1))
        # One copy for all four lists: each host synchronisation stalls a GPU's queue.
        parts = [sent_Pe.sum(1), received_Se.sum(1), counts_PSe.sum((1, 2)), counts_e]
        flat = self.comm.to_host(torch.cat(parts), why="split sizes of dispatch and combine")
        cuts = [0, ep, 2 * ep, 2 * ep + etp, len(flat)]
        lists = [flat[a:b] for a, b in pairwise(cuts)]
        return counts_PSe, counts_e, Splits(*lists)


def _expert_order(counts_PSe: Tensor, num_rows: int) -> Tensor:
    """Order of gathered rows by local expert. Rows arrive by etp peer, then source, then expert."""
    chunks, num_local = counts_PSe.reshape(-1), counts_PSe.shape[-1]
    ids = torch.arange(chunks.shape[0], device=chunks.device) % num_local
    # The known output size spares repeat_interleave a host synchronisation.
    order_R, _ = sort_by_expert(ids.repeat_interleave(chunks, output_size=num_rows))
    return order_R
