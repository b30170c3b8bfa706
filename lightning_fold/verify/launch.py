"""Start the ranks of one world and the reference process; end all of them when one fails or hangs.

Invariant: no call outlives its time-out, and no rank outlives its call. A failure is told by the
rank that failed first, not by the peers whose connections it closed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_fold.verify import cases as cases_file
from lightning_fold.verify.plan import Case, reference_requests
from lightning_fold.verify.worker import RankJob, rank_main, run_folded

START_TIMEOUT, CASE_TIMEOUT, GRACE = 180.0, 90.0, 3.0
# What a rank says when a peer went away: never the cause.
_SYMPTOM = re.compile(r"closed by peer|[Cc]onnection reset|[Bb]roken pipe|[Cc]onnection refused")


@dataclass(frozen=True)
class WorldRun:
    """How the ranks of one world ended.

    Attributes:
        failure: Why they ended early; None after a complete run.
        failed_case: Key of the case that ran then.
    """

    failure: str | None = None
    failed_case: str | None = None


def run_reference(cases: Sequence[Case], folder: Path, *, timeout: float = 600.0) -> None:
    """Run the single-process model for all `cases`, in a process that imports nothing from here.

    Raises:
        RuntimeError: It failed; the message ends with its traceback.
    """
    folder.mkdir(parents=True, exist_ok=True)
    requests = folder / "requests.json"
    requests.write_text(json.dumps(reference_requests(cases)))
    script = Path(__file__).with_name("reference.py")
    done = subprocess.run(
        [sys.executable, str(script), str(requests), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the reference process failed\n{_tail(done.stderr)}")


def run_world(
    world: int,
    cases: Sequence[Case],
    folder: Path,
    *,
    case_timeout: float = CASE_TIMEOUT,
    run: Callable[[Case, Path], None] = run_folded,
) -> WorldRun:
    """Run `cases` on `world` ranks, started once, and wait for their end.

    Args:
        world: Number of ranks.
        cases: Cases of that world; results lie in `folder` under each case's key.
        folder: Made if missing.
        case_timeout: Seconds that one case may take.
        run: What a rank does with a case.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    # Ranks are forked from a process that has the long imports behind it.
    context.set_forkserver_preload([rank_main.__module__, *cases_file.PRELOAD])
    # One store a case, held here as torchrun's agent does: groups made again under the same store
    # would meet their own stale keys, and a port that nobody holds may be taken when it is needed.
    stores = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in cases]
    ports = [store.port for store in stores]
    jobs = [
        RankJob(rank, world, ports, folder, list(cases), case_timeout, run) for rank in range(world)
    ]
    ranks = [context.Process(target=rank_main, args=(job,), daemon=True) for job in jobs]
    try:
        with _no_main_module():
            for rank in ranks:
                rank.start()
        in_time = _wait(ranks, time.monotonic() + START_TIMEOUT + case_timeout * len(cases))
        exits = [rank.exitcode for rank in ranks]
    finally:
        _kill(ranks)
    if in_time and not any(exits):
        return WorldRun()
    return _explain(folder, exits)


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Ranks need nothing of the program that starts them; they would import it again, each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _wait(ranks: Sequence[ForkServerProcess], deadline: float) -> bool:
    """Wait until all ranks end or one fails; False when time is up."""
    while running := [rank for rank in ranks if rank.exitcode is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        connection.wait([rank.sentinel for rank in running], timeout=min(left, 1.0))
        if any(rank.exitcode for rank in ranks):
            # Peers that failed for the same reason write their tracebacks too.
            connection.wait([rank.sentinel for rank in running], timeout=GRACE)
            time.sleep(GRACE / 3)
            return True
    return True


def _kill(ranks: Sequence[ForkServerProcess]) -> None:
    for rank in ranks:
        if rank.pid is not None:
            rank.kill()
            rank.join()


def _explain(folder: Path, exits: Sequence[int | None]) -> WorldRun:
    """The story of the rank that failed first; peers' closed connections are no cause."""
    errors = []
    for rank in range(len(exits)):
        path = folder / f"rank{rank}.error"
        if path.exists():
            error = json.loads(path.read_text())
            symptom = bool(_SYMPTOM.search(error["text"]))
            errors.append((symptom, error["time"], rank, error))
    silent = [
        rank
        for rank, code in enumerate(exits)
        if code and not (folder / f"rank{rank}.error").exists()
    ]
    if errors and (not min(errors)[0] or not silent):
        _, _, rank, error = min(errors)
        return WorldRun(f"rank {rank} failed\n{_tail(error['text'])}", error["case"])
    shown = silent or range(len(exits))
    stories = [f"rank {rank} {_ending(exits[rank])}\n{_log(folder, rank)}" for rank in shown]
    return WorldRun("\n".join(stories), _running_case(folder, next(iter(shown))))


def _ending(code: int | None) -> str:
    if code is None:
        return "was still running when time was up"
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def _log(folder: Path, rank: int) -> str:
    path = folder / f"rank{rank}.log"
    text = path.read_text() if path.exists() else ""
    _, mark, stack = text.rpartition("Timeout (")
    # A dump of a hung rank lists the innermost call first.
    return "\n".join((mark + stack).splitlines()[:12]) if mark else _tail(text)


def _running_case(folder: Path, rank: int) -> str | None:
    path = folder / f"rank{rank}.log"
    text = path.read_text() if path.exists() else ""
    started = re.findall(r"^case (\S+)$", text, flags=re.MULTILINE)
    return started[-1] if started else None


def _tail(text: str, lines: int = 25) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
