"""Exchanges of rows as they happen: when each left, when it arrived, how long a rank waited for it.

Watches `topology.Comm` from outside. An exchange that is waited for where it is started is in
flight as long as it is waited for, so nothing of it is hidden. Counts, which are integers, and
routing weights, which are one number a row, are no rows: their axis is called `ep numbers`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.cluster.no_exchange import ROW_AXES
from lightning_fold.pipeline.executor import Executor
from lightning_fold.topology.comm import Comm, Pending

NUMBERS = " numbers"
# What runs a woven pair.
_PAIR = "_pair"
_WAITED = ("all_to_all_rows", "all_gather_rows", "reduce_scatter_rows")


class Exchange(NamedTuple):
    """One exchange on one rank; times are of `time.perf_counter`.

    Attributes:
        axis: `ep` or `etp`; with `NUMBERS` behind it where no rows are sent.
        arrived_s: When the last row was there.
        waited_s: How long the rank did nothing but wait for it.
        woven: Whether it left inside of a woven pair of a forward and a backward.
    """

    axis: str
    issued_s: float
    arrived_s: float
    waited_s: float
    woven: bool

    @property
    def flight_s(self) -> float:
        """Seconds on the way."""
        return self.arrived_s - self.issued_s


@contextmanager
def watched(
    records: list[Exchange], *, is_woven: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Add every exchange over `ROW_AXES` inside to `records` when it has been waited for.

    Args:
        records: Grows.
        is_woven: Asked when an exchange leaves.
    """
    originals = {name: getattr(Comm, name) for name in _WAITED}
    starts = {f"start_{name}": getattr(Comm, f"start_{name}") for name in _WAITED}
    for name, original in originals.items():
        setattr(Comm, name, _timed(original, records, is_woven))
    for name, original in starts.items():
        setattr(Comm, name, _timed_start(original, records, is_woven))
    try:
        yield
    finally:
        for name, original in (originals | starts).items():
            setattr(Comm, name, original)


@contextmanager
def pairs_noted() -> Iterator[Callable[[], bool]]:
    """Tell, while inside, whether an executor runs a forward and a backward at once."""
    running = False
    pair: Any = getattr(Executor, _PAIR, None)

    def noted(executor: Executor, action: Any) -> None:
        nonlocal running
        running = True
        try:
            pair(executor, action)
        finally:
            running = False

    if pair is not None:
        setattr(Executor, _PAIR, noted)
    try:
        yield lambda: running
    finally:
        if pair is not None:
            setattr(Executor, _PAIR, pair)


def hidden_fraction(exchanges: Iterable[Exchange]) -> float | None:
    """How much of the time that rows were on the way nobody waited; None without any."""
    listed = [exchange for exchange in exchanges if not exchange.axis.endswith(NUMBERS)]
    flight = sum(exchange.flight_s for exchange in listed)
    return 1 - sum(exchange.waited_s for exchange in listed) / flight if flight else None


def within(exchanges: Iterable[Exchange], step: Sequence[float]) -> list[Exchange]:
    """Those that left between the start and the end of a step."""
    start, end = step
    return [exchange for exchange in exchanges if start <= exchange.issued_s < end]


def closed_fraction(plain_s: float, woven_s: float, bound_s: float) -> float:
    """How much of the gap between a plain step and one without exchanges weaving has closed.

    NaN where there is no gap, which only a disturbed run shows.
    """
    gap = plain_s - bound_s
    return (plain_s - woven_s) / gap if gap > 0 else math.nan


def _name(x: Tensor, axis: str) -> str:
    is_rows = x.is_floating_point() and x.shape[1:].numel() > 1
    return axis if is_rows else axis + NUMBERS


def _travels(comm: Comm, axis: str) -> bool:
    return axis in ROW_AXES and comm.size(axis) > 1


def _timed(
    original: Callable[..., Tensor], records: list[Exchange], is_woven: Callable[[], bool]
) -> Callable[..., Tensor]:
    def call(comm: Comm, x: Tensor, *sizes: Any, axis: str) -> Tensor:
        start = time.perf_counter()
        out = original(comm, x, *sizes, axis=axis)
        end = time.perf_counter()
        if _travels(comm, axis):
            records.append(Exchange(_name(x, axis), start, end, end - start, is_woven()))
        return out

    return call


def _timed_start(
    original: Callable[..., Pending], records: list[Exchange], is_woven: Callable[[], bool]
) -> Callable[..., Pending]:
    def call(comm: Comm, x: Tensor, *sizes: Any, axis: str, **options: Any) -> Pending:
        issued, woven = time.perf_counter(), is_woven()
        pending = original(comm, x, *sizes, axis=axis, **options)
        if not _travels(comm, axis):
            return pending

        def done(arrived: float, waited: float) -> None:
            records.append(Exchange(_name(x, axis), issued, arrived, waited, woven))

        return pending if pending._work is None else _Timed(pending, done)

    return call


class _Timed(Pending):
    """A collective on the wire that tells when it arrived and how long it was waited for."""

    def __init__(self, pending: Pending, done: Callable[[float, float], None]) -> None:
        # All that the other one is; which is then left alone.
        self.__dict__.update(pending.__dict__)
        self._done = done
        self._arrived: float | None = None
        # Gloo's reduce-scatter has no future: it counts as on the way until it was waited for.
        with suppress(RuntimeError):
            self._work.get_future().add_done_callback(self._arrive)

    def _arrive(self, _: Any) -> None:
        self._arrived = time.perf_counter()

    def wait(self) -> Tensor:
        """The result."""
        start = time.perf_counter()
        out = super().wait()
        end = time.perf_counter()
        # The callback runs in a thread of its own, which may be late.
        self._done(min(self._arrived or end, end), end - start)
        return out
