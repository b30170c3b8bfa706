"""The way of rows between ranks that `all_to_all` and `dedup` share: ep first, then etp.

Owns the agreement on row counts, and the hops that follow from it. Knows nothing of tokens: what a
row is and in which order rows leave is the dispatcher's.
"""

# Shapes.  P ep ranks   e local experts   N rows sent   M rows after the ep exchange
#          S rows after the etp gather   c numbers told

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_fold.moe.routing import Routing
from lightning_fold.topology.comm import Comm, Pending
from lightning_fold.topology.in_flight import Hop


@dataclass(frozen=True)
class Splits:
    """How many rows go where, on the host.

    Attributes:
        send: Rows to each ep peer.
        recv: Rows from each ep peer.
        gathered: Rows that each etp peer holds after the ep exchange.
        experts: Pairs of a row and each local expert after the etp gather.
    """

    send: list[int]
    recv: list[int]
    gathered: list[int]
    experts: list[int]


@dataclass(frozen=True)
class Counts:
    """What the ranks have told each other.

    Attributes:
        pairs_PSe: int64, pairs from every source, by etp peer, ep peer and local expert.
        splits: The host's part of it.
    """

    pairs_PSe: Tensor
    splits: Splits


class Wire:
    """Moves rows over ep and etp. Every rank of both axes calls every method, in the same order."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def start_counts(self, routing: Routing, counts_E: Tensor, rows_P: Tensor) -> Pending:
        """Tell every ep peer what it will get: pairs per expert, rows, and the mark of NaN."""
        ep = self.comm.size("ep")
        mark_P1 = routing.nan_mark(self.comm.global_rank).expand(ep).unsqueeze(1)
        told_Pc = torch.cat([counts_E.view(ep, -1), rows_P.unsqueeze(1), mark_P1], 1)
        return self.comm.start_all_to_all_rows(told_Pc, [1] * ep, [1] * ep, axis="ep", tells=True)

    def agree(self, routing: Routing, rows_P: Tensor, told: Pending) -> Counts:
        """Read what the ep peers have told, on the host: the only synchronisation of a layer.

        Collective over etp, whose peers tell each other first.

        Raises:
            ValueError: Routing weights of a rank of ep x etp are NaN; all of them raise alike.
        """
        ep, etp = self.comm.size("ep"), self.comm.size("etp")
        relayed = self.comm.start_all_gather_rows(told.wait(), [ep] * etp, axis="etp", tells=True)
        told_PSc = relayed.wait().view(etp, ep, -1)
        pairs_PSe, rows_PS, marks_PS = told_PSc[..., :-2], told_PSc[..., -2], told_PSc[..., -1]
        received_S = rows_PS[self.comm.rank("etp")]
        # One copy for all lists: each host synchronisation stalls a GPU's queue.
        parts = [rows_P, received_S, rows_PS.sum(1), pairs_PSe.sum((0, 1)), marks_PS.reshape(-1)]
        flat = self.comm.to_host(torch.cat(parts), why="split sizes of dispatch and combine")
        cuts = [0, *accumulate(part.shape[0] for part in parts)]
        *lists, marks = [flat[a:b] for a, b in pairwise(cuts)]
        routing.refuse_nan(marks)
        return Counts(pairs_PSe, Splits(*lists))

    def hops(self, splits: Splits) -> tuple[Hop, ...]:
        """The way of rows to this rank's experts: they end by etp peer and then ep peer."""
        return (
            Hop("exchange", "ep", splits.send, splits.recv),
            Hop("gather", "etp", splits.gathered),
        )
