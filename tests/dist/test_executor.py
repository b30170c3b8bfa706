"""The executor against the clock: order, makespan, bubble and memory of every schedule."""

from __future__ import annotations

import pytest
from executor_ranks import UNIT_S, WIDTH, run_schedule
from rank_records import Records, read_records

from lightning_fold.pipeline.schedules import Plan, actions_of
from lightning_fold.pipeline.simulate import Costs, simulate
from lightning_fold.pipeline.timeline import Span, Timeline
from lightning_fold.verify.plan import Case

COUNT = 6
SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)
MAPPING = {pp: f"tp1cp1dp1pp{pp}-etp1ep1edp1" for pp in (2, 4)}
TWO = tuple(
    Case("slots", MAPPING[2], schedule=name, virtual_stages=vpp, num_microbatches=COUNT)
    for name, vpp in SCHEDULES
)
FOUR = tuple(
    Case("slots", MAPPING[4], schedule=name, virtual_stages=vpp, num_microbatches=8)
    for name, vpp in SCHEDULES
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return read_records(2, TWO, tmp_path_factory.mktemp("two"), run_schedule)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return read_records(4, FOUR, tmp_path_factory.mktemp("four"), run_schedule)


def plan_of(case: Case) -> Plan:
    return actions_of(
        case.schedule,
        pp=case.folding.pp,
        vpp=case.virtual_stages,
        num_microbatches=case.num_microbatches or 1,
    )


def lines(case: Case, records: Records) -> tuple[Timeline, Timeline]:
    """What the clock says of a schedule, and what the ranks have seen."""
    spans = ([Span(*span) for span in record["spans"]] for record in records[case])
    return simulate(plan_of(case), Costs(UNIT_S, UNIT_S, UNIT_S)), Timeline.merged(spans)


def check_order(case: Case, records: Records) -> None:
    clock, seen = lines(case, records)
    for rank in range(case.folding.pp):
        assert seen.order(rank) == clock.order(rank)
        assert records[case][rank]["peak_live"] == clock.peak_live[rank]


@pytest.mark.dist(2)
@pytest.mark.parametrize("case", TWO, ids=lambda case: case.schedule)
def test_executed_order_and_live_microbatches_are_the_clocks(case: Case, two: Records) -> None:
    check_order(case, two)


@pytest.mark.dist(2)
@pytest.mark.parametrize("case", TWO, ids=lambda case: case.schedule)
def test_a_span_holds_all_that_its_action_computes(case: Case, two: Records) -> None:
    clock, seen = lines(case, two)
    assert seen.mean_durations.keys() == clock.mean_durations.keys()
    for key, least in clock.mean_durations.items():
        # Nothing shortens a sleep.
        assert seen.mean_durations[key] > 0.99 * least, key


@pytest.mark.slow
@pytest.mark.dist(4)
@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.schedule)
def test_so_they_are_on_four_ranks(case: Case, four: Records) -> None:
    check_order(case, four)


@pytest.mark.slow
@pytest.mark.dist(4)
@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.schedule)
def test_executed_makespan_and_bubble_are_the_clocks(case: Case, four: Records) -> None:
    clock, seen = lines(case, four)
    # A ratio to slots that sleep: a busy machine hardly stretches it, and nothing shortens it.
    assert 0.99 < seen.makespan / clock.makespan < 1.05
    assert abs(seen.bubble - clock.bubble) < 0.02


@pytest.mark.dist(2)
@pytest.mark.parametrize("case", TWO, ids=lambda case: case.schedule)
def test_gradients_of_microbatches_of_different_sizes_are_exact(case: Case, two: Records) -> None:
    grads = {int(s): g for record in two[case] for s, g in record["grads"].items()}
    stages = plan_of(case).num_stages
    product = 1
    for stage in range(stages):
        product *= 1 + stage
    rows = sum((m + 1) * (1 + m % 3) for m in range(COUNT))
    assert grads == {s: [product / (1 + s) * rows] * WIDTH for s in range(stages)}


@pytest.mark.dist(2)
@pytest.mark.parametrize("case", TWO, ids=lambda case: case.schedule)
def test_sent_activations_are_let_go(case: Case, two: Records) -> None:
    for record in two[case]:
        assert record["alive"] == 0
        # A message of each direction may be on its way, not all of the step's.
        assert record["peak_sent"] <= 3 < COUNT


def test_bubbles_of_the_schedules_are_in_the_published_order() -> None:
    bubble = {
        name: simulate(actions_of(name, pp=4, vpp=vpp, num_microbatches=8)).bubble
        for name, vpp in SCHEDULES
    }
    assert bubble["zbv"] < bubble["interleaved_1f1b"] < bubble["1f1b"] == bubble["gpipe"]
