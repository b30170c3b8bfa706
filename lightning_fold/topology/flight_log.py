"""When a collective left, arrived, and how long it was waited for, on the host's clock."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import Any

from lightning_fold.telemetry import Flight, Telemetry


class FlightLog:
    """Emits a `Flight` when a collective has been waited for.

    Args:
        axis: Whose ranks take part.
        operation: Its name.
        telemetry: Where to.
    """

    def __init__(self, axis: str, operation: str, telemetry: Telemetry) -> None:
        self._name, self._telemetry = (axis, operation), telemetry
        self._issued_s = perf_counter()
        self._arrived_s: float | None = None

    def watch(self, work: Any) -> None:
        """Note when `work` is done, where it can tell: a reduce-scatter of Gloo has no future."""
        with suppress(RuntimeError):
            work.get_future().then(self._land)

    def wait(self, work: Any) -> None:
        """Wait for `work`, and tell."""
        began = perf_counter()
        work.wait()
        ended = perf_counter()
        # The callback may be a moment late; the wait's own end bounds the arrival.
        arrived = min(self._arrived_s or ended, ended)
        self._telemetry.emit(Flight(*self._name, self._issued_s, arrived, ended - began))

    def _land(self, _: Any) -> None:
        self._arrived_s = perf_counter()
