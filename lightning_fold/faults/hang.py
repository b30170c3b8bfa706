"""Collectives that do not end, seen from Python's stacks: which, over which group, for how long.

Owns the rule by which a stack is a wait for peers. Samples only; the data path is not touched, so
that collectives of FSDP2, DCP and Lightning are seen as well as this package's. Work that a CUDA
stream waits for leaves no thread waiting here: NCCL's own watchdog tells of it, by the same names.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch.distributed as dist

from lightning_fold.faults.failure import activity

# A call of c10d blocks in one of these modules ...
_WAITING = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp.",
    "torch.distributed.tensor.",
    "lightning_fold.topology.comm",
)
# ... below which torch has wrappers.
_WRAPPERS = ("torch._ops", "torch.utils._contextlib", "torch.distributed.c10d_logger")


@dataclass(frozen=True)
class Wait:
    """A collective that a thread waits in.

    Attributes:
        operation: Name of the function.
        group: Name of the group, an axis or several with the same ranks, or `world`.
        ranks: Its global ranks; empty where they are not known.
        caller: Code that waits.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    caller: str

    def __str__(self) -> str:
        ranks = f" (ranks {' '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"{self.operation} over {self.group}{ranks}, called from {self.caller}"


@dataclass
class _Seat:
    call: tuple[int, int]
    seconds: float = 0.0
    frame: FrameType | None = None

    def holds(self, frame: FrameType) -> bool:
        return self.call == _call(frame) and self.frame in (None, frame)


class Seats:
    """How long threads have sat in one and the same call of a collective."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._seats: dict[int, _Seat] = {}

    def sample(self, stacks: Mapping[int, FrameType], *, elapsed_s: float) -> FrameType | None:
        """Note where threads are; return a frame that has waited for the limit.

        Args:
            stacks: Innermost frame by thread.
            elapsed_s: Seconds since the previous sample.
        """
        waits = {thread: waiting_frame(frame) for thread, frame in stacks.items()}
        before, self._seats = self._seats, {}
        late = None
        for thread, frame in waits.items():
            if frame is None:
                continue
            seat = before.get(thread)
            if seat is None or not seat.holds(frame):
                self._seats[thread] = _Seat(_call(frame))
                continue
            self._seats[thread] = seat
            seat.seconds += elapsed_s
            if seat.seconds >= self.limit_s / 10:
                # An address may be used again by the next call, a frame that is held may not.
                # Held only after a while, since a frame keeps its tensors.
                seat.frame = frame
            if seat.seconds >= self.limit_s:
                late = frame
        return late


def waiting_frame(frame: FrameType | None) -> FrameType | None:
    """The function of c10d that a thread waits in, if it does; takes its innermost frame."""
    while frame is not None and _module(frame) in _WRAPPERS:
        frame = frame.f_back
    return frame if frame is not None and _module(frame).startswith(_WAITING) else None


def wait_of(frame: FrameType | None) -> Wait | None:
    """Describe the collective that a stack is in; takes its innermost frame."""
    innermost = waiting_frame(frame)
    if innermost is None:
        return None
    group = _group(innermost)
    return Wait(
        operation=innermost.f_code.co_name,
        group=_axis(innermost) or _name(group),
        ranks=tuple(dist.get_process_group_ranks(group)) if group else (),
        caller=activity(_caller(innermost)),
    )


def wait_behind(trace: TracebackType | None) -> Wait | None:
    """Describe the collective that raised; takes the exception's traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return wait_of(frames[-1]) if frames else None


def _call(frame: FrameType) -> tuple[int, int]:
    return id(frame), frame.f_lasti


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _group(innermost: FrameType) -> dist.ProcessGroup | None:
    """The group that a call names, or the world where it may name one and does not."""
    may_name = False
    for frame in _outward(innermost):
        if not _module(frame).startswith(("torch.", _WAITING[-1])):
            break
        names = frame.f_locals
        may_name |= "group" in names or "process_group" in names
        for value in list(names.values()):
            if isinstance(value, dist.ProcessGroup):
                return value
    return dist.group.WORLD if may_name else None


def _axis(innermost: FrameType) -> str | None:
    """The axis that a call through `Comm` names; its group may be the world."""
    for frame in _outward(innermost):
        if _module(frame) == _WAITING[-1] and isinstance(frame.f_locals.get("axis"), str):
            return str(frame.f_locals["axis"])
        if not _module(frame).startswith(("torch.", _WAITING[-1])):
            break
    return None


def _name(group: dist.ProcessGroup | None) -> str:
    if group is None:
        return "an unknown group"
    if group is dist.group.WORLD:
        return "world"
    return group.group_desc if group.group_desc != "undefined" else "a group"


def _caller(innermost: FrameType) -> FrameType | None:
    return next((f for f in _outward(innermost) if not _module(f).startswith("torch.")), None)
