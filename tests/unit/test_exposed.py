"""How MFUMonitor adds up what the transport tells of waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_fold.callbacks import exposed
from lightning_fold.callbacks.exposed import ExposedTime
from lightning_fold.telemetry import Flight, Telemetry
from lightning_fold.topology.comm import Pending
from lightning_fold.topology.flight_log import FlightLog


def trainer_of(telemetry: Telemetry | None) -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(telemetry=telemetry))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(exposed, "perf_counter", lambda: now[0])
    return now


def test_waits_are_a_fraction_of_the_time_and_of_the_flight(clock: list[float]) -> None:
    telemetry, time = Telemetry(), ExposedTime()
    time.start(trainer_of(telemetry))
    telemetry.emit(Flight("ep", "all_to_all", 0.0, 2.0, 0.5))
    telemetry.emit(Flight("etp", "all_gather", 1.0, 3.0, 0.5))
    # Not of experts.
    telemetry.emit(Flight("cp", "all_gather", 0.0, 9.0, 9.0))
    clock[0] += 10.0
    assert time.read() == {
        "fold/exposed_communication": pytest.approx(0.1),
        "fold/hidden_communication": pytest.approx(0.75),
    }


def test_each_reading_is_of_the_time_since_the_last_one(clock: list[float]) -> None:
    telemetry, time = Telemetry(), ExposedTime()
    time.start(trainer_of(telemetry))
    telemetry.emit(Flight("ep", "all_to_all", 0.0, 2.0, 2.0))
    clock[0] += 4.0
    assert time.read()["fold/hidden_communication"] == 0.0
    assert time.read() == {}
    telemetry.emit(Flight("ep", "all_to_all", 0.0, 2.0, 0.0))
    clock[0] += 1.0
    assert time.read() == {"fold/exposed_communication": 0.0, "fold/hidden_communication": 1.0}


def test_nobody_listens_before_the_start_and_after_the_end() -> None:
    telemetry, time = Telemetry(), ExposedTime()
    assert not telemetry.wants(Flight)
    time.start(trainer_of(telemetry))
    time.start(trainer_of(telemetry))
    assert telemetry.wants(Flight)
    time.stop()
    assert not telemetry.wants(Flight)


def test_a_strategy_that_tells_nothing_is_left_alone() -> None:
    time = ExposedTime()
    time.start(trainer_of(None))
    assert time.read() == {}


class Work:
    """A collective that is done when it is waited for."""

    def wait(self) -> None:
        """Nothing."""

    def get_future(self) -> Any:
        """As Gloo's reduce-scatter."""
        raise NotImplementedError("Work::getFuture not implemented.")


def test_a_collective_without_a_future_lands_where_it_is_waited_for() -> None:
    telemetry, told = Telemetry(), list[Flight]()
    telemetry.subscribe(Flight, told.append)
    rows = torch.zeros(2, 3)
    pending = Pending(rows, Work(), flight=FlightLog("etp", "reduce_scatter", telemetry))
    assert pending.wait() is rows
    (flight,) = told
    assert flight.issued_s <= flight.arrived_s
    assert flight.arrived_s - flight.issued_s >= flight.waited_s
