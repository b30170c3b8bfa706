"""Run any list of cases: one reference process, one start of the ranks a world, one outcome a case.

A crash costs the cases that had not run; their outcomes say so. Also counts what was covered.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from lightning_fold.verify.compare import CHECKS, FAMILIES, Outcome, compare_case
from lightning_fold.verify.launch import WorldRun, run_reference, run_world
from lightning_fold.verify.plan import Case, closed_form, mappings_of


def run_cases(cases: Sequence[Case], folder: Path) -> dict[Case, Outcome]:
    """Run `cases` on as many ranks as each needs and compare them; keeps no tensors on disk.

    Raises:
        RuntimeError: The reference process failed.
    """
    references = folder / "references"
    run_reference(cases, references)
    outcomes: dict[Case, Outcome] = {}
    for world in sorted({case.folding.world for case in cases}):
        chosen = [case for case in cases if case.folding.world == world]
        ranks = folder / f"world{world}"
        run = run_world(world, chosen, ranks)
        outcomes |= {case: _outcome(case, run, ranks, references) for case in chosen}
    return outcomes


def results_table(outcomes: Iterable[Outcome]) -> Table:
    """Table of mappings by checks: the worst relative error over the cases of each tolerance."""
    rows: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault((outcome.case.mapping, _kind(outcome.case)), []).append(outcome)
    names = [name for name in CHECKS if any(_errors(found, name) for found in rows.values())]
    table = Table("mapping", "models", "cases", *names, "verdict")
    for (mapping, kind), found in rows.items():
        worst = [max(_errors(found, name), default=None) for name in names]
        cells = ["-" if error is None else f"{error:.0e}" for error in worst]
        table.add_row(mapping, kind, str(len(found)), *cells, _verdict(found))
    return table


def norms_table(outcomes: Iterable[Outcome]) -> Table:
    """Table of models by families: the smallest reference gradient norm that was compared."""
    table = Table("reference gradient norm", *FAMILIES)
    smallest: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        row = smallest.setdefault(outcome.case.model, {})
        for family, norm in outcome.family_norms.items():
            row[family] = min(norm, row.get(family, norm))
    for model, row in smallest.items():
        table.add_row(model, *(f"{row[f]:.1e}" if f in row else "-" for f in FAMILIES))
    return table


def coverage(outcomes: Iterable[Outcome], world: int) -> str:
    """One line: how many of the legal mappings of `world` ran, and which were refused and why.

    Mappings without pipelines, that is, which alone can be counted (`plan.closed_form`).
    """
    foldings = [(outcome, outcome.case.folding) for outcome in outcomes]
    outcomes = [outcome for outcome, f in foldings if f.world == world and f.pp == 1]
    ran = {outcome.case.mapping for outcome in outcomes if outcome.checks}
    refused = {o.case.mapping: o.refusal for o in outcomes if o.refusal is not None}
    reasons = "".join(f"\n  {mapping}: {reason}" for mapping, reason in refused.items())
    return (
        f"{world} ranks: {len(ran)} mappings run + {len(set(refused) - ran)} refused of "
        f"{closed_form(world)} legal, {len(mappings_of(world))} chosen{reasons}"
    )


def is_complete(outcomes: Mapping[Case, Outcome], world: int) -> bool:
    """Whether every chosen mapping of `world` ran or was refused with a reason."""
    done = {c.mapping for c, outcome in outcomes.items() if outcome.checks or outcome.refusal}
    return done >= set(mappings_of(world))


def _verdict(outcomes: Sequence[Outcome]) -> str:
    refused = sum(outcome.refusal is not None for outcome in outcomes)
    failed = sum(not outcome.passed for outcome in outcomes) - refused
    return f"{failed} FAIL" if failed else f"{refused} refused" if refused else "ok"


def _kind(case: Case) -> str:
    if case.precision == "32":
        return "fp32"
    return "decoder" if case.model.startswith("decoder") else "Hugging Face"


def _errors(outcomes: Iterable[Outcome], name: str) -> list[float]:
    return [check.error for outcome in outcomes for check in outcome.checks if check.name == name]


def _outcome(case: Case, run: WorldRun, ranks: Path, references: Path) -> Outcome:
    written = ranks / case.key
    complete = all((written / f"rank{r}.pt").exists() for r in range(case.folding.world))
    if complete and case.key != run.failed_case:
        outcome = compare_case(case, written, references)
        shutil.rmtree(written)
        return outcome
    if run.failure is None:
        return Outcome(case, failure="the ranks ended without a result")
    if run.failed_case == case.key:
        return Outcome(case, failure=run.failure)
    first = run.failure.splitlines()[0]
    return Outcome(case, failure=f"not run, the ranks ended in {run.failed_case}: {first}")
