"""Run every mutation against the suite and say which check caught it; a survivor is a failure.

Mutations that end in wrong numbers share one start of the ranks; one that crashes gets its own. The
same cases run unharmed beside them and must pass, else a catch would prove nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_fold.verify.compare import Outcome
from lightning_fold.verify.mutations import MUTATIONS, Mutation
from lightning_fold.verify.suite import run_cases


@dataclass(frozen=True)
class Verdict:
    """What the suite made of one mutation.

    Attributes:
        name: The mutation.
        caught: Whether the suite saw it.
        evidence: First failed checks with their numbers, or the crash.
    """

    name: str
    caught: bool
    evidence: str


def judge(name: str, mutation: Mutation, outcome: Outcome) -> Verdict:
    """Say whether `outcome`, of the mutated case, shows the fault.

    The check that the mutation names must be among the failed ones. A crash counts only where it is
    the expected one: any other may come from the injection itself.
    """
    if outcome.failure is not None:
        expected = mutation.crash is not None and mutation.crash in outcome.failure
        last = outcome.failure.strip().splitlines()[-1]
        return Verdict(name, expected, f"{'raises' if expected else 'unexpected crash'}: {last}")
    failed = outcome.failed_checks
    seen = [check for check in failed if check.name == mutation.seen_by]
    others = ", ".join(check.name for check in failed if check not in seen)
    if mutation.crash is not None or not seen:
        reason = outcome.refusal or f"no crash, `{mutation.seen_by}` passes"
        return Verdict(name, False, f"{reason}; failed: {others or 'nothing'}")
    return Verdict(name, True, f"{seen[0]}\nalso: {others or 'nothing else'}")


def run_mutations(folder: Path) -> tuple[list[Verdict], list[Outcome]]:
    """Run all mutations and the unharmed cases; return both results."""
    mutated = {name: replace(m.case, mutation=name) for name, m in MUTATIONS.items()}
    plain = list({m.case: None for m in MUTATIONS.values()})
    numeric = [case for name, case in mutated.items() if MUTATIONS[name].crash is None]
    outcomes = run_cases([*plain, *numeric], folder / "numeric")
    for name, case in mutated.items():
        if MUTATIONS[name].crash is not None:
            outcomes |= run_cases([case], folder / name)
    verdicts = [judge(name, MUTATIONS[name], outcomes[case]) for name, case in mutated.items()]
    return verdicts, [outcomes[case] for case in plain]


def mutation_table(verdicts: Sequence[Verdict]) -> Table:
    """Table of mutations and what caught them."""
    table = Table("mutation", "fault", "run on", "caught by", show_lines=True)
    for verdict in verdicts:
        mutation = MUTATIONS[verdict.name]
        evidence = verdict.evidence if verdict.caught else f"SURVIVED: {verdict.evidence}"
        table.add_row(verdict.name, mutation.what, mutation.case.key, evidence)
    return table


def main() -> int:
    """Print the table; 1 if a mutation survived or an unharmed case failed."""
    console = Console(width=180)
    with tempfile.TemporaryDirectory(prefix="fold-mutate-") as folder:
        verdicts, plain = run_mutations(Path(folder))
    console.print(mutation_table(verdicts))
    survivors = [verdict.name for verdict in verdicts if not verdict.caught]
    broken = [outcome for outcome in plain if not outcome.passed]
    for outcome in broken:
        console.print(f"fails without a mutation: {outcome.explain()}")
    console.print(
        f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutations caught, "
        f"{len(plain) - len(broken)} of {len(plain)} unharmed cases pass"
    )
    return 1 if survivors or broken else 0
