"""Every pipeline trains the same model as one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_fold.verify.compare import Outcome
from lightning_fold.verify.plan import WORLDS, Case
from lightning_fold.verify.plan_pipelines import QUICK, WOVEN, Way, pipelines

# A world's ranks run all their cases inside the first test of that world.
pytestmark = pytest.mark.timeout(3600)


def as_param(case: Case) -> object:
    marks = [pytest.mark.dist(case.folding.world)]
    marks += [] if case in (*QUICK, *WOVEN) else [pytest.mark.slow]
    return pytest.param(case, id=case.key, marks=marks)


# In a V the second rank has the two stages in the middle.
IDLE = Way("zbv", 2, 4, "Ettt|||L").case("decoder", "tp1cp1dp1pp2-etp1ep1edp1")
ALL = dict.fromkeys([*QUICK, *WOVEN, *(case for world in WORLDS for case in pipelines(world))])


@pytest.mark.parametrize("case", [as_param(case) for case in ALL])
def test_training_matches_single_process(case: Case, outcome_of: Callable[[Case], Outcome]) -> None:
    outcome = outcome_of(case)
    assert outcome.passed, outcome.explain()


@pytest.mark.parametrize("case", [pytest.param(IDLE, id="idle", marks=pytest.mark.dist(2))])
def test_rank_without_parameters_is_refused_by_all(
    case: Case, outcome_of: Callable[[Case], Outcome]
) -> None:
    outcome = outcome_of(case)
    assert outcome.failure is None
    assert "pipeline rank 1 has no parameters" in str(outcome.refusal)
