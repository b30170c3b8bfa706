"""The watch of one rank: a thread that ends the process when its peers cannot go on.

Invariant: a rank that failed is told of by every rank in the words of the board's first failure,
and no rank waits much longer than `GRACE_S` for peers that are gone. The main thread's own
exception goes first; the thread speaks for a main thread that no exception reaches.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_fold.faults.board import Board
from lightning_fold.faults.failure import (
    Failure,
    RankFailedError,
    activity,
    is_symptom,
    is_timeout,
    mark,
    raised,
)
from lightning_fold.faults.hang import Seats, Wait, wait_behind, wait_of

PERIOD_S = 1.0
# How long a symptom waits for its cause, and equal failures for each other.
CAUSE_S, ALIKE_S = 3.0, 2.0
# How long a main thread may take to raise what its peers' end means for it.
GRACE_S = 5.0
_STEP_S = 0.1


@dataclass(frozen=True)
class Host:
    """What a watch knows of its process.

    Attributes:
        when: Words like "at step 3", or none.
        where: What a pipeline's rank does, like "stage 0, microbatch 2, action 0B2", or none.
        signal: The signal that waits for the next batch boundary on this rank.
        take_signal: Accepts one that reached another rank.
        last_words: Ends the process, and those that it launched, with a message.
    """

    when: Callable[[], str]
    where: Callable[[], str]
    signal: Callable[[], int | None]
    take_signal: Callable[[int], None]
    last_words: Callable[[str], NoReturn]


class Watch:
    """Watches over one run of the Trainer, from `start` to `stop`."""

    def __init__(self, board: Board, host: Host, *, timeout_s: float) -> None:
        self._board = board
        self._host = host
        self._timeout_s = timeout_s
        self._seats = Seats(timeout_s)
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fold-watch", daemon=True)
        self._handed_over: int | None = None
        self._answered = False
        self._reported: str | None = None
        self._seen: tuple[Failure, float] | None = None
        self._lost = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * PERIOD_S)

    def explain(self, error: BaseException) -> BaseException:
        """Tell the board of this rank's exception, and return the one that a user has to see.

        That is `error` where every rank failed alike, `error` marked with the rank where this one
        failed first, and a `RankFailedError` naming the first one elsewhere. Takes seconds.
        """
        own = self._own(error)
        try:
            first, alike = self._agree_on_first(own, symptom=is_symptom(error))
        except RuntimeError:
            first, alike = self._seen[0] if self._seen else _store_lost(), False
        self._reported = first.line()
        self._seats = Seats(GRACE_S)
        if alike:
            return error
        _tell_agent(first)
        if first.cause == own.cause and not is_symptom(error):
            mark(error, first)
            return error
        return RankFailedError(first.line())

    def child_died(self, rank: int, how: str) -> None:
        """Enter the end of a process that this one launched, unless it told its end itself."""
        try:
            if not self._board.has_ended(rank):
                here = self._host.where()
                beside = f" (rank {self._board.rank} at {here})" if here else ""
                when = f" {self._host.when()}".rstrip()
                self._board.claim(Failure(rank, f"{how}{when}{beside}"))
        except RuntimeError:
            self._lost = True

    # The main thread's part.

    def _own(self, error: BaseException) -> Failure:
        if is_timeout(error) and (wait := wait_behind(error.__traceback__)):
            return self._late(wait)
        return raised(error, self._board.rank, when=self._host.when())

    def _late(self, wait: Wait) -> Failure:
        what = f"waited {self._timeout_s:g} s in {wait}{self._place()}"
        return Failure(self._board.rank, "; ".join([what, *self._elsewhere(wait)]), what)

    def _elsewhere(self, wait: Wait) -> list[str]:
        """What the peers of a late collective do that do not wait in it."""
        ranks = [rank for rank in wait.ranks if rank != self._board.rank]
        here = f"waits in {wait.operation} over {wait.group} "
        try:
            self._board.call_roll()
            deadline = time.monotonic() + CAUSE_S
            while len(answers := self._board.answers(ranks)) < len(ranks):
                if time.monotonic() > deadline:
                    break
                time.sleep(_STEP_S)
        except RuntimeError:
            return []
        elsewhere = [f"rank {r} {did}" for r, did in answers.items() if not did.startswith(here)]
        return elsewhere + [f"rank {r} does not answer" for r in ranks if r not in answers]

    def _agree_on_first(self, own: Failure, *, symptom: bool) -> tuple[Failure, bool]:
        self._board.end()
        if symptom:
            return self._cause() or self._board.claim(self._silent() or own), False
        first = self._board.claim(own)
        if first.cause != own.cause:
            return first, False
        self._board.agree()
        return first, self._within(ALIKE_S, self._board.all_alike)

    def _cause(self) -> Failure | None:
        self._board.call_roll()
        self._within(CAUSE_S, lambda: self._board.first() is not None)
        return self._board.first()

    def _silent(self) -> Failure | None:
        ranks = range(self._board.world)
        answers = self._board.answers(ranks)
        silent = [r for r in ranks if r not in answers and not self._board.has_ended(r)]
        when = f" {self._host.when()}".rstrip()
        return Failure(silent[0], f"ended without a word (killed?){when}") if silent else None

    @staticmethod
    def _within(seconds: float, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_STEP_S)
        return True

    # The thread's part.

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(PERIOD_S):
            now = time.monotonic()
            # A process that was suspended counts no more than the samples it took.
            self._look(min(now - before, 3 * PERIOD_S))
            before = now

    def _look(self, elapsed_s: float) -> None:
        stacks = {t: f for t, f in sys._current_frames().items() if t != threading.get_ident()}
        late = self._seats.sample(stacks, elapsed_s=elapsed_s)
        try:
            self._relay_signal()
            if self._board.has_news():
                self._read_news()
        except RuntimeError:
            self._lose_store()
        wait = wait_of(late)
        if wait is not None:
            self._end_late(wait)
        if self._seen and self._reported is None and time.monotonic() - self._seen[1] > GRACE_S:
            self._end(self._seen[0].line())

    def _relay_signal(self) -> None:
        signum = self._host.signal()
        if signum and self._handed_over is None:
            self._handed_over = signum
            self._board.ask_to_leave(signum)

    def _read_news(self) -> None:
        if self._board.rank == 0 and (signum := self._board.asked_to_leave()):
            self._host.take_signal(signum)
        if not self._answered and self._board.roll_called():
            self._answered = True
            self._board.answer(self._doing())
        if self._seen is None and (first := self._board.first()):
            self._seen = first, time.monotonic()

    def _doing(self) -> str:
        frame = sys._current_frames().get(self._main or 0)
        wait = wait_of(frame)
        place = self._place()
        return f"waits in {wait}{place}" if wait else f"is in {activity(frame)}{place}"

    def _place(self) -> str:
        where, when = self._host.where(), f" {self._host.when()}".rstrip()
        return f"{when} ({where})" if where else when

    def _lose_store(self) -> None:
        if not self._lost:
            self._lost = True
            # A rank that works on alone may finish; one that waits for peers may not.
            self._seats = Seats(GRACE_S)

    def _end_late(self, wait: Wait) -> None:
        if self._reported or self._lost:
            self._end(self._reported or _store_lost().line())
        try:
            self._board.end()
            first = self._board.claim(self._late(wait))
        except RuntimeError:
            first = _store_lost()
        # Peers read it before this process, which may hold the store, is gone.
        time.sleep(2 * PERIOD_S)
        if self._reported is None:
            self._end(first.line())

    def _end(self, line: str) -> None:
        if not self._stopped.is_set():
            self._host.last_words(line)


def _store_lost() -> Failure:
    return Failure(0, "ended without a word (killed?), or the process that holds the job's store")


def _tell_agent(first: Failure) -> None:
    """Leave the story for torchrun, which tells it last; nothing under other launchers."""
    get_error_handler().record_exception(RankFailedError(first.line()))
