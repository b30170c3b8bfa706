"""One run of the gate, as a table on standard output and an exit status."""

from __future__ import annotations

import triton

from fold_kernels.aot import budget
from fold_kernels.aot.compile import HOPPER, Outcome, compile_all
from fold_kernels.aot.gate import Readout
from fold_kernels.aot.shipped import shipped, smoke

HEADER = f"{'kernel':60} regs spill  shared wgmma tma cp.async"


def run(*, capability: int, write: bool, jobs: int) -> int:
    """Compile, print, and compare with the budget; 1 if something is wrong."""
    target = budget.target_of(triton.__version__, capability)
    print(f"{target}\n{HEADER}")
    cases = shipped() if capability == HOPPER else smoke()
    outcomes = []
    for outcome in compile_all(cases, capability=capability, jobs=jobs):
        outcomes.append(outcome)
        print(line_of(outcome), flush=True)
    wrong = [f"{outcome.name}: {fault}" for outcome in outcomes for fault in outcome.faults]
    if capability == HOPPER:
        wrong += _compare(target, outcomes, write=write)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{target}: {len(outcomes)} kernels, {len(wrong)} faults")
    return 1 if wrong else 0


def line_of(outcome: Outcome) -> str:
    """One line of the table."""
    mark = "  WRONG" if outcome.faults else ""
    return f"{outcome.name:60} {_numbers(outcome.found) if outcome.found else ''}{mark}"


def _numbers(found: Readout) -> str:
    counts = found.opcodes
    return (
        f"{found.registers:4} {found.spilled:5} {found.shared:7} "
        f"{counts['wgmma']:5} {counts['tma']:3} {counts['cp.async']:8}"
    )


def _compare(target: str, outcomes: list[Outcome], *, write: bool) -> list[str]:
    costs = budget.costs_of({o.name: o.found for o in outcomes if o.found is not None})
    if write:
        budget.save(target, costs)
    lines = budget.overruns(costs, budget.load().get(target, {}))
    return [f"{name}: {line}" for name, line in lines.items()]
