"""What was computed when: spans of a clock or of a run, their figures, and the trace file.

Owns the one form that predictions and measurements share, so that they lie side by side in a
picture and in a trace viewer. Spans are computations alone; what is between them is idle. The
stamps of all ranks must be of one clock. Draws nothing (`picture`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_fold.checkpoint.files import write_whole

KINDS = ("F", "B", "I", "W")
"""Forward; whole backward; backward without, and of, the weight gradients."""

_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Span:
    """One computation of one microbatch on one stage, or a piece of it.

    The two halves of a woven pair are in pieces, those of one between those of the other.

    Attributes:
        rank: Coordinate on the pp axis.
        kind: One of `KINDS`.
        start_s: Seconds, or whatever unit a simulation's costs have.
    """

    rank: int
    stage: int
    microbatch: int
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks.

    Attributes:
        spans: In any order.
    """

    spans: tuple[Span, ...]

    @classmethod
    def merged(cls, parts: Iterable[Iterable[Span]]) -> Timeline:
        """Put the spans that each rank has recorded together; the first one starts at zero."""
        spans = [span for part in parts for span in part]
        origin = min((span.start_s for span in spans), default=0.0)
        return cls(
            tuple(
                Span(s.rank, s.stage, s.microbatch, s.kind, s.start_s - origin, s.end_s - origin)
                for s in sorted(spans, key=lambda s: (s.rank, s.start_s, s.end_s))
            )
        )

    @cached_property
    def by_rank(self) -> dict[int, list[Span]]:
        """Spans of each rank by their start."""
        ranks: defaultdict[int, list[Span]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: (span.rank, span.start_s, span.end_s)):
            ranks[span.rank].append(span)
        return dict(ranks)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)

    @property
    def busy(self) -> dict[int, float]:
        """Time that each rank computes."""
        return {
            rank: sum(span.end_s - span.start_s for span in spans)
            for rank, spans in self.by_rank.items()
        }

    @property
    def bubble(self) -> float:
        """Idle fraction of the ranks' time, 0 to 1."""
        available = self.makespan * len(self.by_rank)
        return 1 - sum(self.busy.values()) / available if available else 0.0

    @property
    def peak_live(self) -> dict[int, int]:
        """Most (stage, microbatch) pairs of a rank between their forward and their backward.

        A B or an I ends them; what a W still needs is counted by `peak_waiting`. Forwards that no
        backward follows are evaluation, which keeps nothing: 0.
        """
        return {rank: _peak(spans, "F", ("B", "I")) for rank, spans in self.by_rank.items()}

    @property
    def peak_live_of_stages(self) -> dict[int, int]:
        """The same for each stage alone."""
        stages: defaultdict[int, list[Span]] = defaultdict(list)
        for spans in self.by_rank.values():
            for span in spans:
                stages[span.stage].append(span)
        return {stage: _peak(stages[stage], "F", ("B", "I")) for stage in sorted(stages)}

    @property
    def peak_waiting(self) -> dict[int, int]:
        """Most pairs of a rank whose weight gradients are put off at once, between I and W."""
        return {rank: _peak(spans, "I", ("W",)) for rank, spans in self.by_rank.items()}

    @property
    def durations(self) -> dict[tuple[int, str, int], float]:
        """Duration of each computation by (stage, kind, microbatch): the sum of its pieces."""
        found: defaultdict[tuple[int, str, int], float] = defaultdict(float)
        for span in self.spans:
            found[span.stage, span.kind, span.microbatch] += span.end_s - span.start_s
        return dict(found)

    @property
    def mean_durations(self) -> dict[tuple[int, str], float]:
        """Mean duration by (stage, kind)."""
        found: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        for (stage, kind, _), duration in self.durations.items():
            found[stage, kind].append(duration)
        return {key: sum(durations) / len(durations) for key, durations in found.items()}

    def order(self, rank: int) -> tuple[str, ...]:
        """What a rank computed, as `Action`s are written: stage, kind, microbatch.

        Each once, where its first piece is.
        """
        written = (f"{s.stage}{s.kind}{s.microbatch}" for s in self.by_rank[rank])
        return tuple(dict.fromkeys(written))


def write_trace(path: Path, timelines: Mapping[str, Timeline]) -> None:
    """Write timelines by name, such as `predicted` and `measured`, for Perfetto or Chrome.

    Each is a process of the trace and each rank a thread in it. The file appears whole or not at
    all; one unit of a timeline is shown as a second.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_label("process_name", process, 0, name))
        for rank, spans in timeline.by_rank.items():
            events.append(_label("thread_name", process, rank, f"rank {rank}"))
            events.extend(_event(process, span) for span in spans)
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    write_whole(path, json.dumps(trace).encode())


def read_trace(path: Path) -> dict[str, Timeline]:
    """Read back what `write_trace` has written.

    Raises:
        ValueError: The file is none of those.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        found: dict[str, list[Span]] = {name: [] for name in names.values()}
        for event in events:
            if event["ph"] == "X":
                found[names[event["pid"]]].append(_span(event))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no trace of a pipeline ({type(error).__name__}: {error})"
        ) from error
    return {name: Timeline(tuple(spans)) for name, spans in found.items()}


def _peak(spans: Iterable[Span], opens: str, closes: tuple[str, ...]) -> int:
    """Most (stage, microbatch) at once from the first piece of one kind to the last of another.

    0 where the second kind never comes.
    """
    found = [(span.kind, (span.stage, span.microbatch)) for span in spans]
    last = {key: number for number, (kind, key) in enumerate(found) if kind in closes}
    live: set[tuple[int, int]] = set()
    peak = 0
    for number, (kind, key) in enumerate(found):
        if kind == opens:
            live.add(key)
            peak = max(peak, len(live))
        elif last.get(key) == number:
            live.discard(key)
    return peak if last else 0


def _label(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _event(process: int, span: Span) -> dict[str, Any]:
    args = asdict(span)
    start, end = args.pop("start_s"), args.pop("end_s")
    return {
        "ph": "X",
        # Viewers colour by name, numbers left out: one colour for each kind.
        "name": f"{span.kind} {span.microbatch}",
        "cat": span.kind,
        "pid": process,
        "tid": span.rank,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": args,
    }


def _span(event: dict[str, Any]) -> Span:
    start, duration = event["ts"] / _MICROSECONDS, event["dur"] / _MICROSECONDS
    span = Span(**event["args"], start_s=start, end_s=start + duration)
    if span.kind not in KINDS:
        raise ValueError(f"kind {span.kind!r}")
    return span
