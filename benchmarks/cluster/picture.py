"""One step of an emulated run as a picture: what ranks compute, and what is on the wire meanwhile.

A rank has two lanes: slept compute above, exchanges of rows below, the part of an exchange that the
rank waited for in red, and what it waited for numbers, such as counts, in black.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.cluster.measure import NUMBERS, Exchange, within

# As in `lightning_fold.pipeline.picture`, experts paler than attention.
_COLOURS = {
    ("attend", "F"): "#619fe6",
    ("experts", "F"): "#b0d0f5",
    ("attend", "I"): "#f5a845",
    ("experts", "I"): "#fbd5a3",
    ("attend", "W"): "#c299db",
    ("experts", "W"): "#e2cdee",
}
_KINDS = {"F": "forward", "I": "input gradient", "W": "weight gradient"}
_FLIGHT, _WAIT, _NUMBERS = "#9ac7a5", "#d7373f", "#222222"

Bars = dict[str, list[tuple[float, float]]]


def draw_step(results: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG of the last step of one case.

    Args:
        results: Of the worker, by rank; every second rank is drawn.
        path: The PNG.
        title: Above it.
    """
    ranks = range(0, len(results), 2)
    figure = Figure(figsize=(16, 1.2 + 0.75 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, rank in enumerate(ranks):
        for top, bars in enumerate(_lanes(results[rank])):
            for colour, bar in bars.items():
                axes.broken_barh(bar, (row - 0.42 + 0.44 * top, 0.4), facecolor=colour)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_xlabel("time (s)")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_facecolor("#f4f4f4")
    axes.margins(x=0)
    patches = [
        Patch(facecolor=colour, label=f"{what}, {_KINDS[kind]}")
        for (what, kind), colour in _COLOURS.items()
    ]
    patches.append(Patch(facecolor=_FLIGHT, label="rows on the wire"))
    patches.append(Patch(facecolor=_WAIT, label="rows waited for"))
    patches.append(Patch(facecolor=_NUMBERS, label="numbers waited for"))
    figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)


def _lanes(result: Mapping[str, Any]) -> tuple[Bars, Bars]:
    """Bars by colour of both lanes; times count from the start of the step."""
    origin = result["last"][0]
    compute: Bars = defaultdict(list)
    wire: Bars = defaultdict(list)
    for piece in result["slept"]:
        start, end = piece["start_s"], piece["end_s"]
        compute[_COLOURS[piece["what"], piece["kind"]]].append((start - origin, end - start))
    for one in within((Exchange(*record) for record in result["exchanges"]), result["last"]):
        is_rows = not one.axis.endswith(NUMBERS)
        if is_rows:
            wire[_FLIGHT].append((one.issued_s - origin, one.flight_s))
        waited = min(one.waited_s, one.flight_s)
        colour = _WAIT if is_rows else _NUMBERS
        wire[colour].append((one.arrived_s - waited - origin, waited))
    return compute, wire
