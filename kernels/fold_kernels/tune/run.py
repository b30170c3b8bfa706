"""One sweep from the first kernel to the table."""

from __future__ import annotations

import os
import time
from functools import partial

from fold_kernels.measured import Table
from fold_kernels.tune.compile import jobs_of, precompile
from fold_kernels.tune.layers import ROUTINGS, Layer
from fold_kernels.tune.machine import Budget, Machine, in_interpreter, on_gpu, origin_of
from fold_kernels.tune.report import LEGEND, lines_of
from fold_kernels.tune.sweep import Timing, sweep_experts, sweep_products, table_from

# Of the budget, for the products; the rest is for whole experts and what is around them.
PRODUCTS = 0.7


def tune(layers: list[Layer], budget: Budget, *, dry: bool) -> Table:
    """Sweep, print what was found and return it.

    Args:
        layers: Whose sizes the table is for.
        budget: Of all parts together; what does not fit is not measured.
        dry: Whether Triton's interpreter stands in for a GPU.
    """
    machine = _interpreter() if dry else _gpu(layers)
    # The routing that leaves an expert empty is the one to prove.
    routings = ROUTINGS[-1:] if dry else ROUTINGS
    table = partial(table_from, capability=machine.capability, origin=origin_of(machine))
    timings: list[Timing] = []
    timings.extend(sweep_products(layers, routings, machine, budget.part(PRODUCTS)))
    timings.extend(sweep_experts(layers, routings, machine, budget, table(timings)))
    print("\n".join([*lines_of(timings), LEGEND]))
    return table(timings)


def _interpreter() -> Machine:
    from fold_kernels.interpreter import install

    install()
    return in_interpreter()


def _gpu(layers: list[Layer]) -> Machine:
    machine = on_gpu()
    major, minor = machine.capability
    jobs = jobs_of(layers, machine.tiles)
    start = time.monotonic()
    failed = precompile(jobs, capability=10 * major + minor, processes=os.cpu_count() or 1)
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - start:.0f} s", *failed, sep="\n  ")
    return machine
