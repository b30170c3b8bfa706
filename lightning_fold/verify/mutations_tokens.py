"""Faults of dispatch and capacity, as patches for `mutations`."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from torch import Tensor

from lightning_fold.moe import capacity
from lightning_fold.moe.dispatch import dedup
from lightning_fold.moe.routing import Routing


def dropped_still_computed() -> contextlib.AbstractContextManager[Any]:
    """What is dropped travels and is computed like the rest."""
    return mock.patch.object(Routing, "kept_index_TK", lambda self: self.index_TK)


def capacity_of_all_ranks() -> contextlib.AbstractContextManager[Any]:
    """Each rank leaves room for the tokens of all dp ranks, but only its own arrive."""
    room = capacity.Capacity._room

    def larger(self: Any, counts: Tensor, routing: Routing) -> Tensor:
        return room(self, counts * 4, routing)

    return mock.patch.object(capacity.Capacity, "_room", larger)


def token_sent_twice() -> contextlib.AbstractContextManager[Any]:
    """A token goes to a rank once for each of its experts there, with all of them each time."""

    def repeated(routing: Routing, parts: int) -> dedup.Destinations:
        rank_TK = routing.kept_index_TK() // (routing.num_experts // parts)
        rank_TK = rank_TK.sort(1).values
        rows_P = (rank_TK.unsqueeze(-1) == rank_TK.new_tensor(range(parts))).sum((0, 1))
        return dedup.Destinations(rank_TK, rows_P)

    return mock.patch.object(dedup, "destinations", repeated)
