"""Schedules: complete, ordered, free of deadlock, equal to torch's where torch's are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_fold
from lightning_fold.pipeline import actions as ir
from lightning_fold.pipeline import registry as entries
from lightning_fold.pipeline import simulate
from lightning_fold.pipeline.actions import Action, B, F, I, W
from lightning_fold.pipeline.schedules import SCHEDULES, Plan, actions_of, check_schedule

VPPS = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved_1f1b": (2, 3, 4),
    "interleaved_zero_bubble": (2, 3),
    "zbv": (2,),
    "dualpipev": (2,),
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(entries._REGISTERED)
    yield
    entries._REGISTERED.clear()
    entries._REGISTERED.update(before)


@st.composite
def legal_plans(draw: Any, *, forward_only: bool = False) -> Plan:
    name = draw(st.sampled_from(sorted(VPPS)))
    pp, vpp = draw(st.integers(2, 8)), draw(st.sampled_from(VPPS[name]))
    rule = None if forward_only else SCHEDULES[name].rule
    numbers = [n for n in range(1, 3 * pp + 3) if rule is None or rule.holds(pp, vpp, n)]
    n = draw(st.sampled_from(numbers))
    group = None
    if name == "interleaved_1f1b":
        group = draw(st.none() | st.integers(pp, 2 * pp + 1))
    return actions_of(
        name, pp=pp, vpp=vpp, num_microbatches=n, forward_only=forward_only, group=group
    )


def computed(plan: Plan) -> Counter[tuple[int, int, str]]:
    return Counter(
        (action.stage_index, action.microbatch_index, action.computation_type.value)
        for listed in plan.actions.values()
        for action in listed
    )


def last_forwards(plan: Plan) -> list[int]:
    last = plan.num_stages - 1
    listed = plan.actions[plan.placement[last]]
    return [a.microbatch_index for a in listed if a.stage_index == last and a.computation_type == F]


def test_torch_has_every_name_that_is_used() -> None:
    assert [name for name in ir.__all__ if not hasattr(ir, name)] == []
    assert Action(3, F, 1)._fields[:3] == ("stage_index", "computation_type", "microbatch_index")
    assert str(Action(3, ir.SEND_F, 1)) == "3SEND_F1"
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert release >= (2, 13), "private names of torch.distributed.pipelining changed before"


@settings(max_examples=40, deadline=None)
@given(legal_plans())
def test_every_microbatch_is_computed_once_on_every_stage(plan: Plan) -> None:
    kinds = computed(plan)
    assert set(kinds.values()) == {1}
    assert not plan.overlap
    for stage in range(plan.num_stages):
        for m in range(plan.num_microbatches):
            found = "".join(kind for kind in "FBIW" if (stage, m, kind) in kinds)
            assert found == "FB" or (found == "FIW" and plan.delays_weights)
    assert last_forwards(plan) == list(range(plan.num_microbatches))
    for rank, listed in plan.lowered.items():
        bare = [action for action in listed if action.is_compute_op]
        assert bare == list(plan.actions[rank])
    ir.check_p2p_order(plan.lowered, plan.placement)
    assert len(simulate(plan).spans) == sum(kinds.values())


@settings(max_examples=30, deadline=None)
@given(legal_plans(forward_only=True))
def test_forward_only_lists_run_for_any_number_of_microbatches(plan: Plan) -> None:
    kinds = computed(plan)
    every = range(plan.num_microbatches)
    assert kinds == Counter((s, m, "F") for s in range(plan.num_stages) for m in every)
    assert last_forwards(plan) == list(every)
    assert not plan.delays_weights
    assert not plan.overlap
    # Ranks work at the same time: within a few slots of the least possible.
    least = plan.num_microbatches * plan.vpp
    assert simulate(plan).makespan <= least + plan.num_stages + plan.pp


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_lists_equal_those_of_torch(pp: int, extra: int) -> None:
    n = pp + extra
    gpipe = actions_of("gpipe", pp=pp, vpp=1, num_microbatches=n).actions
    assert gpipe == as_tuples(ir.torch_actions("ScheduleGPipe", pp, 1, n))
    ours = actions_of("1f1b", pp=pp, vpp=1, num_microbatches=n).actions
    theirs = as_tuples(ir.torch_actions("Schedule1F1B", pp, 1, n))
    assert {r: a for r, a in ours.items() if r < pp - 1} == {
        r: a for r, a in theirs.items() if r < pp - 1
    }
    # The defect that is the reason for a list of our own.
    assert Action(pp - 1, F, 0) not in theirs[pp - 1]


@pytest.mark.parametrize(
    ("pp", "vpp", "n"),
    [(2, 2, 2), (2, 2, 8), (2, 3, 8), (4, 2, 3), (4, 2, 8), (4, 3, 12), (4, 2, 10), (8, 4, 16)],
)
def test_interleaved_equals_that_of_torch(pp: int, vpp: int, n: int) -> None:
    ours = actions_of("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=n).actions
    assert ours == as_tuples(ir.torch_actions("ScheduleInterleaved1F1B", pp, vpp, n))


def as_tuples(actions: dict[int, list[Action]]) -> dict[int, tuple[Action, ...]]:
    return {rank: tuple(listed) for rank, listed in actions.items()}


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_halves_of_dualpipev_run_one_after_the_other(pp: int) -> None:
    for n in (2 * pp, 2 * pp + 1, 3 * pp + 1, 5 * pp):
        plan = actions_of("dualpipev", pp=pp, vpp=2, num_microbatches=n)
        pairs = [
            action.sub_actions
            for listed in ir.torch_actions("ScheduleDualPipeV", pp, 2, n).values()
            for action in listed
            if action.sub_actions is not None
        ]
        assert pairs
        assert not any(a.sub_actions for listed in plan.actions.values() for a in listed)
        for forward, backward in pairs:
            listed = plan.actions[plan.placement[forward.stage_index]]
            assert listed.index(forward) == listed.index(backward) + 1
        timeline = simulate(plan)
        assert max(timeline.peak_live.values()) <= 2 * pp + 1


def test_placements_and_stages() -> None:
    loop = actions_of("interleaved_1f1b", pp=4, vpp=2, num_microbatches=4)
    assert loop.placement == (0, 1, 2, 3, 0, 1, 2, 3)
    assert (loop.stages_of(1), loop.num_stages) == ((1, 5), 8)
    v = actions_of("zbv", pp=4, vpp=2, num_microbatches=8)
    assert v.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert (v.stages_of(0), v.stages_of(3)) == ((0, 7), (3, 4))
    assert v.delays_weights
    assert not loop.delays_weights


def test_equal_arguments_return_one_object() -> None:
    first = actions_of("zbv", pp=2, vpp=2, num_microbatches=4)
    assert actions_of("zbv", pp=2, vpp=2, num_microbatches=4) is first
    with pytest.raises(TypeError):
        first.actions[0] = ()  # type: ignore[index]


def test_no_messages_inside_a_rank() -> None:
    plan = actions_of("zbv", pp=2, vpp=2, num_microbatches=4)
    # Stages 1 and 2 are both on rank 1: nothing leaves stage 1 forwards, or stage 2 backwards.
    sent = {str(a) for listed in plan.lowered.values() for a in listed if "SEND" in str(a)}
    assert {name[:7] for name in sent} == {"0SEND_F", "2SEND_F", "3SEND_B", "1SEND_B"}


def test_one_rank_needs_no_messages() -> None:
    plan = actions_of("1f1b", pp=1, vpp=1, num_microbatches=2)
    assert list(map(str, plan.lowered[0])) == ["0F0", "0B0", "0F1", "0B1"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("zvb", 4, 2, 8), r"'zvb' is no schedule. Did you mean 'zbv'\? .*Change `pipeline_sched"),
        (("no", 4, 2, 8), r"'no' is no schedule. Legal pipeline_schedule: 'gpipe', '1f1b', "),
        (("1f1b", 4, 2, 8), r"4\*2 = 8 stages.*Legal pipeline_schedule for virtual_pipeline_size=2:"
         r" 'interleaved_1f1b', .*for '1f1b': 1\.  Change `virtual_pipeline_size`"),
        (("interleaved_1f1b", 4, 1, 8), r"for 'interleaved_1f1b': 2, 3, 4, \.\.\.  Change"),
        (("zbv", 4, 3, 12), r"4\*3 = 12 stages, 3 on each rank.*for 'zbv': 2\."),
        (("zbv", 4, 2, 7), r"pp\*vpp = 4\*2 = 8; num_microbatches=7. Legal num_microbatches: "
         r"8, 9, 10, \.\.\.  Change `num_microbatches`"),
        (("dualpipev", 4, 2, 7), r"needs as many microbatches as stages"),
        (("interleaved_zero_bubble", 4, 2, 11), r"11 // 4 = 2 rounds leave 11 % 2 = 1 over; "
         r"num_microbatches=11. Legal num_microbatches: 10, 12, 15, 16, \.\.\.  Change"),
        (("zbv", 1, 2, 8), r"pp = 1 has none. Legal pipeline_schedule for pp=1: 'gpipe', '1f1b'"),
        (("gpipe", 0, 1, 8), r"pipeline_parallel_size=0, .*Change `pipeline_parallel_size`"),
        (("gpipe", 2, True, 8), r"virtual_pipeline_size=True, .*Change `virtual_pipeline_size`"),
        (("gpipe", 2, 1, 1.0), r"num_microbatches=1.0, .*Change `num_microbatches`"),
    ],
)  # fmt: skip
def test_illegal_numbers_are_refused(arguments: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_schedule(*arguments)
    name, pp, vpp, n = arguments
    with pytest.raises(ValueError, match=match):
        actions_of(name, pp=pp, vpp=vpp, num_microbatches=n)


def test_what_is_legal_passes() -> None:
    check_schedule("zbv", 4, 2)
    check_schedule("zbv", 4, 2, 8)
    # Evaluation takes any number.
    assert actions_of("zbv", pp=4, vpp=2, num_microbatches=1, forward_only=True).forward_only


def test_groups_are_refused_where_there_are_none_and_below_pp() -> None:
    options: Any = {"pp": 4, "vpp": 2, "num_microbatches": 8}
    with pytest.raises(ValueError, match=r"'zbv' has no groups .*Change `group`"):
        actions_of("zbv", group=4, **options)
    with pytest.raises(ValueError, match=r"at least pp = 4. Legal group: 4, 5, 6, \.\.\.  Change"):
        actions_of("interleaved_1f1b", group=3, **options)


def test_groups_that_do_not_divide_grow_and_never_shrink() -> None:
    plan = actions_of("interleaved_1f1b", pp=4, vpp=2, num_microbatches=9)
    first = [str(action) for action in plan.actions[0][:11]]
    assert first == [*(f"0F{m}" for m in range(5)), *(f"4F{m}" for m in range(5)), "0F5"]


def stairs(*, pp: int, vpp: int, num_microbatches: int) -> dict[int, list[Action | None]]:
    return {
        rank: [
            None,
            *(
                Action(rank, kind, m)
                for m in range(num_microbatches)
                for kind in (F, B)
            ),
        ]
        for rank in range(pp)
    }  # fmt: skip


@pytest.mark.usefixtures("registry")
def test_a_registered_schedule_is_planned_and_checked() -> None:
    lightning_fold.register_schedule("stairs", stairs, virtual_stages=[1])
    plan = actions_of("stairs", pp=2, vpp=1, num_microbatches=2)
    assert list(map(str, plan.actions[1])) == ["1F0", "1B0", "1F1", "1B1"]
    with pytest.raises(ValueError, match=r"for 'stairs': 1\."):
        check_schedule("stairs", 2, 2)
    lightning_fold.register_schedule("stairs", stairs)
    check_schedule("stairs", 2, 2)


@pytest.mark.usefixtures("registry")
def test_a_registered_schedule_may_delay_weights_on_a_v() -> None:
    def late(*, pp: int, vpp: int, num_microbatches: int) -> Any:
        down = [Action(s, F, 0) for s in range(2 * pp)]
        up = [Action(s, I, 0) for s in reversed(range(2 * pp))]
        weights = [Action(s, W, 0) for s in range(2 * pp)]
        rank_of = [*range(pp), *reversed(range(pp))]
        return {
            rank: [a for a in (*down, *up, *weights) if rank_of[a.stage_index] == rank]
            for rank in range(pp)
        }

    lightning_fold.register_schedule("late", late, placement="v", delays_weights=True)
    plan = actions_of("late", pp=3, vpp=2, num_microbatches=1)
    assert list(map(str, plan.actions[1])) == ["1F0", "4F0", "4I0", "1I0", "1W0", "4W0"]
    lightning_fold.register_schedule("late", late, placement="v")
    with pytest.raises(ValueError, match=r"computes F I W for microbatch 0 .*should be F B"):
        actions_of("late", pp=3, vpp=2, num_microbatches=1)


def broken(change: Any) -> Any:
    def listed(*, pp: int, vpp: int, num_microbatches: int) -> Any:
        actions = stairs(pp=pp, vpp=vpp, num_microbatches=num_microbatches)
        change(actions)
        return actions

    return listed


def swap_ends(actions: Any) -> None:
    actions[1][1], actions[1][2] = actions[1][2], actions[1][1]


def swap_microbatches(actions: Any) -> None:
    actions[1][1:3], actions[1][3:5] = actions[1][3:5], actions[1][1:3]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a[0].pop(), r"rank 0 computes F for microbatch 1 on stage 0, .*be F B"),
        (lambda a: a[1].append(a[1][-1]), r"rank 1 computes F B B for microbatch 1 on stage 1"),
        (lambda a: a[0].append(Action(1, F, 0)), r"rank 0 computes F for microbatch 0 on stage 1,"
         r" which should be nothing"),
        (lambda a: a[0].append(Action(0, F, 2)), r"microbatch 2 on stage 0, .*be nothing"),
        (lambda a: a.pop(1), r"lists ranks \[0\], not 0 to 1"),
        (swap_ends, r"rank 1 computes B F"),
        (swap_microbatches, r"forwards run in the order \[1, 0\], not ascending"),
    ],
)  # fmt: skip
def test_lists_that_cannot_be_run_are_refused(change: Any, match: str) -> None:
    lightning_fold.register_schedule("broken", broken(change))
    with pytest.raises(ValueError, match=match) as e:
        actions_of("broken", pp=2, vpp=1, num_microbatches=2)
    assert "pipeline_schedule='broken' lists what cannot be run for pp=2 vpp=1" in str(e.value)


@pytest.mark.usefixtures("registry")
def test_a_deadlock_names_the_stuck_actions() -> None:
    def crossed(*, pp: int, vpp: int, num_microbatches: int) -> Any:
        return {
            0: [Action(0, F, 0), Action(0, B, 0), Action(0, F, 1), Action(0, B, 1)],
            1: [Action(1, F, 0), Action(1, F, 1), Action(1, B, 0), Action(1, B, 1)],
        }

    lightning_fold.register_schedule("crossed", crossed)
    match = r"wait for each other: rank 0 at 0B0, rank 1 at 1F1\.  Change `pipeline_schedule`"
    with pytest.raises(ValueError, match=match):
        actions_of("crossed", pp=2, vpp=1, num_microbatches=2)


@pytest.mark.usefixtures("registry")
def test_registrations_are_checked() -> None:
    with pytest.raises(ValueError, match="'zbv' is built in and cannot be replaced"):
        lightning_fold.register_schedule("zbv", stairs)
    with pytest.raises(TypeError, match="must be callable, not str"):
        lightning_fold.register_schedule("mine", "1f1b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="placement='w' is no placement"):
        lightning_fold.register_schedule("mine", stairs, placement="w")  # type: ignore[arg-type]
    for illegal, placement in (([], "loop"), ([0], "loop"), ([1, 3], "v")):
        with pytest.raises(ValueError, match="leaves no legal number of stages"):
            lightning_fold.register_schedule(
                "mine", stairs, virtual_stages=illegal, placement=placement
            )
    assert "mine" not in SCHEDULES


@pytest.mark.parametrize("kind", ["RECV_F", "RECV_B"])
def test_receives_in_another_order_than_the_sends_are_refused(kind: str) -> None:
    plan = actions_of("1f1b", pp=2, vpp=1, num_microbatches=4)
    lowered = {rank: list(listed) for rank, listed in plan.lowered.items()}
    rank = 1 if kind == "RECV_F" else 0
    first, second = (
        i for i, a in enumerate(lowered[rank]) if kind in str(a) and str(a)[-1] in "01"
    )
    lowered[rank][first], lowered[rank][second] = lowered[rank][second], lowered[rank][first]
    match = rf"message 0 from rank {1 - rank} to rank {rank} is sent as .* and received as {rank}"
    with pytest.raises(ValueError, match=match):
        ir.check_p2p_order(lowered, plan.placement)
    del lowered[rank][second]
    with pytest.raises(ValueError, match=r"from rank"):
        ir.check_p2p_order(lowered, plan.placement)
