"""The picture of a folding: which GPU is in which group, as text, JSON and PNG.

Owns the three renderings and nothing they show; every number comes from `Folding`. Node n
holds the ranks n*gpus_per_node and up, as the launchers number them. Text and pictures leave
out the middle of large worlds and say so; the JSON is always whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fold.topology.folding import ATTENTION_AXES, MOE_AXES, Folding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TEXT_NODES = 4
MAX_TEXT_MEMBERS = 16
MAX_TEXT_NUMBERS = 32
MAX_DRAWN_ROWS = 16
MAX_DRAWN_COLUMNS = 8

# Inches of the drawing; one unit of an axes' coordinates is one cell.
_CELL = (1.1, 0.95)
_NODE_LABEL = 0.85
_NODE_GAP = 0.3
_MIN_PANEL_WIDTH = 5.4
_HEAD = 1.3
_MARGIN = 0.35
_FOOT_LINE = 0.24
_MAX_FOOTER_MEMBERS = 8

# Pale enough for black labels; neighbours in the cycle stay apart for colour-blind readers.
_COLOURS = (
    "#9ecae9",
    "#ffcb8c",
    "#a8ddb5",
    "#d9b8e8",
    "#f4b6b0",
    "#e4e08b",
    "#8fdad8",
    "#cdcdcd",
)
_INK = "#222222"


@dataclass(frozen=True)
class _View:
    """One of the two views: its axes, and the innermost two whose block is a run of ranks."""

    title: str
    axes: tuple[str, ...]
    block: tuple[str, str]


_VIEWS = (
    _View(title="attention", axes=ATTENTION_AXES, block=("cp", "tp")),
    _View(title="MoE", axes=MOE_AXES, block=("ep", "etp")),
)


def rank_map_json(folding: Folding) -> dict[str, Any]:
    """Return degrees, mapping id and both views' groups as rank lists, ready for `json.dump`."""
    views = {
        view.title.lower(): {
            axis: [list(group) for group in folding.groups(axis)] for axis in view.axes
        }
        for view in _VIEWS
    }
    return {
        "mapping_id": folding.mapping_id,
        "world": folding.world,
        "stage_size": folding.stage_size,
        "degrees": asdict(folding),
        **views,
    }


def rank_map_text(folding: Folding, *, gpus_per_node: int) -> str:
    """Return every rank's coordinates node by node, then the groups of every axis."""
    _require_node_size(gpus_per_node)
    lines = [
        f"{folding.mapping_id}: {_size_line(folding, gpus_per_node)}",
        f"world {folding.world} = pp {folding.pp} x stage_size {folding.stage_size}",
        "",
        *_text_coordinates(folding, gpus_per_node),
    ]
    lines.append("groups, by rank")
    for view in _VIEWS:
        lines.append(f"  {view.title}")
        lines.extend(_text_groups(folding, axis, gpus_per_node) for axis in reversed(view.axes))
    return "\n".join(lines)


def draw_rank_map(folding: Folding, path: str | os.PathLike[str], *, gpus_per_node: int) -> None:
    """Draw both views as a PNG, one cell per GPU and one row of cells per node or part of it.

    The file appears whole or not at all: it is written beside its name and then renamed.

    Args:
        folding: The mapping to draw.
        path: The PNG to write; its folder must exist.
        gpus_per_node: Ranks of one node; need not divide the world.
    """
    _require_node_size(gpus_per_node)
    figure = _build_figure(_Grid(folding=folding, gpus_per_node=gpus_per_node))
    partial = Path(f"{os.fspath(path)}.{os.getpid()}.partial")
    try:
        figure.savefig(partial, format="png", dpi=110)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _require_node_size(gpus_per_node: int) -> None:
    if type(gpus_per_node) is not int or gpus_per_node < 1:
        raise ValueError(
            f"gpus_per_node={gpus_per_node!r} leaves a node without ranks."
            "  Legal gpus_per_node: 1, 2, 3, ...  Change `gpus_per_node`."
        )


