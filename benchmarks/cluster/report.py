"""What the runs say: one table of ratios, the aims beside what was reached, and RESULTS.md."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.cluster.cases import SLOWDOWN, Case
from benchmarks.cluster.launch import Placement
from benchmarks.cluster.measure import Exchange, closed_fraction, hidden_fraction
from benchmarks.cluster.network import Rates
from benchmarks.cluster.proportions import Proportions

REPOSITORY = Path(__file__).parents[2]
HEADINGS = (
    "case",
    "mapping",
    "step s",
    "tokens/s over",
    "hidden in pairs",
    "hidden",
    "gap closed",
    "makespan / simulated",
    "bubble - simulated",
)
_NONE = "-"

Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""What every rank has found out, by case and rank."""


@dataclass(frozen=True)
class Aim:
    """What a figure should be, and what it is."""

    text: str
    wanted: float
    got: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        """Whether it is."""
        return self.got >= self.wanted if self.at_least else self.got <= self.wanted


def step_s(results: Results, case: str) -> float:
    """Seconds of a step: that of the slowest rank, in the median step."""
    by_step = zip(*(rank["seconds"] for rank in results[case]), strict=True)
    return statistics.median(max(step) for step in by_step)


def exchanges_of(results: Results, case: str) -> list[Exchange]:
    """Of all ranks and measured steps."""
    return [Exchange(*record) for rank in results[case] for record in rank["exchanges"]]


def table(cases: Sequence[Case], results: Results) -> list[tuple[str, ...]]:
    """The rows of the table, under `HEADINGS`."""
    return [HEADINGS, *(_row(case, cases, results) for case in cases)]


def aims(results: Results) -> Iterator[Aim]:
    """Every aim that the runs can be held against."""
    for case in results:
        group, _, name = case.partition(".")
        schedule = name.removesuffix(".woven")
        if group == "overlap" and name.endswith(".bound"):
            slower = _over_slept(results[case])
            yield Aim(f"{case}: time beyond what was slept (a quiet machine)", 0.05, slower, False)
        if group == "overlap" and name.endswith(".woven"):
            pairs = hidden_fraction(x for x in exchanges_of(results, case) if x.woven)
            yield Aim(f"{schedule}: hidden in woven pairs", 0.9, pairs or 0.0, True)
            closed = _closed(case, results)
            if closed is not None:
                yield Aim(f"{schedule}: closed part of the gap", 0.75, closed, True)
        if group == "schedules" and not name.endswith(".woven"):
            longer, idler = _against_clock(results[case])
            yield Aim(f"{name}: makespan off the simulated one", 0.05, abs(longer - 1), False)
            yield Aim(f"{name}: bubble off the simulated one", 0.02, abs(idler), False)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def write_markdown(
    path: Path,
    rows: Sequence[Sequence[str]],
    wanted: Iterable[Aim],
    *,
    notes: Iterable[str],
    pictures: Iterable[Path],
) -> None:
    """Write RESULTS.md."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        "# Emulated cluster: results",
        f"`make cluster-bench`, {now}, at {commit()}. Two nodes of four ranks; compute is slept.",
        "\n".join(f"- {note}" for note in notes),
        "\n".join(_markdown_rows(rows)),
        "Aims:",
        "\n".join(f"- {line}" for line in aim_lines(wanted)),
        "\n\n".join(f"![{picture.stem}]({picture.name})" for picture in pictures),
    ]
    path.write_text("\n\n".join(parts) + "\n")


def aim_lines(wanted: Iterable[Aim]) -> Iterator[str]:
    """An aim a line."""
    for aim in wanted:
        bound = "at least" if aim.at_least else "at most"
        met = "met" if aim.is_met else "MISSED"
        yield f"{aim.text}: {aim.got:.1%}, aim {bound} {aim.wanted:.0%}: {met}"


def notes_of(
    placements: Mapping[str, Placement],
    results: Results,
    speeds: Mapping[str, float],
    rates: Rates,
) -> Iterator[str]:
    """On what, and in which proportions, the runs were made."""
    real = Proportions()
    cores = max(
        sum(rank["cpu_s"] for rank in ranks) / step_s(results, case)
        for case, ranks in results.items()
    )
    yield f"{platform.machine()}; the ranks of a run used at most {cores:.2f} cores together."
    yield (
        f"Proportions of Qwen3-30B-A3B on GPUs of {real.flops / 1e12:.0f} TFLOP/s with links of "
        f"{real.link * 8e-9:.0f} Gb/s each, {SLOWDOWN:.0f} times slower; the links then carry "
        f"{rates.link:.1f} Mbit/s of a node, and {rates.inside or 0:.0f} inside it."
    )
    yield (
        f"Between two ranks Gloo moves {speeds['across']:.1f} MB/s across nodes and "
        f"{speeds['inside']:.1f} MB/s inside one."
    )
    for name, placement in placements.items():
        yield f"Ranks {name}: node of each rank {' '.join(map(str, placement.table))}."
    yield (
        "Hidden: 1 - wait / flight of all exchanges of rows over ep and etp. `bound` sends no rows."
        " Gap closed: (plain - woven) / (plain - bound) of step times."
    )
    yield (
        "Makespan and bubble: executed against simulated with the mean time of each action, and a "
        "message's time on the link from stage to stage. The simulator knows no exchanges."
    )
    yield (
        "In pipelines what a rank computes beside attention and experts counts as part of them: "
        "eight ranks share the machine's cores."
    )


def commit() -> str:
    """The commit that ran, marked where the tree has changes."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ("git", *arguments), cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = "+changes" if git("status", "--porcelain") else ""
    return (git("rev-parse", "--short", "HEAD") or "no commit") + changed


