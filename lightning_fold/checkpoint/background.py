"""One save at a time in a thread, on copies: training goes on while it writes.

Invariant: at most one save is under way; its failure is raised by the next call; a checkpoint whose
deletion is asked for meanwhile goes only after the save has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lightning_fold.checkpoint.files import remove


class Background:
    """Runs saves behind training."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fold-save")
        self._running: Future[None] | None = None
        self._doomed: list[Path] = []

    def start(self, save: Callable[[], None]) -> None:
        """Run `save` in the thread, after an earlier one has ended.

        Raises:
            Exception: What the earlier one raised.
        """
        self.wait()
        self._running = self._pool.submit(save)

    def remove_after(self, path: Path) -> None:
        """Delete `path` once the save under way has succeeded; now, if there is none."""
        if self._running is None:
            remove(path)
        else:
            self._doomed.append(path)

    def wait(self) -> None:
        """Wait for the save under way and for the deletions that hang on it.

        Raises:
            Exception: What the save raised; nothing is deleted then.
        """
        running, self._running = self._running, None
        doomed, self._doomed = self._doomed, []
        if running is not None:
            running.result()
        for path in doomed:
            remove(path)
