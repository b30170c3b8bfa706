"""Time every op with every tile beside what it replaces, and make a table of what was found.

A tile counts only after its results were compared, in memory that was poisoned before. A gain is
the worst one of all layers and routings that share a key: a table never makes a call slower that
was measured.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf, log

import torch

from fold_kernels.expert_forms import form_of
from fold_kernels.gpu import launch
from fold_kernels.measured import Table
from fold_kernels.tables import BUILT_IN, Tile
from fold_kernels.tune.cases import (
    Case,
    Results,
    experts_case,
    product_cases,
    row_cases,
)
from fold_kernels.tune.layers import Inputs, Layer, Routing, draw_inputs
from fold_kernels.tune.machine import Budget, Machine, poisoned

# Relative error of a norm. Two results rounded to bf16 differ by 2.4e-3 (kernels.md 3.6), all
# experts by 6e-3; one wrong row in 2**15 makes 5.5e-3.
TOLERANCE, EXPERTS_TOLERANCE = 5e-3, 1e-2
Say = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """One case, timed.

    Attributes:
        layer: Whose sizes it has.
        routing: How rows fall to experts.
        op: As tables spell it.
        variant: Which of the calls that a layer makes.
        kind: Of its shape, as tables spell it.
        flop: Of its product.
        moved: Bytes it must read and write.
        tiles: Seconds by tile, of those that gave right results.
        wrong: What is the matter with the others.
        baselines: Seconds of what it is compared with, see `Case`.
    """

    layer: Layer
    routing: Routing
    op: str
    variant: str
    kind: str
    flop: int
    moved: int
    tiles: Mapping[Tile | None, float]
    wrong: Mapping[Tile | None, str]
    baselines: Mapping[str, float]

    @property
    def key(self) -> str:
        """Of tables."""
        return f"{self.op}/{self.kind}"

    @property
    def seconds(self) -> float:
        """Of the quickest tile; infinite where none is right."""
        return min(self.tiles.values(), default=inf)

    @property
    def tile(self) -> Tile | None:
        """The quickest one."""
        return min(self.tiles, key=lambda tile: self.tiles[tile], default=None)

    def over(self, baseline: str) -> float | None:
        """Time of a baseline over its own; None where it has no such baseline."""
        seconds = self.baselines.get(baseline)
        return None if seconds is None else seconds / self.seconds


def sweep_products(
    layers: Sequence[Layer],
    routings: Iterable[Routing],
    machine: Machine,
    budget: Budget,
    say: Say = print,
) -> Iterator[Timing]:
    """Time all products of all layers, one routing after the other, until the budget is spent."""
    for inputs in _inputs(layers, routings, machine, budget, say):
        for case in product_cases(inputs):
            yield from _timed(inputs, case, machine, say)


def sweep_experts(
    layers: Sequence[Layer],
    routings: Iterable[Routing],
    machine: Machine,
    budget: Budget,
    table: Table,
    say: Say = print,
) -> Iterator[Timing]:
    """Time whole experts with the tiles of `table`, and the ops around them."""
    kernels, grouped = form_of("triton"), form_of("torch_grouped_mm")
    for inputs in _inputs(layers, routings, machine, budget, say):
        with tiles_from(table):
            whole = experts_case(inputs, kernels, grouped)
            yield from _timed(inputs, whole, machine, say, tolerance=EXPERTS_TOLERANCE)
        for case in row_cases(inputs):
            yield from _timed(inputs, case, machine, say)


@contextmanager
def tiles_from(table: Table) -> Iterator[None]:
    """Within it, launches of this process take the tiles of `table`."""
    # Not a ContextVar: on a GPU autograd runs backward in threads of its own.
    names = vars(launch)
    stock = names["table_for"]
    names["table_for"] = lambda _: table
    try:
        yield
    finally:
        names["table_for"] = stock


def time_case(
    inputs: Inputs, case: Case, machine: Machine, *, tolerance: float = TOLERANCE
) -> Timing:
    """Compare and time every tile of a case."""
    attempt = partial(
        _attempt, case, wanted=case.baselines["replaced"](), machine=machine, tolerance=tolerance
    )
    found = {tile: attempt(tile) for tile in machine.tiles(case.op)}
    found |= {tile: attempt(tile) for tile in _regrouped(found, case.op, machine.groups)}
    # The results it compares with may be gigabytes.
    del attempt
    return Timing(
        inputs.layer,
        inputs.routing,
        case.op,
        case.variant,
        case.kind,
        case.flop,
        case.moved,
        _right(found),
        {tile: fault for tile, fault in found.items() if isinstance(fault, str)},
        {name: machine.clock(run) for name, run in case.baselines.items()},
    )


def fault_of(case: Case, tile: Tile | None, wanted: Results, tolerance: float) -> str | None:
    """What is wrong with a kernel's results; None when nothing is."""
    with poisoned():
        got = case.kernel(tile)
    error = error_of(got, wanted)
    return None if error <= tolerance else f"off by {error:.1e}"


