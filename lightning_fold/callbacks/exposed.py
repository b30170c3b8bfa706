"""How much of the communication of rows is not hidden behind computation.

Adds up what the transport tells of each collective that it starts and waits for later: when it
left, when it was there, and how long its rank stood still for it. Told on CPUs alone.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_fold.callbacks.run import sum_over_world
from lightning_fold.telemetry import Flight, Telemetry

_AXES = ("ep", "etp")
"""Those of experts; what attention exchanges is not counted."""


class ExposedTime:
    """Sums of one rank since the last reading."""

    def __init__(self) -> None:
        self._telemetry: Telemetry | None = None
        self._forget()

    def start(self, trainer: Trainer) -> None:
        """Listen to a run; to none whose strategy tells nothing."""
        self.stop()
        telemetry: Any = getattr(trainer.strategy, "telemetry", None)
        if isinstance(telemetry, Telemetry):
            telemetry.subscribe(Flight, self._note)
            self._telemetry = telemetry
        self._forget()

    def stop(self) -> None:
        """Listen no more."""
        if self._telemetry is not None:
            self._telemetry.unsubscribe(Flight, self._note)
            self._telemetry = None

    def read(self) -> dict[str, float]:
        """What to log of the time since the last reading, over all ranks; empty without flights.

        Collective over all ranks of a run whose strategy tells.
        """
        if self._telemetry is None:
            return {}
        own = [self._waited_s, self._flown_s, perf_counter() - self._since]
        self._forget()
        waited, flown, passed = sum_over_world(torch.tensor(own, dtype=torch.float64)).tolist()
        if flown <= 0:
            return {}
        return {
            "fold/exposed_communication": waited / passed,
            "fold/hidden_communication": max(0.0, 1 - waited / flown),
        }

    def _note(self, flight: Flight) -> None:
        if flight.axis in _AXES:
            self._waited_s += flight.waited_s
            self._flown_s += flight.arrived_s - flight.issued_s

    def _forget(self) -> None:
        self._waited_s = self._flown_s = 0.0
        self._since = perf_counter()
