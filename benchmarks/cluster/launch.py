"""Run ranks inside the nodes of a cluster, and collect what each of them has found out.

Invariant: no call outlives its time limit, and no rank outlives its call, nor the process that
called. A rank is placed by a table, rank -> node: which axes cross nodes is decided there, since
the ranks of an axis follow from their numbers alone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from benchmarks.cluster.network import WIRE, Node, uninterrupted

PORT = 29511
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
# For the peers of a rank that failed, which may fail for the same reason.
_GRACE_S = 2.0


class RankError(RuntimeError):
    """A rank has failed, or has not come to an end in time."""


@dataclass(frozen=True)
class Placement:
    """Which node each rank runs on, by rank.

    Attributes:
        table: Node of every rank; every node has as many.
    """

    table: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = {node: self.table.count(node) for node in self.table}
        if set(counts) != set(range(len(counts))) or len(set(counts.values())) > 1:
            raise ValueError(
                f"table={self.table} puts {counts} ranks on nodes. Legal: nodes 0, 1, ... with "
                "equally many ranks.  Change `table`."
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(set(self.table))

    @property
    def per_node(self) -> int:
        """Ranks of each node."""
        return len(self.table) // self.nodes

    def local_rank(self, rank: int) -> int:
        """Place of a rank among those of its node."""
        return self.table[:rank].count(self.table[rank])

    def environment(self, rank: int, nodes: Sequence[Node]) -> dict[str, str]:
        """What torchrun would tell a rank; the store is rank 0's."""
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": self.local_rank(rank),
            "WORLD_SIZE": len(self.table),
            "LOCAL_WORLD_SIZE": self.per_node,
            "GROUP_RANK": self.table[rank],
            "MASTER_PORT": PORT,
            "OMP_NUM_THREADS": 1,
        }
        return {name: str(number) for name, number in numbers.items()} | {
            "MASTER_ADDR": nodes[self.table[0]].address,
            "TORCHELASTIC_RUN_ID": "cluster",
            "GLOO_SOCKET_IFNAME": WIRE,
        }


@dataclass(frozen=True)
class RankJob:
    """What one rank needs to become one.

    Attributes:
        main: Returns the rank's result, which JSON can hold.
        arguments: Of `main`, after the folder.
        folder: For results and logs.
        namespace: Of its node.
        environment: Of `Placement.environment`.
    """

    main: Callable[..., Any]
    arguments: tuple[Any, ...]
    folder: Path
    namespace: str
    environment: Mapping[str, str]


def run_ranks(
    nodes: Sequence[Node],
    placement: Placement,
    main: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    limit_s: float,
) -> list[Any]:
    """Call `main(folder, *arguments)` as every rank, and return the results, by rank.

    Args:
        nodes: Of the cluster.
        placement: Where each rank runs.
        main: A function of a module; its result has to be one that JSON can hold.
        arguments: Picklable.
        folder: For results and logs.
        limit_s: For all of it.

    Raises:
        RankError: Says which, and how its log ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    # Ranks are forked from a process that has the long imports behind it.
    context.set_forkserver_preload([main.__module__])
    ranks = []
    for rank, node in enumerate(placement.table):
        environment = placement.environment(rank, nodes)
        job = RankJob(main, arguments, folder, nodes[node].namespace, environment)
        ranks.append(context.Process(target=rank_main, args=(job,), daemon=True))
    try:
        for process in ranks:
            process.start()
        failed = _wait(ranks, time.monotonic() + limit_s)
        if failed is not None:
            story = _ending(ranks[failed].exitcode, limit_s)
            raise RankError(f"rank {failed} {story}\n{_tail(_log(folder, failed))}")
    finally:
        with uninterrupted():
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
    return [json.loads(_result(folder, rank).read_text()) for rank in range(len(ranks))]


def rank_main(job: RankJob) -> None:
    """Move to the rank's node, and be the rank."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(job.environment)
    rank = int(job.environment["RANK"])
    log = os.open(_log(job.folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    enter(job.namespace)
    result = job.main(job.folder, *job.arguments)
    _result(job.folder, rank).write_text(json.dumps(result))


def enter(namespace: str) -> None:
    """Move this thread, and those it will start, into a network namespace."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if _LIBC.setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace} fails")
    finally:
        os.close(handle)


def _die_with_parent() -> None:
    """End this process when the one that called `run_ranks` is gone, without a word."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _wait(ranks: Sequence[ForkServerProcess], deadline: float) -> int | None:
    """Wait for all; the first rank that was seen to fail, or to be still at work too late."""
    while True:
        codes = [process.exitcode for process in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            time.sleep(_GRACE_S)
            return failed
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None)
        running = [process.sentinel for process in ranks if process.exitcode is None]
        connection.wait(running, timeout=0.5)


def _ending(code: int | None, limit_s: float) -> str:
    if code is None:
        return f"was still at work after {limit_s:.0f} s"
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:])
