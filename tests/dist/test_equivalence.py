"""Every mapping trains the same model as one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fold.verify import launch
from lightning_fold.verify.compare import Outcome
from lightning_fold.verify.launch import run_world
from lightning_fold.verify.plan import QUICK, WORLDS, Case, full, mappings_of
from lightning_fold.verify.suite import coverage, is_complete, run_cases

# A world's ranks run all their cases inside the first test of that world.
pytestmark = pytest.mark.timeout(3600)

TP2 = Case("decoder", "tp2cp1dp1pp1-etp1ep2edp1")


def as_param(case: Case) -> object:
    marks = [pytest.mark.dist(case.folding.world)]
    marks += [] if case in QUICK else [pytest.mark.slow]
    return pytest.param(case, id=case.key, marks=marks)


ALL = dict.fromkeys([*QUICK, *(case for world in WORLDS for case in full(world))])


@pytest.mark.parametrize("case", [as_param(case) for case in ALL])
def test_training_matches_single_process(case: Case, outcome_of: Callable[[Case], Outcome]) -> None:
    outcome = outcome_of(case)
    assert outcome.passed, outcome.explain()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [Case("decoder", mapping) for mapping in mappings_of(world)],
            id=f"world{world}",
            marks=pytest.mark.dist(world),
        )
        for world in WORLDS
    ],
)
def test_every_legal_mapping_ran_or_was_refused(
    cases: list[Case], outcome_of: Callable[[Case], Outcome]
) -> None:
    outcomes = {case: outcome_of(case) for case in cases}
    world = cases[0].folding.world
    assert is_complete(outcomes, world), coverage(outcomes.values(), world)


@pytest.mark.dist(3)
def test_refusal_is_recorded_with_its_reason(tmp_path: Path) -> None:
    case = Case("decoder", "tp3cp1dp1pp1-etp1ep1edp3")
    outcome = run_cases([case], tmp_path)[case]
    assert outcome.failure is None
    assert not outcome.passed
    assert "8 heads cannot be split over tp=3" in str(outcome.refusal)
    assert "1 refused of 9 legal" in coverage([outcome], 3)


# ------------------------------------------------------------ ranks that fail


def rank() -> int:
    return int(os.environ["RANK"])


def fail_on_rank_1(case: Case, folder: Path) -> None:
    if rank() == 1:
        time.sleep(0.5)
        raise ValueError("the shard is upside down")
    time.sleep(300)


def fail_everywhere_rank_0_first_to_tell(case: Case, folder: Path) -> None:
    if rank() == 0:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    time.sleep(0.5)
    raise ValueError("the cause on rank 1")


def hang_in_a_place_with_a_name(case: Case, folder: Path) -> None:
    time.sleep(300 if rank() == 1 else 0)


def die_silently_on_rank_1(case: Case, folder: Path) -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("run", "told"),
    [
        (fail_on_rank_1, ["rank 1 failed", "the shard is upside down"]),
        (fail_everywhere_rank_0_first_to_tell, ["rank 1 failed", "the cause on rank 1"]),
        (
            hang_in_a_place_with_a_name,
            ["rank 1 ended", "Timeout", "in hang_in_a_place_with_a_name"],
        ),
        (die_silently_on_rank_1, ["rank 1 was killed by signal 9"]),
    ],
)
def test_failing_rank_ends_the_run_and_is_named(
    run: Callable[[Case, Path], None], told: list[str], tmp_path: Path
) -> None:
    launch.run_world(1, [], tmp_path / "warm")
    start = time.monotonic()
    result = run_world(2, [TP2], tmp_path, case_timeout=3.0, run=run)
    assert time.monotonic() - start < 60
    assert result.failed_case == TP2.key
    for words in told:
        assert words in str(result.failure)
    assert "rank 0" not in str(result.failure)
