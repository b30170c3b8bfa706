"""Compile what a sweep will launch, in several processes, into Triton's cache on disk.

Programs are counted as on an H200 or H100 SXM; on other GPUs a kernel compiles at its first launch
instead, which costs a second each.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from fold_kernels.tables import Tile
from fold_kernels.tune.cases import CALLS, product_cases
from fold_kernels.tune.layers import Layer, draw_inputs
from fold_kernels.tune.machine import Tiles


@dataclass(frozen=True)
class Job:
    """One kernel: the call of a layer that launches it."""

    layer: Layer
    op: str
    variant: str
    tile: Tile


def jobs_of(layers: Sequence[Layer], tiles: Tiles) -> list[Job]:
    """What a sweep over `tiles` launches, each kernel once.

    Triton compiles apart for sizes that 16 divides. Those of real models are such, all but the
    number of experts, which is an argument of `wgrad` alone.
    """
    kinds = {layer.experts % 16 == 0: layer for layer in layers}
    return [
        Job(layer, op, variant, tile)
        for index, layer in enumerate(kinds.values())
        for op, variant in CALLS
        for tile in tiles(op)
        if tile and (index == 0 or op == "wgrad")
    ]


def precompile(jobs: Sequence[Job], *, capability: int, processes: int) -> list[str]:
    """Compile all jobs; returns what failed.

    Call it before this process sets TRITON_INTERPRET: children inherit the environment.
    """
    # Spawned: a child has a Triton of its own, set up for a driver that launches nothing.
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(capability,),
    )
    with pool:
        return [failure for failure in pool.map(compile_job, jobs) if failure]


def compile_job(job: Job) -> str:
    """Compile one kernel in this process; what went wrong, or nothing."""
    from fold_kernels.aot.driver import compiling

    inputs = draw_inputs(job.layer, "uniform", torch.device("meta"))
    wanted = job.op, job.variant
    (case,) = (c for c in product_cases(inputs) if (c.op, c.variant) == wanted)
    try:
        with compiling(f"{job.op}_kernel"):
            case.kernel(job.tile)
    # Triton raises exceptions of many kinds, none of which may end the others.
    except Exception as error:
        return f"{job.op} {job.variant} {job.tile}: {type(error).__name__}"
    return ""


def _begin(capability: int) -> None:
    import triton

    from fold_kernels.aot.driver import activate

    shared = triton.knobs.cache.dir
    activate(capability)
    # What is compiled here is for the parent to find, whatever cache the gate takes for itself.
    triton.knobs.cache.dir = shared