def error_of(got: Results, wanted: Results) -> float:
    """Largest relative error of a norm; infinite where integers differ or values are not finite."""
    return max(_error(a, b) for a, b in zip(got, wanted, strict=True))


def table_from(
    timings: Iterable[Timing], *, capability: tuple[int, int], origin: Mapping[str, str]
) -> Table:
    """The quickest tile of every key that was measured, and what it gains at worst."""
    by_key: dict[str, list[Timing]] = defaultdict(list)
    for timing in timings:
        by_key[timing.key].append(timing)
    tiles, gains = dict(BUILT_IN), {}
    for key, group in by_key.items():
        right = set.intersection(*(set(timing.tiles) for timing in group))
        if not right:
            continue
        best = min(right, key=lambda tile: _slowness(tile, group))
        if best is not None:
            tiles[key] = best
        gain = min(timing.baselines["replaced"] / timing.tiles[best] for timing in group)
        gains[key] = float(f"{gain:.3g}")
    return Table(tiles, gains, capability, dict(origin))


def _inputs(
    layers: Sequence[Layer],
    routings: Iterable[Routing],
    machine: Machine,
    budget: Budget,
    say: Say,
) -> Iterator[Inputs]:
    """Operands one after the other, each freed before the next."""
    for routing in routings:
        for layer in layers:
            if budget.left <= 0:
                say(f"the budget is spent before {layer.name}, {routing} routing")
                return
            torch.manual_seed(0)
            say(f"{layer.name}, {routing} routing, {budget.left:.0f} s left")
            yield draw_inputs(layer, routing, machine.device)


def _timed(
    inputs: Inputs, case: Case, machine: Machine, say: Say, *, tolerance: float = TOLERANCE
) -> Iterator[Timing]:
    """One timing; none where the case ends in an error, which must not end the others."""
    try:
        yield time_case(inputs, case, machine, tolerance=tolerance)
    except RuntimeError as error:
        name = f"{inputs.layer.name} {case.op} {case.variant}".strip()
        say(f"not timed: {name}: {error}".splitlines()[0])


def _attempt(
    case: Case, tile: Tile | None, *, wanted: Results, machine: Machine, tolerance: float
) -> float | str:
    """Seconds, or what is wrong."""
    try:
        fault = fault_of(case, tile, wanted, tolerance)
        return machine.clock(lambda: case.kernel(tile)) if fault is None else fault
    # A tile may fail to compile or to launch in many ways; the others still count.
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _right(found: Mapping[Tile | None, float | str]) -> dict[Tile | None, float]:
    return {tile: seconds for tile, seconds in found.items() if isinstance(seconds, float)}


def _regrouped(
    found: Mapping[Tile | None, float | str], op: str, groups: Sequence[int]
) -> list[Tile]:
    """The quickest tile in other orders of the tiles; `wgrad` walks in one order only."""
    seconds = _right(found)
    best = min(seconds, key=lambda tile: seconds[tile], default=None)
    if best is None or op == "wgrad":
        return []
    return [replace(best, group=group) for group in groups if group != best.group]


def _slowness(tile: Tile | None, group: Sequence[Timing]) -> float:
    """Mean logarithm of a tile's time over the quickest one's."""
    return statistics.fmean(log(timing.tiles[tile] / timing.seconds) for timing in group)


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(got, wanted) else inf
    scale = wanted.float().norm()
    error = ((got.float() - wanted.float()).norm() / scale.clamp_min(1e-30)).item()
    # Comparisons with NaN are false: it would pass for no error.
    return error if error < inf else inf
