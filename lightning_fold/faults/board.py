"""The notice board of the ranks: who failed first, who answers, who was asked to leave.

Owns the keys in the job's store, under one name for each run, and a client connection of its own:
the process groups' connections block. Invariant: of all claims to have failed first, one wins and
every rank reads the same. No call waits for another rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_fold.faults.failure import Failure

_ANSWER = timedelta(seconds=10)


class Store(Protocol):
    """The part of a c10d store that the board needs."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read what is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""

    def add(self, key: str, value: int) -> int:
        """Count."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write if nobody has."""


def connect(host: str, port: int) -> Store:
    """A connection to the job's store.

    Raises:
        RuntimeError: Nobody answers there.
    """
    return TCPStore(host, port, None, False, timeout=_ANSWER, wait_for_workers=False)


class Board:
    """What one rank reads and writes; any thread may.

    Every method raises RuntimeError once the process that holds the store is gone.
    """

    def __init__(self, store: Store, *, run: str, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._store = store
        self._run = run
        # A c10d store serves one caller at a time.
        self._lock = threading.Lock()

    def has_news(self) -> bool:
        """Whether anything below was ever written; one exchange with the store."""
        return self._has("news")

    def claim(self, failure: Failure) -> Failure:
        """Enter a failure as the first, unless there is one, and return the first."""
        with self._lock:
            text = self._store.compare_set(self._key("first"), "", failure.to_json())
        self._ring()
        return Failure.from_json(text)

    def first(self) -> Failure | None:
        """The first failure."""
        text = self._read("first")
        return Failure.from_json(text) if text else None

    def end(self) -> None:
        """Say that this rank tells its end itself."""
        self._write(f"ended/{self.rank}", "1")

    def has_ended(self, rank: int) -> bool:
        """Whether a rank tells its end itself."""
        return self._has(f"ended/{rank}")

    def agree(self) -> None:
        """Count this rank among those whose failure is the first one's."""
        with self._lock:
            self._store.add(self._key("alike"), 1)

    def all_alike(self) -> bool:
        """Whether every rank failed as the first one did."""
        with self._lock:
            return self._store.add(self._key("alike"), 0) == self.world

    def call_roll(self) -> None:
        """Ask every rank what it does."""
        self._write("roll", "1")
        self._ring()

    def roll_called(self) -> bool:
        """Whether somebody asked."""
        return self._has("roll")

    def answer(self, doing: str) -> None:
        """Say what this rank does."""
        self._write(f"here/{self.rank}", doing)

    def answers(self, ranks: Iterable[int]) -> dict[int, str]:
        """What ranks do; one that does not answer is missing."""
        texts = {rank: self._read(f"here/{rank}") for rank in ranks}
        return {rank: text.decode() for rank, text in texts.items() if text}

    def ask_to_leave(self, signum: int) -> None:
        """Hand a signal that reached this rank to rank 0."""
        self._write("leave", str(signum))
        self._ring()

    def asked_to_leave(self) -> int | None:
        """The signal that some rank handed over."""
        text = self._read("leave")
        return int(text) if text else None

    def _ring(self) -> None:
        self._write("news", "1")

    def _key(self, name: str) -> str:
        return f"lightning_fold/{self._run}/{name}"

    def _has(self, name: str) -> bool:
        with self._lock:
            return self._store.check([self._key(name)])

    def _read(self, name: str) -> bytes:
        with self._lock:
            # `get` would wait for a key that is not there.
            known = self._store.check([self._key(name)])
            return self._store.get(self._key(name)) if known else b""

    def _write(self, name: str, value: str) -> None:
        with self._lock:
            self._store.set(self._key(name), value)
