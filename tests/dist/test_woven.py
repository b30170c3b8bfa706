"""Woven schedules on four ranks: what overlaps, in which order ranks launch, and odd runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rank_records import Records, read_records
from woven_ranks import MANY_ROWS, MANY_STEPS, run_woven

from lightning_fold.pipeline.schedules import actions_of
from lightning_fold.pipeline.simulate import simulate
from lightning_fold.verify.plan import Case

EP2 = "tp1cp1dp2pp2-etp1ep2edp1"
PLAIN = Case("plain", EP2, schedule="1f1b", num_microbatches=6)
WOVEN = (
    replace(PLAIN, overlap=True),
    Case("plain", EP2, schedule="dualpipev", virtual_stages=2, num_microbatches=6, overlap=True),
    Case(
        "plain",
        EP2,
        schedule="interleaved_1f1b",
        virtual_stages=2,
        num_microbatches=6,
        overlap=True,
    ),
)
LATE = replace(WOVEN[0], model="late")
STARVED = (replace(PLAIN, model="starved"), replace(WOVEN[1], model="starved"))
DROPOUT = (
    replace(WOVEN[0], model="dropout"),
    replace(WOVEN[0], model="dropout", feature="full"),
)
MANY = replace(PLAIN, model="many", num_microbatches=MANY_ROWS)
# A dp rank's microbatches: three schedules, a hundred a step.
MANY_LATE = [replace(case, model="many-late", num_microbatches=MANY_ROWS) for case in WOVEN]
CASES = (PLAIN, *WOVEN, LATE, *STARVED, *DROPOUT)

pytestmark = [pytest.mark.timeout(600), pytest.mark.dist(4)]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return read_records(4, CASES, tmp_path_factory.mktemp("woven"), run_woven)


@pytest.fixture(scope="module")
def long_records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = tmp_path_factory.mktemp("long")
    return read_records(4, [MANY, *MANY_LATE], folder, run_woven, case_timeout=1500.0)


def overlapped(record: dict[str, Any]) -> int:
    """Flights during which another microbatch's pieces, or another stage's, were computed."""
    found = 0
    for stage, m, issued, ready in record["flights"]:
        found += any(
            (other_stage, other) != (stage, m) and start < ready and end > issued
            for other_stage, other, start, end in record["computed"]
        )
    return found


def largest_difference(one: dict[str, Any], two: dict[str, Any]) -> float:
    """Of all weights, over the largest element of each."""
    assert one["weights"].keys() == two["weights"].keys()
    off = 0.0
    for name, values in one["weights"].items():
        scale = max(map(abs, values)) or 1.0
        pairs = zip(values, two["weights"][name], strict=True)
        off = max(off, max(abs(a - b) for a, b in pairs) / scale)
    return off


@pytest.mark.parametrize("case", WOVEN, ids=lambda case: case.schedule)
def test_all_stages_with_layers_are_woven(case: Case, records: Records) -> None:
    woven = sorted(stage for r in (0, 2) for stage in records[case][r]["woven"])
    assert woven == list(range(2 * case.virtual_stages))


@pytest.mark.parametrize("case", WOVEN, ids=lambda case: case.schedule)
def test_rows_travel_while_another_microbatch_is_computed(case: Case, records: Records) -> None:
    plan = actions_of(
        case.schedule, pp=2, vpp=case.virtual_stages, num_microbatches=6, overlap=True
    )
    for record in records[case]:
        listed = plan.actions[record["coordinates"]["pp"]]
        # In the last step; each pair has layers with an exchange either way.
        assert overlapped(record) >= sum(action.sub_actions is not None for action in listed) > 0
    assert all(overlapped(record) == 0 for record in records[PLAIN])


@pytest.mark.parametrize("case", [*WOVEN, LATE], ids=lambda case: f"{case.model}-{case.schedule}")
def test_peers_launch_in_one_order(case: Case, records: Records) -> None:
    by_stage: dict[int, list[Any]] = {}
    for record in records[case]:
        by_stage.setdefault(record["coordinates"]["pp"], []).append(record["launches"])
    for launches in by_stage.values():
        assert launches[0] == launches[1]
        assert launches[0]


def test_the_order_is_not_that_of_arrival(records: Records) -> None:
    for late, usual in zip(records[LATE], records[WOVEN[0]], strict=True):
        assert late["launches"] == usual["launches"]
        assert largest_difference(late, usual) == 0.0


@pytest.mark.parametrize("case", WOVEN, ids=lambda case: case.schedule)
def test_each_pass_has_one_exchange_in_flight(case: Case, records: Records) -> None:
    assert max(record["most_passes"] for record in records[case]) == 2
    assert max(record["most_passes"] for record in records[PLAIN]) == 1


@pytest.mark.parametrize("case", WOVEN, ids=lambda case: case.schedule)
def test_live_microbatches_are_the_clocks(case: Case, records: Records) -> None:
    plan = actions_of(
        case.schedule, pp=2, vpp=case.virtual_stages, num_microbatches=6, overlap=True
    )
    clock = simulate(plan)
    for record in records[case]:
        assert record["peak_live"] == clock.peak_live[record["coordinates"]["pp"]]


@pytest.mark.parametrize("case", WOVEN, ids=lambda case: case.schedule)
def test_weaving_changes_nothing(case: Case, records: Records) -> None:
    assert largest_difference(records[case][0], records[PLAIN][0]) < 1e-12


def test_a_rank_without_rows_takes_part(records: Records) -> None:
    plain, woven = (records[case] for case in STARVED)
    assert largest_difference(plain[0], woven[0]) < 1e-12


def test_dropped_numbers_are_drawn_again_alike(records: Records) -> None:
    none, full = (records[case] for case in DROPOUT)
    assert largest_difference(none[0], full[0]) < 1e-12
    assert largest_difference(none[0], records[WOVEN[0]][0]) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_woven_microbatches_of_late_ranks_train_the_same(
    long_records: Records,
) -> None:
    assert len(MANY_LATE) * MANY_ROWS * MANY_STEPS >= 10_000
    for case in MANY_LATE:
        assert long_records[case][0]["num_launches"] == long_records[MANY][0]["num_launches"]
        assert largest_difference(long_records[case][0], long_records[MANY][0]) < 1e-10
