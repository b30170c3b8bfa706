"""Lightning's launcher of subprocesses, whose ranks outlive neither each other nor their launcher.

Owns the child processes of one node. Differs from Lightning's in how a run ends: its observer
kills the launching process within five seconds of a child's end, before any cause is known, and
notices no launcher that died while its children still connect.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_fold.faults.failure import PREFIX
from lightning_fold.faults.watch import GRACE_S

# Process that launched this one; set in its environment, so its children inherit it.
PARENT_VARIABLE = "LIGHTNING_FOLD_PARENT"
POLL_S = 0.5


class RanksLauncher(_SubprocessScriptLauncher):
    """Start the other ranks of a node, or join those that something else started.

    Args:
        environment: Lightning's.
        num_processes: Ranks of a node.
        num_nodes: Nodes.
        on_error: Turns what a run raises into what its caller has to see; sets `is_ending` where
            the ranks cannot go on together.
        on_death: Told the local rank of a child that ended early, and how; False if nobody else
            will act on it.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        *,
        on_error: Callable[[BaseException, Trainer | None], BaseException],
        on_death: Callable[[int, str], bool],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._on_error = on_error
        self._on_death = on_death
        self.is_ending = False

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start what has to be started, then run `function` on this rank."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            os.environ[PARENT_VARIABLE] = str(os.getpid())
            self._call_children_scripts()
            self.is_ending = False
            _in_background(self._observe, "fold-children")
        elif _parent() and not dist.is_initialized():
            _in_background(_leave_with_parent, "fold-parent")
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            shown = self._on_error(error, trainer)
            if shown is error:
                raise
            raise shown from error

    def stop_children(self, *, patience_s: float) -> None:
        """Wait for the children to end, and kill those that do not."""
        self.is_ending = True
        deadline = time.monotonic() + patience_s
        # Listed until they have ended: the command line kills the listed ones before it speaks.
        for process in list(self.procs):
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.procs[:] = []

    def last_words(self, line: str) -> NoReturn:
        """End this process and its children at once, telling why unless the launcher will."""
        self.stop_children(patience_s=0.0)
        if not _parent():
            sys.stdout.flush()
            sys.stderr.write(f"{PREFIX}{line}\n")
            sys.stderr.flush()
        os._exit(1)

    def _observe(self) -> None:
        while True:
            time.sleep(POLL_S)
            codes = [process.poll() for process in self.procs]
            if self.is_ending or all(code == 0 for code in codes):
                return
            local_rank = next((i for i, code in enumerate(codes, start=1) if code), None)
            if local_rank is not None:
                self._child_died(local_rank, codes[local_rank - 1] or 0)
                return

    def _child_died(self, local_rank: int, code: int) -> None:
        how = _ending(code)
        if self._on_death(local_rank, how):
            return
        # Lets this rank's own error, or what the child left for the command line, speak first.
        time.sleep(GRACE_S)
        if not self.is_ending:
            self.last_words(f"local rank {local_rank} {how}; what it wrote is above")


def _in_background(target: Callable[[], None], name: str) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


def _parent() -> bool:
    """Whether the process that launched this one is alive."""
    return os.environ.get(PARENT_VARIABLE) == str(os.getppid())


def _leave_with_parent() -> None:
    """End a rank whose launcher dies before the ranks are connected: nobody would answer it."""
    while not dist.is_initialized():
        if not _parent():
            sys.stderr.write(f"{PREFIX}the launching process ended before the ranks connected\n")
            os._exit(1)
        time.sleep(POLL_S)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"
