"""One run of the benchmark: start the clusters, run the cases, print and draw what they say."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cluster import cases, launch, network, report, worker
from benchmarks.cluster.picture import draw_step
from benchmarks.cluster.proportions import Proportions

# For a start on two busy cores, and for one case.
START_S, CASE_S = 120.0, 90.0


def measure(prefixes: tuple[str, ...], links: float, out: Path, folder: Path) -> None:
    """Run the cases that begin with one of the prefixes, and report.

    Args:
        prefixes: Of names of cases.
        links: How many times faster the links are than in the model's proportions.
        out: For pictures and RESULTS.md.
        folder: For what ranks write.

    Raises:
        NamespacesError: There can be no nodes.
        RankError: A rank has failed.
    """
    rates = Proportions().rates(cases.SLOWDOWN, hidden=cases.HIDDEN, per_node=cases.PER_NODE)
    rates = replace(rates, link=rates.link * links)
    listed: list[cases.Case] = []
    results: dict[str, list[Any]] = {}
    used = {}
    for name, placement in cases.PLACEMENTS.items():
        wanted = [case for case in cases.cases_of(name) if case.name.startswith(prefixes)]
        if wanted:
            listed += wanted
            used[name] = placement
            results |= run(name, wanted, rates, folder)
    if not listed:
        sys.exit(f"cluster-bench: no case begins with any of {' '.join(prefixes)}")
    speeds = results.pop("links")[0]
    rows, wanted_aims = report.table(listed, results), list(report.aims(results))
    print(report.aligned(rows))
    print("\n".join(report.aim_lines(wanted_aims)))
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw(listed, results, folder, out)
    notes = report.notes_of(used, results, speeds, rates)
    report.write_markdown(out / "RESULTS.md", rows, wanted_aims, notes=notes, pictures=pictures)
    print(f"{out / 'RESULTS.md'}, {len(pictures)} pictures")


def run(
    name: str, wanted: Sequence[cases.Case], rates: network.Rates, folder: Path
) -> dict[str, list[Any]]:
    """Run cases of one placement; what every rank has found out, by case and rank."""
    placement = cases.PLACEMENTS[name]
    limit_s = START_S + CASE_S * len(wanted)
    print(f"{name}: {' '.join(case.name for case in wanted)}", flush=True)
    with network.cluster(placement.nodes, rates) as nodes:
        by_rank = launch.run_ranks(
            nodes,
            placement,
            worker.run_cases,
            name,
            [case.name for case in wanted],
            folder=folder,
            limit_s=limit_s,
        )
    return {case: [rank[case] for rank in by_rank] for case in by_rank[0]}


def draw(
    listed: Sequence[cases.Case], results: report.Results, folder: Path, out: Path
) -> list[Path]:
    """Write a timeline of each case; of a schedule the product's own."""
    pictures = []
    for case in listed:
        picture = out / f"{case.name}.png"
        if case.name.startswith("schedules."):
            shutil.copy(folder / case.name / "pipeline.png", picture)
        else:
            draw_step(results[case.name], picture, title=f"{case.name}, {case.folding.mapping_id}")
        pictures.append(picture)
    return pictures
