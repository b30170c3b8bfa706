"""When each action of a step began and ended: host clock on CPU, events on a GPU's stream.

Off until somebody asks; then a pair of readings an action, and no synchronisation before `spans`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stamps:
    """Readings of the latest step of one rank.

    Args:
        device: Where the actions compute.

    Attributes:
        on: Whether readings are taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = False
        self._device = device
        self._read: list[tuple[Any, Any, Any]] = []
        self._origin: Any = None

    def start(self) -> None:
        """Forget the step before; times count from here."""
        self._read.clear()
        if self.on:
            self._origin = self._now()

    @contextmanager
    def of(self, action: Any) -> Iterator[None]:
        """Around what an action computes, without what it waits for."""
        if not self.on:
            yield
            return
        begin = self._now()
        yield
        self._read.append((action, begin, self._now()))

    def readings(self) -> list[tuple[Any, float, float]]:
        """Actions of the latest step with start and end, in seconds from `start`. Synchronises."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [(action, self._since(begin), self._since(end)) for action, begin, end in self._read]

    @property
    def origin_s(self) -> float:
        """Where the latest step's seconds count from, on the host's `perf_counter`; CPU alone."""
        return float(self._origin)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, reading: Any) -> float:
        if self._device.type != "cuda":
            return float(reading - self._origin)
        return float(self._origin.elapsed_time(reading)) / 1000
