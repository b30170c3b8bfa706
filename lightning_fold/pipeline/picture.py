"""Timelines as a picture: one row per rank, one box per computation, panels over one time axis.

A box has the colour of its kind, paler for a later chunk of its rank, and the number of its
microbatch where it is wide enough to read that. A computation in pieces is several boxes, those
without another's between them under one number. A file appears whole or not at all.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fold.checkpoint.files import write_whole
from lightning_fold.pipeline.timeline import KINDS, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
# Apart for colour-blind readers, and pale enough for black numbers.
_COLOURS = {
    "F": (0.38, 0.64, 0.90),
    "B": (0.42, 0.76, 0.50),
    "I": (0.96, 0.66, 0.27),
    "W": (0.76, 0.60, 0.86),
}
_IDLE = "#f0f0f0"
_PALEST = 0.65

# Inches.
_ROW, _PANEL, _FRAME, _SIDES = 0.34, 0.45, 1.1, 1.0
_BOX, _WIDTHS, _HEIGHTS = 0.17, (9.0, 40.0), (2.2, 60.0)
# Points; a digit is about 0.6 times as wide as its size.
_INCH, _DIGIT, _SIZES = 72.0, 0.62, (4.0, 8.0)
# An edge in points, for boxes of which it leaves most.
_EDGE, _EDGED = 0.6, 0.03
_MAX_NUMBERED = 6000
# Times that a computation in pieces is wider than one that is whole.
_MAX_WIDER = 2.0


def draw_timelines(
    timelines: Mapping[str, Timeline], path: Path, *, title: str = "", unit: str = "s"
) -> None:
    """Write a PNG of one timeline or of several, such as a prediction above a measurement.

    Args:
        timelines: By the name that heads their panel.
        path: The PNG; its folder must exist.
        title: Above all panels.
        unit: Of the time axis.
    """
    picture = io.BytesIO()
    _figure(timelines, title=title, unit=unit).savefig(picture, format="png", dpi=120)
    write_whole(path, picture.getvalue())


def _figure(timelines: Mapping[str, Timeline], *, title: str, unit: str) -> Figure:
    # The object API with its own canvas touches no global state and needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = max(timeline.makespan for timeline in timelines.values()) or 1.0
    width = _SIDES + _clamp(longest / _usual_duration(timelines) * _BOX, _WIDTHS)
    heights = [_PANEL + _ROW * len(timeline.by_rank) for timeline in timelines.values()]
    height = _clamp(_FRAME + sum(heights), _HEIGHTS)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        axes.set_xlim(0, longest)
        _draw_panel(axes, timeline, inches_per_unit=(width - _SIDES) / longest)
        axes.set_title(_heading(name, timeline, unit), fontsize=9, loc="left")
    panels[-1].set_xlabel(f"time ({unit}), idle in grey", fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    _add_legend(figure, timelines)
    return figure


def _usual_duration(timelines: Mapping[str, Timeline]) -> float:
    """A duration that nine of ten computations reach, so that few boxes are too narrow.

    Less where they are in pieces, which have to be seen; not for each of them, as a run has dozens.
    """
    found = [d for timeline in timelines.values() for d in timeline.durations.values()]
    durations = sorted(duration for duration in found if duration > 0)
    if not durations:
        return 1.0
    pieces = sum(len(timeline.spans) for timeline in timelines.values()) / len(found)
    return durations[len(durations) // 10] / min(pieces, _MAX_WIDER)


def _heading(name: str, timeline: Timeline, unit: str) -> str:
    live = max(timeline.peak_live.values(), default=0)
    # Any other unit is said once, under the axis.
    seconds = " s" if unit == "s" else ""
    return (
        f"{name}: bubble {timeline.bubble:.1%}, makespan {timeline.makespan:.4g}{seconds}, "
        f"at most {live} activations live on a rank"
    )


def _draw_panel(axes: Axes, timeline: Timeline, *, inches_per_unit: float) -> None:
    ranks = list(timeline.by_rank)
    chunks = _chunks(timeline)
    start = min((span.start_s for span in timeline.spans), default=0.0)
    for row, spans in enumerate(timeline.by_rank.values()):
        bars: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for span in spans:
            duration = span.end_s - span.start_s
            bars[span.kind, chunks[span.stage]].append((span.start_s - start, duration))
        for (kind, chunk), bar in bars.items():
            colour = _colour(kind, chunk, max(chunks.values()) + 1)
            # The edges of narrow boxes would hide them.
            edges = [_EDGE if width * inches_per_unit >= _EDGED else 0.0 for _, width in bar]
            axes.broken_barh(
                bar, (row - 0.44, 0.88), facecolor=colour, edgecolor="white", linewidth=edges
            )
    _draw_numbers(axes, timeline, start, inches_per_unit=inches_per_unit)
    axes.set(facecolor=_IDLE, ylim=(len(ranks) - 0.5, -0.5))
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_numbers(axes: Axes, timeline: Timeline, start: float, *, inches_per_unit: float) -> None:
    found = []
    for row, spans in enumerate(timeline.by_rank.values()):
        for run in _runs(spans):
            size = _number_size(run, inches_per_unit)
            if size >= _SIZES[0]:
                found.append(((run.start_s + run.end_s) / 2 - start, row, run.microbatch, size))
    # Each is drawn on its own, which takes long for many.
    if len(found) > _MAX_NUMBERED:
        return
    for middle, row, number, size in found:
        axes.text(middle, row, str(number), fontsize=size, ha="center", va="center_baseline")


def _runs(spans: Sequence[Span]) -> Iterator[Span]:
    """Join the neighbouring pieces of one computation."""
    for _, pieces in groupby(spans, key=lambda span: (span.stage, span.kind, span.microbatch)):
        first, *others = pieces
        yield replace(first, end_s=(others or [first])[-1].end_s)


def _number_size(span: Span, inches_per_unit: float) -> float:
    """Points of the largest number that a box has room for."""
    inches = (span.end_s - span.start_s) * inches_per_unit
    return min(inches * 0.85 * _INCH / (_DIGIT * len(str(span.microbatch))), _SIZES[1])


def _chunks(timeline: Timeline) -> dict[int, int]:
    """Place of each stage among those of its rank, in the order of the forward."""
    return {
        stage: chunk
        for spans in timeline.by_rank.values()
        for chunk, stage in enumerate(sorted({span.stage for span in spans}))
    }


def _colour(kind: str, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """The colour of a kind, mixed with white for all chunks but the first."""
    white = _PALEST * chunk / max(num_chunks - 1, 1)
    red, green, blue = (part + (1 - part) * white for part in _COLOURS[kind])
    return red, green, blue


def _add_legend(figure: Figure, timelines: Mapping[str, Timeline]) -> None:
    """One column per kind, one row per chunk."""
    from matplotlib.patches import Patch

    found = {span.kind for timeline in timelines.values() for span in timeline.spans}
    kinds = [kind for kind in KINDS if kind in found]
    most = max(max(_chunks(t).values(), default=0) + 1 for t in timelines.values())
    patches = []
    for kind in kinds:
        for chunk in range(most):
            place = f", chunk {chunk}" if most > 1 else ""
            label = f"{kind} {_NAMES[kind]}{place}"
            patches.append(Patch(facecolor=_colour(kind, chunk, most), label=label))
    columns = max(len(kinds), 1)
    figure.legend(
        handles=patches, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )


def _clamp(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
