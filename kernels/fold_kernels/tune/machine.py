"""Where a sweep runs, how long it may take, and the clock it reads."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import torch

from fold_kernels.tables import BUILT_IN, CANDIDATES, Tile
from fold_kernels.tune.cases import Run

# Tiles of rows that walk the columns together, tried for the quickest tile.
GROUPS = (4, 16)
# What was not timed on a GPU belongs to no GPU.
DRY_CAPABILITY = (0, 0)
Tiles = Callable[[str], Sequence[Tile | None]]


@dataclass(frozen=True)
class Budget:
    """Seconds that may pass from its start."""

    seconds: float
    start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that remain."""
        return self.start + self.seconds - time.monotonic()

    def part(self, share: float) -> Budget:
        """A budget that ends when `share` of this one has passed."""
        return replace(self, seconds=self.seconds * share)


@dataclass(frozen=True)
class Machine:
    """Where a sweep runs.

    Attributes:
        device: Of the operands.
        capability: Under which a table is written.
        clock: Median seconds of a call, after one that warms up.
        tiles: What is tried for an op.
        groups: Of the quickest tile.
    """

    device: torch.device
    capability: tuple[int, int]
    clock: Callable[[Run], float]
    tiles: Tiles
    groups: Sequence[int] = GROUPS


def tiles_of(op: str) -> Sequence[Tile | None]:
    """Every tile that is known to compile for an op; None alone where it has no tiles."""
    built_in = [tile for key, tile in BUILT_IN.items() if key.partition("/")[0] == op]
    return list(dict.fromkeys([*built_in, *CANDIDATES.get(op, ())])) or [None]


def on_gpu() -> Machine:
    """The GPU of this process."""
    return Machine(torch.device("cuda"), torch.cuda.get_device_capability(), cuda_seconds, tiles_of)


def in_interpreter() -> Machine:
    """Triton's interpreter, on one tile an op: times mean nothing, all else is as on a GPU."""
    return Machine(
        torch.device("cpu"),
        DRY_CAPABILITY,
        host_seconds,
        lambda op: tiles_of(op)[:1],
        groups=(4,),
    )


def cuda_seconds(run: Run) -> float:
    """Median of up to 20 calls, by events, within a twentieth of a second."""
    run()
    (first,) = _events(run, 1)
    return statistics.median(_events(run, min(20, max(3, int(0.05 / max(first, 1e-6))))))


def host_seconds(run: Run) -> float:
    """One call on the host's clock."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def origin_of(machine: Machine) -> dict[str, str]:
    """Where and when a table was made."""
    on_cuda = machine.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_cuda else "interpreter, nothing was timed",
        "torch": torch.__version__,
        "triton": version("triton"),
        "date": time.strftime("%Y-%m-%d"),
    }


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it, new memory is NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        # Wanted is the filling alone, not the operations that have no deterministic form.
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def _events(run: Run, repeats: int) -> list[float]:
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, stop in pairs:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e-3 for start, stop in pairs]
