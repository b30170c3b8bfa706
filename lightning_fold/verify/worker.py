"""One rank's process: its environment, its log, its cases, and the trace it leaves when it fails.

Invariant: a rank that raises, or that sits in one case for too long, ends with a non-zero exit
status and its traceback on disk. Starting and stopping ranks is `launch`'s.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

from lightning_fold.verify.harness import run_case
from lightning_fold.verify.mutations import injected
from lightning_fold.verify.plan import Case


@dataclass(frozen=True)
class RankJob:
    """What one rank is told.

    Attributes:
        rank: Its rank, also the local one.
        world: Number of ranks.
        ports: Where the store of each case listens.
        folder: Takes one folder a case, `rank<r>.log` and `rank<r>.error`.
        cases: Run one after the other.
        case_timeout: Seconds after which a case counts as hung.
        run: Runs one case and writes into its folder.
    """

    rank: int
    world: int
    ports: Sequence[int]
    folder: Path
    cases: Sequence[Case]
    case_timeout: float
    run: Callable[[Case, Path], None]


def rank_main(job: RankJob) -> None:
    """Run all cases of a rank in this process: takes over environment, streams and exit status."""
    log = _redirect_streams(job.folder / f"rank{job.rank}.log")
    os.environ.update(_environment(job))
    torch.set_num_threads(1)
    current = "start-up"
    try:
        for case, port in zip(job.cases, job.ports, strict=True):
            current = case.key
            # A hung rank sits in a collective, where no exception can reach it.
            faulthandler.dump_traceback_later(job.case_timeout, exit=True, file=sys.stderr)
            print(f"case {current}", flush=True)
            os.environ["MASTER_PORT"] = str(port)
            (job.folder / current).mkdir(exist_ok=True)
            job.run(case, job.folder / current)
        faulthandler.cancel_dump_traceback_later()
    except BaseException:
        _write_error(job, current)
        # Not sys.exit: the interpreter's exit handlers would wait for peers that have gone.
        log.flush()
        os._exit(1)


def run_folded(case: Case, folder: Path) -> None:
    """Run one case under its mapping and leave its process groups. Collective over all ranks."""
    with injected(case.mutation):
        run_case(case, folder)
    leave_groups()


def leave_groups() -> None:
    """End the process groups of a mapping, so that another may follow. Collective over all ranks.

    DTensor remembers meshes, by their shape, in what it has worked out for operations. The next
    mapping may have a mesh of equal shape over groups that c10d has named otherwise: their names
    depend on the order in which groups were made.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # A group's threads end with its last reference, and a Trainer is a circle of references: left
    # to themselves, hundreds of threads poll and later cases take ten times as long.
    gc.collect()
    # Private, and the one way to forget. Users have one mapping a process and need it not.
    debug._clear_sharding_prop_cache()


def _environment(job: RankJob) -> dict[str, str]:
    rank, world = str(job.rank), str(job.world)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        # Makes Lightning take the ranks from the environment, as under torchrun.
        "TORCHELASTIC_RUN_ID": "verify",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def _redirect_streams(path: Path) -> TextIO:
    log = path.open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = sys.stderr = log
    return log


def _write_error(job: RankJob, case: str) -> None:
    error = {"time": time.time(), "case": case, "text": traceback.format_exc()}
    (job.folder / f"rank{job.rank}.error").write_text(json.dumps(error))