def _count_nodes(folding: Folding, gpus_per_node: int) -> int:
    return -(-folding.world // gpus_per_node)


def _size_line(folding: Folding, gpus_per_node: int) -> str:
    nodes = _count_nodes(folding, gpus_per_node)
    ranks = f"{folding.world} rank{'s' * (folding.world > 1)}"
    return f"{ranks}, {nodes} node{'s' * (nodes > 1)} of {gpus_per_node} GPUs"


def _text_coordinates(folding: Folding, gpus_per_node: int) -> Iterator[str]:
    nodes = _count_nodes(folding, gpus_per_node)
    shown = range(nodes) if nodes <= MAX_TEXT_NODES else (*range(MAX_TEXT_NODES - 1), nodes - 1)
    for node in shown:
        if node == nodes - 1 and nodes > MAX_TEXT_NODES:
            yield f"... {nodes - MAX_TEXT_NODES} more ..."
            yield ""
        first = node * gpus_per_node
        ranks = range(first, min(first + gpus_per_node, folding.world))
        # Wide nodes wrap, so that a line stays readable in a terminal.
        for start in range(0, len(ranks), 16):
            yield from _text_node(folding, node, ranks[start : start + 16])


def _text_node(folding: Folding, node: int, ranks: Sequence[int]) -> Iterator[str]:
    places = [folding.coordinates(rank) for rank in ranks]
    yield _text_row(f"node {node}", "rank", ranks)
    for view in _VIEWS:
        for number, axis in enumerate(reversed(view.axes)):
            label = f"  {view.title}" if number == 0 else ""
            yield _text_row(label, axis, [place[axis] for place in places])
    yield ""


def _text_row(label: str, axis: str, numbers: Sequence[int]) -> str:
    return f"{label:<12}{axis:<5}|" + "".join(f"{number:>5}" for number in numbers) + " |"


def _text_groups(folding: Folding, axis: str, gpus_per_node: int) -> str:
    groups, size = folding.groups(axis), folding.size(axis)
    count = f"    {axis:<4} {len(groups)} x {size}"
    if size == 1:
        return f"{count:<18}every rank alone"
    crossing = sum(group[0] // gpus_per_node != group[-1] // gpus_per_node for group in groups)
    place = f"{crossing} of {len(groups)} cross nodes" if crossing else "inside a node"
    shown = [_text_group(group) for group in groups]
    most = max(2, MAX_TEXT_NUMBERS // size)
    if len(groups) > most:
        shown[most - 1 : -1] = [f"... {len(groups) - most} more ..."]
    return f"{count:<18}{place:<22} {' '.join(shown)}"


def _text_group(group: Sequence[int], *, most: int = MAX_TEXT_MEMBERS) -> str:
    members = [str(rank) for rank in group]
    if len(members) > most:
        members = [*members[:3], "...", members[-1]]
    return f"[{' '.join(members)}]"


@dataclass(frozen=True)
class _Grid:
    """Where things lie: a row of at most eight cells per node or part of it, text below."""

    folding: Folding
    gpus_per_node: int

    @property
    def columns(self) -> int:
        return min(self.gpus_per_node, self.folding.world, MAX_DRAWN_COLUMNS)

    @property
    def rows_per_node(self) -> int:
        return -(-min(self.gpus_per_node, self.folding.world) // self.columns)

    @property
    def drawn(self) -> int:
        nodes = max(1, MAX_DRAWN_ROWS // self.rows_per_node)
        most = min(nodes * self.gpus_per_node, MAX_DRAWN_ROWS * self.columns)
        return min(self.folding.world, most)

    @property
    def height(self) -> float:
        return self.cell(self.drawn - 1)[1] + 1

    @property
    def legend_columns(self) -> int:
        return 4 if self.columns > 4 else 2

    @property
    def footer_top(self) -> float:
        """Inches below the cells; the same for both views, so that the two line up."""
        blocks = max(self.folding.world // _block_size(self.folding, view) for view in _VIEWS)
        rows = -(-min(blocks, len(_COLOURS)) // self.legend_columns)
        return 0.4 + _FOOT_LINE * (1 + rows)

    def cell(self, rank: int) -> tuple[int, float]:
        node, local = divmod(rank, self.gpus_per_node)
        row, column = divmod(local, self.columns)
        return column, node * (self.rows_per_node + _NODE_GAP) + row


def _build_figure(grid: _Grid) -> Figure:
    # The object API with its own canvas touches no global state and needs no display.
    # Imported here since the text and the JSON do without it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    footer = max(len(_footer_lines(view, grid)) for view in _VIEWS)
    foot = grid.footer_top + _FOOT_LINE * footer + 0.15
    panel = max(_MIN_PANEL_WIDTH, _NODE_LABEL + grid.columns * _CELL[0])
    body = grid.height * _CELL[1]
    width, height = 2 * panel + 3 * _MARGIN, _HEAD + body + foot
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    title = f"{grid.folding.mapping_id}\n{_size_line(grid.folding, grid.gpus_per_node)}"
    figure.text(0.5, 1 - 0.15 / height, title, fontsize=17, ha="center", va="top")
    for number, view in enumerate(_VIEWS):
        left = (_MARGIN + number * (panel + _MARGIN)) / width
        axes = figure.add_axes((left, foot / height, panel / width, body / height))
        axes.set_xlim(-_NODE_LABEL / _CELL[0], (panel - _NODE_LABEL) / _CELL[0])
        axes.set_ylim(grid.height, 0)
        axes.axis("off")
        _draw_view(axes, view, grid)
    return figure


def _draw_view(axes: Axes, view: _View, grid: _Grid) -> None:
    degrees = " x ".join(f"{axis} {grid.folding.size(axis)}" for axis in view.axes)
    axes.text(0, -0.13, f"{view.title} view:  {degrees}", fontsize=14, va="bottom")
    for node in range(_count_nodes(grid.folding, grid.gpus_per_node)):
        if node * grid.gpus_per_node < grid.drawn:
            _draw_node(axes, node, grid)
    for rank in range(grid.drawn):
        _draw_rank(axes, view, rank, grid=grid)
    _draw_legend(axes, view, grid)
    top = grid.height + grid.footer_top / _CELL[1]
    footer = "\n".join(_footer_lines(view, grid))
    axes.text(0, top, footer, fontsize=11.5, family="monospace", linespacing=1.35, va="top")


def _draw_node(axes: Axes, node: int, grid: _Grid) -> None:
    from matplotlib.patches import Rectangle

    first = node * grid.gpus_per_node
    last = min(first + grid.gpus_per_node, grid.drawn) - 1
    top, bottom = grid.cell(first)[1], grid.cell(last)[1] + 1
    width, height = grid.columns + 0.08, bottom - top + 0.08
    frame = Rectangle((-0.04, top - 0.04), width, height, clip_on=False)
    frame.set(facecolor="none", edgecolor=_INK, linewidth=2.2)
    axes.add_patch(frame)
    axes.text(-0.14, (top + bottom) / 2, f"node {node}", fontsize=13, ha="right", va="center")


def _draw_rank(axes: Axes, view: _View, rank: int, *, grid: _Grid) -> None:
    from matplotlib.patches import Rectangle

    folding, (column, row) = grid.folding, grid.cell(rank)
    colour = _COLOURS[rank // _block_size(folding, view) % len(_COLOURS)]
    axes.add_patch(Rectangle((column + 0.03, row + 0.03), 0.94, 0.94, facecolor=colour))
    place = folding.coordinates(rank)
    labels = [f"{axis}{place[axis]}" for axis in view.axes if folding.size(axis) > 1]
    lines = "\n".join(" ".join(labels[start : start + 2]) for start in range(0, len(labels), 2))
    middle = column + 0.5
    axes.text(middle, row + 0.25, str(rank), fontsize=16, weight="bold", ha="center", va="center")
    axes.text(middle, row + 0.67, lines, fontsize=11.5, color=_INK, ha="center", va="center")


def _block_size(folding: Folding, view: _View) -> int:
    # The two innermost axes of a view together span a run of neighbouring ranks.
    return folding.size(view.block[0]) * folding.size(view.block[1])


def _draw_legend(axes: Axes, view: _View, grid: _Grid) -> None:
    from matplotlib.patches import Patch

    folding = grid.folding
    blocks = folding.world // _block_size(folding, view)
    handles = [
        Patch(facecolor=colour, edgecolor=_INK, label=_block_label(folding, view, block))
        for block, colour in enumerate(_COLOURS[:blocks])
    ]
    axes.legend(
        handles=handles,
        title=_legend_title(folding, view, blocks),
        loc="upper left",
        bbox_to_anchor=(0, grid.height + 0.15 / _CELL[1]),
        bbox_transform=axes.transData,
        ncols=grid.legend_columns,
        fontsize=11.5,
        title_fontsize=12,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        alignment="left",
    )


def _legend_title(folding: Folding, view: _View, blocks: int) -> str:
    joined = " x ".join(axis for axis in view.block if folding.size(axis) > 1)
    title = f"one colour: one {joined} group" if joined else "one colour: one rank, nothing split"
    return f"{title} ({blocks}, colours repeat)" if blocks > len(_COLOURS) else title


def _block_label(folding: Folding, view: _View, block: int) -> str:
    size = _block_size(folding, view)
    first = block * size
    place = folding.coordinates(first)
    outer = [axis for axis in view.axes if axis not in view.block and folding.size(axis) > 1]
    where = " ".join(f"{axis}{place[axis]}" for axis in outer)
    ranks = f"{first}-{first + size - 1}" if size > 1 else f"{first}"
    return f"{where}: {ranks}" if where else f"ranks {ranks}"


def _footer_lines(view: _View, grid: _Grid) -> list[str]:
    folding = grid.folding
    split = [axis for axis in reversed(view.axes) if folding.size(axis) > 1]
    lines = ["groups of rank 0"] if split else []
    for axis in split:
        group = _text_group(folding.group_of(0, axis), most=_MAX_FOOTER_MEMBERS)
        lines.append(f"{axis:<4} {group}")
    if grid.drawn < folding.world:
        lines.append(f"ranks {grid.drawn} to {folding.world - 1} continue the pattern")
    return lines
