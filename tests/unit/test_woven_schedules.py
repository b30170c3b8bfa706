"""Woven schedules: pairs are kept, complete, lowered around, free of deadlock, and on the clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import lightning_fold
from lightning_fold.pipeline import actions as ir
from lightning_fold.pipeline import registry as entries
from lightning_fold.pipeline.actions import OVERLAP_F_B, Action, B, F, I, W, halves, pair
from lightning_fold.pipeline.orders import _in_turns
from lightning_fold.pipeline.schedules import (
    SCHEDULES,
    Plan,
    actions_of,
    check_schedule,
    plan_of,
)
from lightning_fold.pipeline.short import actions_of_few
from lightning_fold.pipeline.simulate import Costs, simulate
from lightning_fold.pipeline.timeline import Timeline

WOVEN = ("1f1b", "interleaved_1f1b", "dualpipev")
SHAPES = [
    (name, pp, vpp)
    for name, vpps in (("1f1b", (1,)), ("interleaved_1f1b", (2, 3)), ("dualpipev", (2,)))
    for pp in (2, 3, 4)
    for vpp in vpps
]


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(entries._REGISTERED)
    yield
    entries._REGISTERED.clear()
    entries._REGISTERED.update(before)


def woven(name: str, *, pp: int, n: int, vpp: int | None = None, **kwargs: Any) -> Plan:
    vpp = vpp or SCHEDULES[name].least_stages
    return actions_of(name, pp=pp, vpp=vpp, num_microbatches=n, overlap=True, **kwargs)


def plans(name: str, pp: int, vpp: int) -> Iterator[Plan]:
    for n in range(1, 3 * pp + 3):
        if not SCHEDULES[name].serves(pp, vpp, n):
            continue
        for group in (None, pp, pp + 1, 2 * pp) if SCHEDULES[name].grouped else (None,):
            yield woven(name, pp=pp, vpp=vpp, n=n, group=group)


def pairs_of(plan: Plan) -> dict[int, list[Action]]:
    return {
        rank: [action for action in listed if action.sub_actions is not None]
        for rank, listed in plan.actions.items()
    }


def shown(plan: Plan, rank: int) -> list[str]:
    return list(map(str, plan.actions[rank]))


@pytest.mark.parametrize(("name", "pp", "vpp"), SHAPES)
def test_every_microbatch_is_computed_once_on_every_stage(name: str, pp: int, vpp: int) -> None:
    for plan in plans(name, pp, vpp):
        flat = ir.without_pairs(plan.actions)
        found = Counter(action for listed in flat.values() for action in listed)
        every = [(s, m) for s in range(pp * vpp) for m in range(plan.num_microbatches)]
        assert set(found.values()) == {1}
        for stage, m in every:
            kinds = {k.value for k in (F, B, I, W) if Action(stage, k, m) in found}
            assert kinds == {"F", "B"} or (kinds == {"F", "I", "W"} and name == "dualpipev")
        last = len(plan.placement) - 1
        assert [a[2] for a in flat[plan.placement[last]] if a[:2] == (last, F)] == list(
            range(plan.num_microbatches)
        )
        for action in (action for listed in pairs_of(plan).values() for action in listed):
            assert action[:3] == (-1, OVERLAP_F_B, None)
            forward, backward = action.sub_actions
            assert (forward.computation_type, backward.computation_type) == (F, B)
            assert forward.microbatch_index > backward.microbatch_index


@pytest.mark.parametrize(("name", "pp", "vpp"), SHAPES)
def test_receives_stand_before_a_pair_and_sends_after_it(name: str, pp: int, vpp: int) -> None:
    for plan in plans(name, pp, vpp):
        ir.check_p2p_order(plan.lowered, plan.placement)
        for rank, listed in plan.lowered.items():
            assert [a for a in listed if a.is_compute_op] == list(plan.actions[rank])
            check_inputs(plan, rank)


def check_inputs(plan: Plan, rank: int) -> None:
    """Walk through a list: what is used has been received, or made by an earlier action."""
    there: set[tuple[Any, int, int]] = set()
    last = plan.num_stages - 1
    for action in plan.lowered[rank]:
        stage, kind, m, _ = action
        if kind in (ir.RECV_F, ir.RECV_B):
            there.add(("F" if kind == ir.RECV_F else "B", stage, m))
        elif kind in (ir.SEND_F, ir.SEND_B):
            assert ("F" if kind == ir.SEND_F else "B", stage + (1, -1)[kind == ir.SEND_B], m) in (
                there
            ), action
        else:
            made = set()
            for s, half, number, _ in halves(action):
                if half == F:
                    assert s == 0 or ("F", s, number) in there, action
                    made |= {("F", s + 1, number), ("own", s, number)}
                elif half in (B, I):
                    assert ("own", s, number) in there, action
                    assert s == last or ("B", s, number) in there, action
                    made.add(("B", s - 1, number))
            there |= made


@pytest.mark.parametrize(("name", "pp", "vpp"), SHAPES)
def test_the_clock_goes_through_and_counts_each_half_once(name: str, pp: int, vpp: int) -> None:
    for plan in plans(name, pp, vpp):
        timeline = simulate(plan, Costs(hop=0.25))
        for rank, listed in ir.without_pairs(plan.actions).items():
            assert timeline.order(rank) == tuple(map(str, listed))
            assert timeline.busy[rank] == pytest.approx(3 * vpp * plan.num_microbatches)
        for spans in timeline.by_rank.values():
            for span, behind in pairwise(spans):
                assert behind.start_s >= span.end_s - 1e-9


@pytest.mark.parametrize(("name", "pp", "vpp"), SHAPES)
def test_all_ranks_of_a_stage_have_one_list(name: str, pp: int, vpp: int) -> None:
    """Collectives of a pair are launched in the order of the list, on every rank of a stage."""
    n = 3 * pp
    first = woven(name, pp=pp, vpp=vpp, n=n)
    assert woven(name, pp=pp, vpp=vpp, n=n) is first
    plan_of.cache_clear()
    again = woven(name, pp=pp, vpp=vpp, n=n)
    assert again is not first
    assert again == first
    assert first.overlap
    plain = actions_of(name, pp=pp, vpp=vpp, num_microbatches=n)
    assert not plain.overlap
    assert not any(pairs_of(plain).values())


def test_1f1b_warms_up_twice_as_far_and_one() -> None:
    plan = woven("1f1b", pp=2, n=4)
    assert shown(plan, 0) == ["0F0", "0F1", "0F2", "(0F3;0B0)OVERLAP_F_B", "0B1", "0B2", "0B3"]
    assert shown(plan, 1) == [
        "1F0",
        *(f"(1F{m};1B{m - 1})OVERLAP_F_B" for m in (1, 2, 3)),
        "1B3",
    ]
    assert list(map(str, plan.lowered[1][:7])) == [
        "1RECV_F0",
        "1F0",
        "1RECV_F1",
        "(1F1;1B0)OVERLAP_F_B",
        "1SEND_B0",
        "1RECV_F2",
        "(1F2;1B1)OVERLAP_F_B",
    ]
    for pp in (1, 2, 3, 4, 8):
        for n in (1, 2 * pp - 1, 2 * pp, 4 * pp):
            plan = woven("1f1b", pp=pp, n=n)
            for rank, pairs in pairs_of(plan).items():
                warm_up = min(n, 2 * (pp - 1 - rank) + 1)
                assert [a.computation_type for a in plan.actions[rank][:warm_up]] == [F] * warm_up
                assert len(pairs) == n - warm_up


@pytest.mark.parametrize("vpp", [2, 3])
def test_interleaved_warms_up_one_further(vpp: int) -> None:
    for pp in (2, 3, 4):
        for n in (1, pp, 3 * pp, 3 * pp + 1):
            plan = woven("interleaved_1f1b", pp=pp, vpp=vpp, n=n)
            plain = actions_of("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=n)
            for rank, pairs in pairs_of(plan).items():
                kinds = [a.computation_type for a in plain.actions[rank]]
                # The turns begin with a forward.
                warm_up = min(kinds.index(B), n * vpp)
                assert len(pairs) == n * vpp - warm_up
                assert plan.actions[rank][:warm_up] == plain.actions[rank][:warm_up]


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_dualpipev_keeps_the_pairs_of_torch(pp: int) -> None:
    for n in (2 * pp, 2 * pp + 3, 5 * pp):
        plan = woven("dualpipev", pp=pp, n=n)
        theirs = ir.torch_actions("ScheduleDualPipeV", pp, 2, n)
        assert plan.actions == {rank: tuple(listed) for rank, listed in theirs.items()}
        assert all(pairs_of(plan).values())
        assert plan.delays_weights


def test_too_few_microbatches_for_a_pair_are_legal() -> None:
    for name in ("1f1b", "interleaved_1f1b"):
        plan = woven(name, pp=4, n=1)
        assert plan.overlap
        assert not any(pairs_of(plan).values())
    few = actions_of_few("dualpipev", pp=4, vpp=2, num_microbatches=3)
    assert (few.overlap, any(pairs_of(few).values())) == (False, False)


@pytest.mark.parametrize("name", ["gpipe", "zbv", "interleaved_zero_bubble"])
def test_schedules_without_pairs_are_refused(name: str) -> None:
    vpp = SCHEDULES[name].least_stages
    match = (
        rf"pipeline_overlap=True .* pipeline_schedule='{name}' has none. Legal pipeline_schedule "
        r"with pairs: '1f1b', 'interleaved_1f1b', 'dualpipev'\.  Change `pipeline_overlap` or "
        r"`pipeline_schedule`\."
    )
    with pytest.raises(ValueError, match=match):
        check_schedule(name, 4, vpp, overlap=True)
    with pytest.raises(ValueError, match=match):
        woven(name, pp=4, n=8)
    check_schedule(name, 4, vpp, 8)


def test_what_can_weave_passes_and_evaluation_never_does() -> None:
    assert {name for name, entry in SCHEDULES.items() if entry.overlaps} == set(WOVEN)
    for name in WOVEN:
        check_schedule(name, 4, SCHEDULES[name].least_stages, 8, overlap=True)
    for name in SCHEDULES:
        vpp = SCHEDULES[name].least_stages
        plan = woven(name, pp=4, n=3, forward_only=True)
        assert plan is actions_of(name, pp=4, vpp=vpp, num_microbatches=3, forward_only=True)
        assert not plan.overlap


def turns(warm_up: Any, *, swapped: bool = False) -> Any:
    """1F1B in pairs, with `warm_up(pp, rank)` forwards before them."""

    def listed(*, pp: int, vpp: int, num_microbatches: int) -> Any:
        every = range(num_microbatches)
        found = {}
        for rank in range(pp):
            forwards = [Action(rank, F, m) for m in every]
            backwards = [Action(rank, B, m) for m in every]
            found[rank] = _in_turns(
                forwards, backwards, min(num_microbatches, warm_up(pp, rank)), True
            )
        if not swapped:
            return found
        return {
            rank: [
                a if a.sub_actions is None else Action(-1, OVERLAP_F_B, None, a.sub_actions[::-1])
                for a in actions
            ]
            for rank, actions in found.items()
        }

    return listed


def twice(pp: int, rank: int) -> int:
    return 2 * (pp - 1 - rank) + 1


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("swapped", [False, True])
def test_pairs_of_a_registered_schedule_are_kept(swapped: bool) -> None:
    lightning_fold.register_schedule("mine", turns(twice, swapped=swapped), overlaps=True)
    plan = actions_of("mine", pp=3, vpp=1, num_microbatches=7, overlap=True)
    # The forward stands first, whatever the function does.
    assert plan.actions == woven("1f1b", pp=3, n=7).actions
    assert plan.lowered == woven("1f1b", pp=3, n=7).lowered
    flat = actions_of("mine", pp=3, vpp=1, num_microbatches=7)
    assert flat.actions == ir.without_pairs(plan.actions)
    with pytest.raises(
        ValueError, match="with pairs: '1f1b', 'interleaved_1f1b', 'dualpipev', 'mi"
    ):
        woven("gpipe", pp=3, n=7)


@pytest.mark.usefixtures("registry")
def test_a_registered_schedule_is_told_where_it_asks() -> None:
    told = []

    def mine(*, pp: int, vpp: int, num_microbatches: int, overlap: bool) -> Any:
        told.append(overlap)
        return entries.orders.one_f_one_b(
            pp=pp, vpp=vpp, num_microbatches=num_microbatches, overlap=overlap
        )

    lightning_fold.register_schedule("mine", mine, overlaps=True)
    shape: Any = {"pp": 2, "vpp": 1, "num_microbatches": 5}
    assert actions_of("mine", overlap=True, **shape).actions == woven("1f1b", pp=2, n=5).actions
    assert actions_of("mine", **shape).actions == actions_of("1f1b", **shape).actions
    assert told == [True, False]
    lightning_fold.register_schedule("mine", mine)
    with pytest.raises(ValueError, match="pipeline_schedule='mine' has none"):
        actions_of("mine", overlap=True, **shape)


def changed(change: Any) -> Any:
    def listed(*, pp: int, vpp: int, num_microbatches: int) -> Any:
        actions = turns(twice)(pp=pp, vpp=vpp, num_microbatches=num_microbatches)
        change(actions)
        return actions

    return listed


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a[1].__setitem__(1, pair(Action(1, F, 1), Action(1, F, 2))),
         r"\(1F1;1F2\)OVERLAP_F_B is no pair of one F and one B or I"),
        (lambda a: a[1].__setitem__(1, pair(Action(1, F, 1), Action(1, W, 0))),
         r"\(1F1;1W0\)OVERLAP_F_B is no pair"),
        (lambda a: a[1].__setitem__(1, Action(-1, OVERLAP_F_B, None, (Action(1, F, 1),))),
         r"is no pair"),
        (lambda a: a[1].__setitem__(1, Action(-1, OVERLAP_F_B, None,
         (Action(1, F, 1), Action(1, B, 0), Action(1, B, 1)))), r"is no pair"),
        (lambda a: a[1].__setitem__(slice(0, 2), [pair(Action(1, F, 0), Action(1, B, 0))]),
         r"halves of \(1F0;1B0\)OVERLAP_F_B wait for each other: 1B0 needs all forwards of "
         r"microbatch 0, and 1F0 is one"),
        (lambda a: a[1].__setitem__(1, pair(Action(1, F, 2), Action(1, B, 0))),
         r"rank 1 computes B for microbatch 1 on stage 1, which should be F B"),
        (lambda a: a[1].append(a[1][1]), r"rank 1 computes F B B for microbatch 0 on stage 1"),
        (lambda a: a[0].append(pair(Action(1, F, 3), Action(1, B, 2))),
         r"rank 0 computes B for microbatch 2 on stage 1, which should be nothing"),
    ],
)  # fmt: skip
def test_pairs_that_cannot_be_run_are_refused(change: Any, match: str) -> None:
    lightning_fold.register_schedule("broken", changed(change), overlaps=True)
    with pytest.raises(ValueError, match=match) as e:
        actions_of("broken", pp=2, vpp=1, num_microbatches=4, overlap=True)
    assert "pipeline_schedule='broken' lists what cannot be run for pp=2 vpp=1" in str(e.value)


@pytest.mark.usefixtures("registry")
def test_last_forwards_inside_pairs_have_to_ascend() -> None:
    def descending(*, pp: int, vpp: int, num_microbatches: int) -> Any:
        f, b = ([Action(0, kind, m) for m in range(3)] for kind in (F, B))
        return {0: [f[0], pair(f[2], b[0]), pair(f[1], b[2]), b[1]]}

    lightning_fold.register_schedule("descending", descending, overlaps=True)
    with pytest.raises(ValueError, match=r"order \[0, 2, 1\], not ascending"):
        actions_of("descending", pp=1, vpp=1, num_microbatches=3, overlap=True)


@pytest.mark.usefixtures("registry")
def test_pairs_that_close_a_cycle_between_ranks_are_named() -> None:
    """Each half could run alone: the pairs of neighbours need a result of each other."""
    lightning_fold.register_schedule(
        "closed", turns(lambda pp, rank: pp - rank - (rank == 0)), overlaps=True
    )
    assert actions_of("closed", pp=2, vpp=1, num_microbatches=4)
    match = r"wait for each other: rank 0 at \(0F1;0B0\)OVERLAP_F_B, rank 1 at \(1F1;1B0\)OVERLAP"
    with pytest.raises(ValueError, match=match):
        actions_of("closed", pp=2, vpp=1, num_microbatches=4, overlap=True)


def test_the_clock_names_the_pairs_that_are_stuck() -> None:
    plan = woven("1f1b", pp=2, n=4)
    closed = turns(lambda pp, rank: 1)(pp=2, vpp=1, num_microbatches=4)
    with pytest.raises(
        ValueError, match=r"rank 0 at \(0F1;0B0\)OVERLAP_F_B, rank 1 at \(1F1;1B0\)"
    ):
        simulate(replace(plan, actions=closed))


@pytest.mark.parametrize("kind", ["RECV_F", "RECV_B"])
def test_receives_around_pairs_in_another_order_are_refused(kind: str) -> None:
    plan = woven("1f1b", pp=2, n=6)
    lowered = {rank: list(listed) for rank, listed in plan.lowered.items()}
    rank = 1 if kind == "RECV_F" else 0
    first, second = [i for i, a in enumerate(lowered[rank]) if kind in str(a)][-2:]
    lowered[rank][first], lowered[rank][second] = lowered[rank][second], lowered[rank][first]
    with pytest.raises(ValueError, match=rf"from rank {1 - rank} to rank {rank} is sent as"):
        ir.check_p2p_order(lowered, plan.placement)


# The clock.

# At pp 4 and 8 microbatches with F = I = W: bubble, and live chunks by rank.
FIGURES: dict[str, tuple[float, list[int]]] = {
    "1f1b": (9 / 33, [8, 6, 4, 2]),
    "interleaved_1f1b": (4.5 / 28.5, [12, 10, 8, 6]),
    "dualpipev": (3 / 27, [9, 9, 9, 9]),
}


def timeline_of(plan: Plan, hop: float = 0.0) -> Timeline:
    """Ranks cost 1 for each of F, I and W, whatever their chunks."""
    return simulate(plan, Costs(1 / plan.vpp, 1 / plan.vpp, 1 / plan.vpp, hop))


@pytest.mark.parametrize("name", FIGURES)
def test_figures_at_four_ranks_and_eight_microbatches(name: str) -> None:
    bubble, live = FIGURES[name]
    timeline = timeline_of(woven(name, pp=4, n=8))
    assert timeline.bubble == pytest.approx(bubble, abs=1e-12)
    assert list(timeline.peak_live.values()) == live
    assert list(timeline.busy.values()) == pytest.approx([24.0] * 4)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("extra", "makespan"), [(1, 39.0), (2, 38.0)])
def test_one_forward_more_is_too_few_for_1f1b(extra: int, makespan: float) -> None:
    lightning_fold.register_schedule(
        "short", turns(lambda pp, rank: pp - 1 - rank + extra), overlaps=True
    )
    plan = actions_of("short", pp=4, vpp=1, num_microbatches=8, overlap=True)
    timeline = timeline_of(plan)
    assert timeline.makespan == pytest.approx(makespan)
    assert timeline.bubble > timeline_of(woven("1f1b", pp=4, n=8)).bubble


def test_both_results_of_a_pair_are_made_at_its_end() -> None:
    timeline = simulate(
        woven("1f1b", pp=2, n=3), Costs(forward=[1.0, 4.0], input_grad=3.0, weight_grad=3.0)
    )
    assert [(s.kind, s.microbatch, s.start_s, s.end_s) for s in timeline.by_rank[1][:5]] == [
        ("F", 0, 1.0, 5.0),
        ("B", 0, 5.0, 8.0),
        ("F", 1, 8.0, 10.0),
        ("B", 0, 10.0, 13.0),
        ("F", 1, 13.0, 15.0),
    ]
    first = next(span for span in timeline.by_rank[0] if span.kind == "B")
    assert (first.microbatch, first.start_s) == (0, 15.0)
    assert timeline.peak_live == {0: 3, 1: 2}


@pytest.mark.parametrize(
    ("forward", "backward", "pieces"),
    [
        # The forward's input comes in the second half of the backward, at 8.
        (1.0, 5.0, [("B", 5.0, 8.0), ("F", 8.0, 8.5), ("B", 8.5, 10.5), ("F", 10.5, 11.0)]),
        # It comes after it, at 8: the wait is shorter by all of the backward.
        (1.0, 2.0, [("B", 5.0, 7.0), ("F", 8.0, 9.0)]),
    ],
)
def test_a_backward_fills_the_wait_for_the_forward_of_its_pair(
    forward: float, backward: float, pieces: Any
) -> None:
    costs = Costs(forward=[4.0, forward], input_grad=backward, weight_grad=0.0)
    timeline = simulate(woven("1f1b", pp=2, n=3), costs)
    spans = timeline.by_rank[1]
    assert [(s.kind, s.start_s, s.end_s) for s in spans[1 : 1 + len(pieces)]] == pieces
    assert {s.microbatch for s in spans[1 : 1 + len(pieces)] if s.kind == "B"} == {0}


def test_a_pair_waits_for_its_backward() -> None:
    timeline = simulate(woven("1f1b", pp=2, n=4), Costs(forward=[1.0, 5.0], hop=1.0))
    # Rank 0 has its last forward at hand from 3 on, and starts it in the pair with backward 0.
    (turn,) = [n for n, s in enumerate(timeline.by_rank[0]) if s.kind == "B"][:1]
    assert timeline.by_rank[0][turn].start_s > 10
    assert timeline.by_rank[0][turn + 1].kind == "F"


@pytest.mark.parametrize("name", WOVEN)
def test_measured_costs_are_those_that_were_simulated(name: str) -> None:
    plan = woven(name, pp=2, n=6)
    stages = plan.num_stages
    costs = Costs([1.0 + s for s in range(stages)], [0.5] * stages, [0.25] * stages)
    timeline = simulate(plan, costs)
    again = simulate(plan, Costs.measured(timeline))
    assert [s.end_s for s in again.spans] == pytest.approx([s.end_s for s in timeline.spans])
