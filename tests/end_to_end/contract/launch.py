"""Start the worker as one process per rank, watch it, and collect what its scenarios returned.

A crash or hang of one rank ends the run with that rank's error; the scenarios after it run in a
fresh start, so one fault costs one scenario. Nothing here imports torch.distributed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Four cold starts on two busy cores take a minute and more.
HANG_AFTER_S = 240.0


@dataclass
class Run:
    """Results by scenario id: one dictionary a rank, or the text of the error that ended it."""

    world: int
    folder: Path
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def __call__(self, scenario: str, rank: int = 0) -> dict[str, Any]:
        """Result of one rank; the scenario's error fails the test that asks."""
        return self.ranks(scenario)[rank]

    def ranks(self, scenario: str) -> list[dict[str, Any]]:
        """Results of all ranks."""
        if scenario in self.errors:
            raise AssertionError(f"{scenario} on {self.world} ranks:\n{self.errors[scenario]}")
        return self.results[scenario]


def run_scenarios(world: int, scenarios: list[str], folder: Path) -> Run:
    """Run `scenarios` on `world` ranks; world 0 is one process of plain Lightning."""
    run = Run(world, folder)
    folder.mkdir(parents=True, exist_ok=True)
    waiting = list(scenarios)
    while waiting:
        failure = _run_once(world, waiting, folder)
        while waiting and _is_done(folder, waiting[0], max(world, 1)):
            run.results[waiting[0]] = _read(folder, waiting[0], max(world, 1))
            waiting.pop(0)
        if waiting:
            run.errors[waiting.pop(0)] = failure or "the worker ended without a result"
    return run


def _read(folder: Path, scenario: str, count: int) -> list[dict[str, Any]]:
    return [
        torch.load(folder / f"{scenario}.{rank}.pt", weights_only=True) for rank in range(count)
    ]


def _is_done(folder: Path, scenario: str, count: int) -> bool:
    return all((folder / f"{scenario}.{rank}.pt").exists() for rank in range(count))


def _run_once(world: int, scenarios: list[str], folder: Path) -> str | None:
    """One start of all ranks; returns the error of the rank that failed first."""
    port = _free_port()
    logs = [folder / f"rank{rank}.log" for rank in range(max(world, 1))]
    processes = [
        _start(world, rank, port=port, scenarios=scenarios, folder=folder, log=log)
        for rank, log in enumerate(logs)
    ]
    try:
        return _watch(processes, logs, folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(
    world: int, rank: int, *, port: int, scenarios: list[str], folder: Path, log: Path
) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    if world:
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        env |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "contract"}
    command = [sys.executable, "-m", "contract.worker", str(world), str(folder), *scenarios]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out)


def _watch(processes: list[subprocess.Popen[bytes]], logs: list[Path], folder: Path) -> str | None:
    last, seen = time.monotonic(), -1
    while any(process.poll() is None for process in processes):
        for process, log in zip(processes, logs, strict=True):
            if process.poll():
                # Peers of a failed rank fail too; the first to fail has the cause.
                return f"{log.stem} ended with {process.returncode}:\n{_tail(log)}"
        done = len(list(folder.glob("*.pt")))
        if done != seen:
            last, seen = time.monotonic(), done
        if time.monotonic() - last > HANG_AFTER_S:
            return "hang:\n" + "\n".join(f"{log.stem}: {_tail(log, 10)}" for log in logs)
        time.sleep(0.1)
    failed = [log for process, log in zip(processes, logs, strict=True) if process.returncode]
    return _tail(failed[0]) if failed else None


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
