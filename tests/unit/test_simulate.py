"""The clock: bubbles and live activations by formula, hops, costs by stage, deadlocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fold.pipeline.actions import Action, B, F
from lightning_fold.pipeline.schedules import actions_of
from lightning_fold.pipeline.simulate import Costs, simulate
from lightning_fold.pipeline.timeline import Timeline

# At pp 4 and 8 microbatches with F = I = W: bubble, and live chunks by rank.
FIGURES: dict[str, tuple[int, float, list[int]]] = {
    "gpipe": (1, 9 / 33, [8, 8, 8, 8]),
    "1f1b": (1, 9 / 33, [4, 3, 2, 1]),
    "interleaved_1f1b": (2, 4.5 / 28.5, [11, 9, 7, 5]),
    "interleaved_zero_bubble": (2, 1.5 / 25.5, [8, 7, 6, 5]),
    "zbv": (2, 1.5 / 25.5, [8, 8, 8, 8]),
    "dualpipev": (2, 1.5 / 25.5, [8, 8, 8, 9]),
}


def timeline_of(
    name: str, *, pp: int = 4, n: int = 8, vpp: int | None = None, hop: float = 0.0, **kwargs: Any
) -> Timeline:
    """Simulate a schedule whose ranks cost 1 for each of F, I and W, whatever their chunks."""
    vpp = vpp or FIGURES[name][0]
    plan = actions_of(name, pp=pp, vpp=vpp, num_microbatches=n, **kwargs)
    return simulate(plan, Costs(1 / vpp, 1 / vpp, 1 / vpp, hop))


@pytest.mark.parametrize("name", FIGURES)
def test_figures_at_four_ranks_and_eight_microbatches(name: str) -> None:
    _, bubble, live = FIGURES[name]
    timeline = timeline_of(name)
    assert timeline.bubble == pytest.approx(bubble, abs=1e-12)
    assert list(timeline.peak_live.values()) == live
    assert set(timeline.busy.values()) == {24.0}


def test_delayed_weights_beat_interleaving_which_beats_1f1b() -> None:
    bubbles = {name: timeline_of(name).bubble for name in FIGURES}
    assert bubbles["zbv"] < bubbles["interleaved_1f1b"] < bubbles["1f1b"]
    assert bubbles["1f1b"] == bubbles["gpipe"]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(1, 24))
def test_gpipe_and_1f1b_follow_their_formulas(pp: int, n: int) -> None:
    gpipe, one = timeline_of("gpipe", pp=pp, n=n), timeline_of("1f1b", pp=pp, n=n)
    assert gpipe.bubble == pytest.approx((pp - 1) / (n + pp - 1), abs=1e-12)
    assert one.bubble == pytest.approx(gpipe.bubble, abs=1e-12)
    assert one.peak_live == {rank: min(pp - rank, n) for rank in range(pp)}
    assert gpipe.peak_live == dict.fromkeys(range(pp), n)
    assert one.peak_live_of_stages == one.peak_live


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 3))
def test_interleaved_follows_its_formulas(pp: int, vpp: int, rounds: int) -> None:
    n = pp * rounds
    timeline = timeline_of("interleaved_1f1b", pp=pp, vpp=vpp, n=n)
    assert timeline.bubble == pytest.approx((pp - 1) / (vpp * n + pp - 1), abs=1e-12)
    warm_up = {rank: 2 * (pp - 1 - rank) + (vpp - 1) * pp for rank in range(pp)}
    assert timeline.peak_live == {rank: min(w + 1, n * vpp) for rank, w in warm_up.items()}


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 6), st.integers(0, 8))
def test_a_v_keeps_what_a_rank_of_1f1b_keeps_at_most(pp: int, extra: int) -> None:
    timeline = timeline_of("zbv", pp=pp, n=2 * pp + extra)
    assert timeline.peak_live == dict.fromkeys(range(pp), 2 * pp)
    assert max(timeline.peak_waiting.values()) <= 2 * pp - 1
    assert timeline_of("1f1b", pp=pp).peak_waiting == dict.fromkeys(range(pp), 0)


def test_larger_groups_cost_memory_and_hide_hops() -> None:
    found = {
        group: timeline_of("interleaved_1f1b", n=16, group=group, hop=0.1) for group in (4, 8, 16)
    }
    assert [max(t.peak_live.values()) for t in found.values()] == [11, 15, 23]
    assert found[4].makespan == pytest.approx(53.9)
    assert found[16].makespan == pytest.approx(53.1)
    without = timeline_of("interleaved_1f1b", n=16, group=16)
    assert without.bubble == pytest.approx(0.0857, abs=1e-4)


def test_a_hop_delays_every_border() -> None:
    plan = actions_of("gpipe", pp=3, vpp=1, num_microbatches=1)
    timeline = simulate(plan, Costs(2.0, 3.0, 5.0, hop=0.5))
    assert [(s.rank, s.kind, s.start_s, s.end_s) for s in timeline.spans] == [
        (0, "F", 0.0, 2.0),
        (0, "B", 24.0, 32.0),
        (1, "F", 2.5, 4.5),
        (1, "B", 15.5, 23.5),
        (2, "F", 5.0, 7.0),
        (2, "B", 7.0, 15.0),
    ]


def test_neighbouring_stages_on_a_rank_have_no_hop() -> None:
    plan = actions_of("zbv", pp=2, vpp=2, num_microbatches=1, forward_only=True)
    # 0 -> 1 and 2 -> 3 change the rank; 1 -> 2 does not.
    assert simulate(plan, Costs(1.0, hop=10.0)).makespan == 24.0


def test_costs_by_stage() -> None:
    plan = actions_of("1f1b", pp=2, vpp=1, num_microbatches=3)
    timeline = simulate(plan, Costs(forward=[1.0, 4.0], input_grad=[1.0, 2.0], weight_grad=0.5))
    assert timeline.busy == {0: 3 * 2.5, 1: 3 * 6.5}
    # The slow stage sets the pace.
    assert timeline.makespan == 1 + 3 * 6.5 + 1.5


def test_the_order_is_the_list() -> None:
    plan = actions_of("dualpipev", pp=4, vpp=2, num_microbatches=9)
    timeline = simulate(plan)
    for rank, listed in plan.actions.items():
        assert timeline.order(rank) == tuple(map(str, listed))
    assert Counter(s.rank for s in timeline.spans) == {r: len(a) for r, a in plan.actions.items()}


def test_measured_costs_are_those_that_were_simulated() -> None:
    costs = Costs(forward=[1.0, 2.0, 3.0, 4.0], input_grad=0.5, weight_grad=0.25)
    plan = actions_of("zbv", pp=2, vpp=2, num_microbatches=4)
    timeline = simulate(plan, costs)
    again = simulate(plan, Costs.measured(timeline))
    assert [s.end_s for s in again.spans] == pytest.approx([s.end_s for s in timeline.spans])
    whole = Costs.measured(simulate(actions_of("1f1b", pp=2, vpp=1, num_microbatches=2)))
    assert (whole.input_grad, whole.weight_grad) == ([2.0, 2.0], [0.0, 0.0])


def test_a_deadlock_names_the_stuck_actions() -> None:
    plan = actions_of("1f1b", pp=2, vpp=1, num_microbatches=2)
    crossed = {
        0: (Action(0, F, 0), Action(0, B, 0), Action(0, F, 1), Action(0, B, 1)),
        1: (Action(1, F, 0), Action(1, F, 1), Action(1, B, 0), Action(1, B, 1)),
    }
    match = "'1f1b' cannot go on, its ranks wait for each other: rank 0 at 0B0, rank 1 at 1F1"
    with pytest.raises(ValueError, match=match):
        simulate(replace(plan, actions=crossed))


@pytest.mark.parametrize(
    ("costs", "match"),
    [
        (Costs(forward=-1.0), r"forward=-1.0 is no duration.*Change `forward`"),
        (Costs(hop=float("nan")), r"hop=nan is no duration"),
        (Costs(weight_grad=[1.0, float("inf")]), r"weight_grad=inf is no duration"),
        (Costs(input_grad=[1.0]), r"input_grad has 1 costs for 2 stages"),
    ],
)
def test_costs_that_are_no_durations_are_refused(costs: Costs, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        simulate(actions_of("1f1b", pp=2, vpp=1, num_microbatches=2), costs)
