"""Agreement among the ranks that save or load together: all succeed, or all fail with one message.

A rank that fails alone would leave its peers waiting in the next collective; so each step that may
fail ends in one exchange of its outcome. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; what was there before is untouched."""


@dataclass(frozen=True)
class Peers:
    """The ranks of one process group; without a group, one process on its own.

    Attributes:
        group: Every rank of it makes the same calls in the same order.
    """

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group) if self.group is not None else 1

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes what all ranks share."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Value of every rank, on every rank. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_or_none(self, action: Callable[[], Result], *, what: str) -> list[Result]:
        """Run `action` on every rank and return all results, or raise on all ranks alike.

        Collective. Results travel between ranks, so they are small.

        Args:
            action: What this rank does.
            what: What it is called in the message, "saving X" for example.

        Raises:
            ValueError: The action refused its input with a ValueError on some rank.
            CheckpointError: It failed otherwise.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        outcomes = self.gather((result, _describe(error)))
        failures = [(rank, told) for rank, (_, told) in enumerate(outcomes) if told is not None]
        if failures:
            rank, (refused, text) = failures[0]
            if refused:
                raise ValueError(text) from error
            failed = rank if self.group is None else dist.get_global_rank(self.group, rank)
            raise CheckpointError(f"{what} failed on rank {failed}: {text}") from error
        return [value for value, _ in outcomes]

    def on_writer(self, action: Callable[[], Result], *, what: str) -> Result:
        """Run `action` on the writing rank; its result on every rank. Collective.

        Raises:
            ValueError: As `all_or_none`.
            CheckpointError: As `all_or_none`.
        """
        done: list[Any] = self.all_or_none(lambda: action() if self.is_writer else None, what=what)
        result: Result = done[0]
        return result


def last_line(error: BaseException) -> str:
    """The line of an error that says most: DCP and torch put the cause last."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _describe(error: Exception | None) -> tuple[bool, str] | None:
    if error is None:
        return None
    if isinstance(error, ValueError):
        return True, str(error)
    if isinstance(error, OSError):
        return False, error.strerror or str(error)
    return False, f"{type(error).__name__}: {last_line(error)}"
