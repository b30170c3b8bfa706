"""The result as a picture: a matrix of mappings by checks, coloured by the size of the error.

A file appears whole or not at all. The one file of `verify` that draws.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fold.checkpoint.files import write_whole
from lightning_fold.verify.product.result import MappingResult, VerifyResult, shown_checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOWEST, _HIGHEST = -17.0, 1.0
_CELL_IN, _MARGIN_IN, _BAR_IN = (0.95, 0.27), (2.7, 1.5), 1.0


def draw_result(result: VerifyResult, path: Path) -> None:
    """Write a PNG."""
    picture = io.BytesIO()
    _figure(result).savefig(picture, format="png", dpi=110)
    write_whole(path, picture.getvalue())


def level(error: float) -> float:
    """Decimal logarithm of an error, cut to the scale of the colours."""
    if math.isnan(error) or math.isinf(error):
        return _HIGHEST
    return min(max(math.log10(error), _LOWEST), _HIGHEST) if error > 0 else _LOWEST


def _figure(result: VerifyResult) -> Figure:
    # The object API with its own canvas touches no global state and needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = shown_checks(result.mappings) or ["routing"]
    width = len(names) * _CELL_IN[0] + _MARGIN_IN[0] + 1.3
    # The bar of colours has a label along it, whatever the number of rows.
    height = max(len(result.mappings) * _CELL_IN[1], _BAR_IN) + _MARGIN_IN[1]
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(_title(result), fontsize=10, loc="left")
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=8)
    mappings = [mapping.mapping for mapping in result.mappings]
    axes.set_yticks(range(len(mappings)), mappings, fontsize=8, family="monospace")
    values = [[_value(row, name) for name in names] for row in result.mappings]
    image = axes.imshow(values, cmap="RdYlGn_r", vmin=_LOWEST, vmax=_HIGHEST, aspect="auto")
    figure.colorbar(image, ax=axes, label="log10 of the error")
    for number, row in enumerate(result.mappings):
        _draw_row(axes, number, row, names)
    return figure


def _title(result: VerifyResult) -> str:
    fault = f", injected: {result.injected}" if result.injected else ""
    return f"{result.subject}{fault}\n{result.headline()}\ntolerance {result.tolerance:.0e}"


def _value(row: MappingResult, name: str) -> float:
    check = next((check for check in row.checks if check.name == name), None)
    return math.nan if check is None else level(check.error)


def _draw_row(axes: Axes, number: int, row: MappingResult, names: list[str]) -> None:
    """Refused mappings are hatched; what is off has a frame and its figure."""
    from matplotlib.patches import Rectangle

    if not row.checks:
        reason = "refused" if row.refusal is not None else "failed"
        frame = Rectangle((-0.5, number - 0.5), len(names), 1, hatch="///")
        frame.set(facecolor="#eeeeee", edgecolor="#999999")
        axes.add_patch(frame)
        axes.text(len(names) / 2 - 0.5, number, reason, fontsize=8, ha="center", va="center")
    for check in row.failed:
        column = names.index(check.name)
        frame = Rectangle((column - 0.48, number - 0.46), 0.96, 0.92)
        frame.set(facecolor="none", edgecolor="black", linewidth=1.5)
        axes.add_patch(frame)
        axes.text(column, number, f"{check.error:.0e}", fontsize=7, ha="center", va="center")
