"""Compile cases in a few processes, and judge them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from fold_kernels.aot.case import Case
from fold_kernels.aot.driver import activate, compiling
from fold_kernels.aot.gate import Expected, Readout, faults
from fold_kernels.aot.readout import read
from fold_kernels.aot.shipped import OPS, ROW_COUNTS

# Instructions and budgets are those of Hopper; others are compiled for as a smoke test.
HOPPER = 90


@dataclass(frozen=True)
class Outcome:
    """One case: what was read, unless it does not compile, and what is wrong."""

    name: str
    found: Readout | None
    faults: list[str]


def compile_all(cases: Iterable[Case], *, capability: int, jobs: int) -> Iterator[Outcome]:
    """Yield the outcome of every case, in order."""
    # Spawned: a fork would take along a Triton that was set up for another driver.
    pool = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=activate, initargs=(capability,)
    )
    with pool:
        yield from pool.map(partial(compile_one, capability=capability), cases)


def compile_one(case: Case, *, capability: int) -> Outcome:
    """Compile and judge one case in this process, where `activate` was called."""
    op = OPS[case.op]
    expected = op.expected(case) if capability == HOPPER else Expected()
    try:
        with compiling(op.kernel) as launches:
            for rows in ROW_COUNTS:
                op.launch(case, rows)
        found = read(launches, opcodes=bool(expected.opcodes))
    # Triton raises exceptions of many kinds, none of which may hide the other cases.
    except Exception as error:
        return Outcome(case.name, None, [f"does not compile: {type(error).__name__}: {error}"])
    return Outcome(case.name, found, faults(found, expected))
