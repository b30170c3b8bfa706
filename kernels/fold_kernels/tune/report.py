"""What a sweep found, as lines and as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from math import inf
from typing import Any

from fold_kernels.tables import Tile
from fold_kernels.tune.sweep import Timing

Group = list[Timing]
LEGEND = """\
A line is an op of a layer; a column with slashes has one figure a routing.
  rate          TFLOP/s of products, TB/s of the rest, with the quickest tile
  /dense        time of one plain product of equal FLOPs over the op's; the worst routing
  /grouped_mm   time of torch's grouped_mm alone over the op's, which does more; the worst routing
  gain          time of what the op replaces over the op's; the worst routing"""


def spell(tile: Tile | None) -> str:
    """A tile in one word."""
    if tile is None:
        return "-"
    text = f"{tile.m}x{tile.n}x{tile.k}s{tile.stages}w{tile.warps}"
    return f"{text}g{tile.group}p{tile.split}"


def lines_of(timings: Iterable[Timing]) -> Iterator[str]:
    """A table with a line for each op of each layer."""
    yield (
        f"{'layer':<16} {'op':<18} {'tile':<20} {'rate':>17} {'/dense':>7} {'/grouped_mm':>11} "
        f"{'gain':>6}"
    )
    groups: dict[tuple[str, str], Group] = defaultdict(list)
    for timing in timings:
        groups[timing.layer.name, f"{timing.op} {timing.variant}".strip()].append(timing)
    for (layer, op), group in groups.items():
        rates = "/".join(_rate(timing) for timing in group)
        tile = spell(group[0].tile)
        dense, grouped, gain = (_worst(group, name) for name in ("dense", "grouped_mm", "replaced"))
        yield f"{layer:<16} {op:<18} {tile:<20} {rates:>17} {dense:>7} {grouped:>11} {gain:>6}"
    yield from _faults(groups)


def as_json(timing: Timing) -> dict[str, Any]:
    """Everything about one case."""
    return {
        "layer": asdict(timing.layer),
        "routing": timing.routing,
        "op": timing.op,
        "variant": timing.variant,
        "kind": timing.kind,
        "flop": timing.flop,
        "moved": timing.moved,
        "tiles": {spell(tile): seconds for tile, seconds in timing.tiles.items()},
        "wrong": {spell(tile): fault for tile, fault in timing.wrong.items()},
        "baselines": dict(timing.baselines),
    }


def _rate(timing: Timing) -> str:
    work = timing.flop or timing.moved
    rate = work / timing.seconds / 1e12
    return f"{rate:.0f}" if timing.flop else f"{rate:.2f}"


def _worst(group: Group, baseline: str) -> str:
    ratios = [ratio for timing in group if (ratio := timing.over(baseline)) is not None]
    return f"{min(ratios):.2f}" if ratios else ""


def _faults(groups: dict[tuple[str, str], Group]) -> Iterator[str]:
    for (layer, op), group in groups.items():
        for timing in group:
            for tile, fault in timing.wrong.items():
                yield f"not right: {layer} {op} {spell(tile)}, {timing.routing}: {fault}"
            if timing.seconds == inf:
                yield f"no right tile: {layer} {op}, {timing.routing}"