def _row(case: Case, cases: Sequence[Case], results: Results) -> tuple[str, ...]:
    seconds, exchanges = step_s(results, case.name), exchanges_of(results, case.name)
    reference = _reference(case.name)
    speeds = {one.name: one.tokens / step_s(results, one.name) for one in cases}
    over = (
        f"{speeds[case.name] / speeds[reference]:.2f} {reference}" if reference in speeds else _NONE
    )
    longer, idler = _against_clock(results[case.name])
    has_clock = bool(results[case.name][0]["timelines"])
    return (
        case.name,
        case.folding.mapping_id,
        f"{seconds:.2f}",
        over,
        _percent(hidden_fraction(x for x in exchanges if x.woven)),
        _percent(hidden_fraction(exchanges)),
        _percent(_closed(case.name, results)),
        f"{longer:.3f}" if has_clock else _NONE,
        f"{idler * 100:+.1f} points" if has_clock else _NONE,
    )


def _reference(case: str) -> str:
    """The case that a case's tokens a second are put over: the first of its kind."""
    group, _, name = case.partition(".")
    if group == "folding":
        return "folding.unfolded"
    if group == "schedules":
        return "schedules.1f1b"
    return f"overlap.{name.rpartition('.')[0]}.plain"


def _closed(case: str, results: Results) -> float | None:
    if not case.startswith("overlap.") or not case.endswith(".woven"):
        return None
    stem = case.removesuffix("woven")
    if not {f"{stem}plain", f"{stem}bound"} <= set(results):
        return None
    plain, woven, bound = (step_s(results, stem + name) for name in ("plain", "woven", "bound"))
    return closed_fraction(plain, woven, bound)


def _against_clock(ranks: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Executed makespan over the simulated one; executed bubble less the simulated one."""
    found = ranks[0]["timelines"]
    if not found:
        return 1.0, 0.0
    measured, predicted = found["measured"], found["predicted"]
    return (
        measured["makespan"] / predicted["makespan"],
        measured["bubble"] - predicted["bubble"],
    )


def _over_slept(ranks: Sequence[Mapping[str, Any]]) -> float:
    """How much longer a pipeline without exchanges took than what it slept says."""
    found = ranks[0]["timelines"]
    return float(found["measured"]["makespan"] / found["slept"]["makespan"] - 1) if found else 0.0


def _percent(fraction: float | None) -> str:
    return _NONE if fraction is None else f"{fraction:.1%}"


def _markdown_rows(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    heading, *rest = rows
    yield f"| {' | '.join(heading)} |"
    yield "|" + "---|" * len(heading)
    for row in rest:
        yield f"| {' | '.join(row)} |"
