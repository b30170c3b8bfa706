"""Ranks start once a world and test run; tests read what became of their case.

Only the cases of the selected tests run, so `-k` on a mapping id is quick. The terminal summary
shows what was covered and how close it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from lightning_fold.verify.compare import Outcome
from lightning_fold.verify.plan import Case
from lightning_fold.verify.suite import coverage, norms_table, results_table, run_cases

OUTCOMES = pytest.StashKey[dict[Case, Outcome]]()


@pytest.fixture(scope="session")
def outcome_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Outcome]:
    """The outcome of a case; its world runs all selected cases when the first one is asked for."""
    outcomes = request.config.stash.setdefault(OUTCOMES, {})
    selected = _selected_cases(request.session.items)
    wanted = dict.fromkeys(case for case in selected if isinstance(case, Case))

    def outcome(case: Case) -> Outcome:
        if case not in outcomes:
            world = case.folding.world
            cases = [other for other in wanted if other.folding.world == world]
            outcomes.update(run_cases(cases, tmp_path_factory.mktemp(f"world{world}")))
        return outcomes[case]

    return outcome


def _selected_cases(items: list[pytest.Item]) -> Iterator[object]:
    for item in items:
        # Cases of other tests are for runs of their own.
        asks = "outcome_of" in getattr(item, "fixturenames", ())
        params = item.callspec.params if asks and hasattr(item, "callspec") else {}
        if "case" in params:
            yield params["case"]
        yield from params.get("cases", ())


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    outcomes = list(config.stash.get(OUTCOMES, {}).values())
    if not outcomes:
        return
    terminalreporter.section("equivalence with the single-process model: worst relative errors")
    console = Console(width=200, file=terminalreporter._tw._file)
    console.print(results_table(outcomes))
    console.print(norms_table(outcomes))
    # Pipelines are a selection, of which no count says how much they cover.
    foldings = [outcome.case.folding for outcome in outcomes]
    for world in sorted({folding.world for folding in foldings if folding.pp == 1}):
        console.print(coverage(outcomes, world))
