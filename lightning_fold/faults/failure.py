"""What is known of a rank's end, as one line, and which errors are causes.

Invariant: a lost connection or a time-out is a symptom: some other rank's end is its cause, so it
is told only where no cause is found. Talks to no store and starts nothing.
"""

from __future__ import annotations

import json
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType

PREFIX = "lightning-fold: error: "
_NOTES = "__notes__"
_LONGEST = 600

# What a rank says when a peer went away or did not come: Gloo's, NCCL's and the store's words.
_LOST = re.compile(
    r"closed by peer|[Cc]onnection (?:was )?(?:reset|closed|refused)|[Bb]roken pipe|gloo/transport"
    r"|remote process (?:exited|has terminated)|ncclRemoteError|ncclSystemError|NCCL error"
    r"|failed to recv|Socket closed"
)
_TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout|pair closure")
_OWN = str(Path(__file__).parents[1])
_LIBRARIES = ("site-packages", "dist-packages", "<", sysconfig.get_paths()["stdlib"], _OWN)


@dataclass(frozen=True)
class Failure:
    """The end of one rank.

    Attributes:
        rank: Which.
        what: The sentence that follows "rank N ".
        cause: Type and text of its exception; empty where it left none.
    """

    rank: int
    what: str
    cause: str = ""

    def line(self) -> str:
        """The failure in one line."""
        return f"rank {self.rank} {self.what}"

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """The failure that `to_json` wrote."""
        return cls(**json.loads(text))


class RankFailedError(RuntimeError):
    """Another rank failed first; the message is its story, the cause is what this rank saw."""


def raised(error: BaseException, rank: int, *, when: str) -> Failure:
    """The failure of a rank by an exception; `when` is like "at step 3" or empty."""
    cause, place = summary(error), ""
    for frame, line in reversed(list(_frames(error))):
        if is_users(frame.f_code):
            place = f", in {position(frame.f_code, line)}"
            break
    return Failure(rank, f"failed first{place}{when and f' {when}'}: {cause}", cause)


def summary(error: BaseException) -> str:
    """Type and text of an exception in one line."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_symptom(error: BaseException) -> bool:
    """Whether an exception, or one that it arose from, tells of a lost or late peer."""
    return any(_LOST.search(text) for text in _texts(error)) or is_timeout(error)


def is_timeout(error: BaseException) -> bool:
    """Whether a collective or the store gave up waiting."""
    return any(
        _TIMED_OUT.search(text) and ("gloo" in text or "NCCL" in text or "tore" in text)
        for text in _texts(error)
    )


def is_users(code: CodeType) -> bool:
    """Whether code is the user's: neither Python's, nor a library's, nor this package's."""
    return not any(mark in code.co_filename for mark in _LIBRARIES)


def position(code: CodeType, line: int | None) -> str:
    """Function, file and line as they are told to a user."""
    return f"{code.co_name} ({Path(code.co_filename).name}:{line})"


def activity(frame: FrameType | None) -> str:
    """The innermost function of the user's that a thread is in, else the innermost one."""
    innermost = frame
    while frame is not None:
        if is_users(frame.f_code):
            return position(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return position(innermost.f_code, innermost.f_lineno) if innermost else "no code"


def mark(error: BaseException, failure: Failure) -> None:
    """Let an exception tell which rank failed first; Python 3.11 and later print it."""
    setattr(error, _NOTES, [*getattr(error, _NOTES, []), failure.line()])


def marked(error: BaseException) -> str | None:
    """The line that `mark` left."""
    notes = [note for note in getattr(error, _NOTES, []) if re.match(r"rank \d+ ", note)]
    return notes[-1] if notes else None


def _frames(error: BaseException | None) -> Iterator[tuple[FrameType, int]]:
    """Where an exception and those that it was made of have passed, the innermost last."""
    while error is not None:
        yield from traceback.walk_tb(error.__traceback__)
        error = error.__cause__


def _texts(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)
