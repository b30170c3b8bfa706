"""Faults of context parallelism, as patches for `mutations`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from lightning_fold.model import token_layout
from lightning_fold.model.context import parallel, ring


def context_loss_not_summed() -> contextlib.AbstractContextManager[Any]:
    """The loss of this cp rank's tokens alone."""
    return mock.patch.object(parallel, "sum_over", lambda x, comm, axis: x)


def split_before_shift() -> contextlib.AbstractContextManager[Any]:
    """Each rank shifts what it holds: the target at the end of every run is another token's."""

    def split_first(self: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        whole, places = targets(self, arguments), self.tokens.attention.places_s
        own = arguments["labels"].index_select(1, places)
        wrong = whole["labels"].clone()
        wrong[:, places] = nn.functional.pad(own, (0, 1), value=-100)[:, 1:]
        return whole | {"labels": wrong, "shift_labels": wrong}

    owner = parallel.ContextParallel
    targets = owner._targets
    return mock.patch.object(owner, "_targets", split_first)


def positions_from_zero() -> contextlib.AbstractContextManager[Any]:
    """Every rank counts its own places."""

    def counted(self: Any, *args: Any) -> dict[str, Any]:
        own = dict(local(self, *args))
        length = own["input_ids"].shape[1]
        return own | {"position_ids": torch.arange(length)[None]}

    owner = parallel.ContextParallel
    local = owner._local
    return mock.patch.object(owner, "_local", counted)


def no_document_borders() -> contextlib.AbstractContextManager[Any]:
    """Documents of a row see each other."""
    return mock.patch.object(token_layout, "documents_of", return_value=None)


def last_ring_step_left_out() -> contextlib.AbstractContextManager[Any]:
    """Attention never sees the keys that arrive last."""

    def fewer(self: Any, step: int) -> Iterator[Any]:
        yield from pairs(self, step) if step + 1 < len(self.steps) else ()

    pairs = ring._Tour.pairs
    return mock.patch.object(ring._Tour, "pairs", fewer)
