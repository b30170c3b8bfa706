"""Faults of pipelines, as patches for `mutations`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from lightning_fold.moe import balance
from lightning_fold.pipeline.executor import Executor
from lightning_fold.steps import microbatches
from lightning_fold.steps.pipelined import PipelinedSteps


def weighed_equally() -> contextlib.AbstractContextManager[Any]:
    """Every microbatch counts the same, however many targets it has."""
    weighed = microbatches.weighed

    def equally(batches: Sequence[Any], rows: Sequence[int] | None = None) -> microbatches.Pieces:
        pieces = weighed(batches, rows)
        return replace(pieces, weights=(1 / len(batches),) * len(batches))

    return mock.patch.object(microbatches, "weighed", equally)


def twins_not_summed() -> contextlib.AbstractContextManager[Any]:
    """Each end keeps its own gradient of a tied weight."""
    return mock.patch.object(PipelinedSteps, "_sum_twins", return_value=None)


def twins_counted_twice() -> contextlib.AbstractContextManager[Any]:
    """The clip norm counts a tied weight on both ends."""
    return mock.patch.object(PipelinedSteps, "counted_elsewhere", return_value=set())


def loads_without_gradient() -> contextlib.AbstractContextManager[Any]:
    """What the routers of earlier stages say arrives, and no gradient goes back."""
    unpacked = balance.unpacked

    def detached(flat: Tensor, *args: Any) -> list[balance.Load]:
        return unpacked(flat.detach(), *args)

    return mock.patch.object(balance, "unpacked", detached)


def last_weights_left_out() -> contextlib.AbstractContextManager[Any]:
    """The delayed weight gradients of the last microbatch are never computed."""
    weights = Executor._weights

    def but_the_last(self: Any, action: Any) -> None:
        key = action.stage_index, action.microbatch_index
        if len(self._flight.later) == 1 and not self._flight.live:
            self._flight.later.pop(key)
        else:
            weights(self, action)

    return mock.patch.object(Executor, "_weights", but_the_last)
