"""Schedules: which rank computes what, in which order, as pure functions of a few integers.

Owns the names that `pipeline_schedule` takes, their legal numbers, and the registry by which users
add their own. Invariant: every plan that leaves this file computes each microbatch on each stage
once, cannot deadlock, receives in the order of the sends, and has the last stage's forwards in
ascending order. Not here: what an action takes (`simulate`) and who runs it (`executor`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from types import MappingProxyType
from typing import Literal

from lightning_fold.pipeline import orders
from lightning_fold.pipeline.actions import (
    Action,
    Actions,
    F,
    check_p2p_order,
    lower,
    without_pairs,
)
from lightning_fold.topology.doctor import nearest

ScheduleFunction = Callable[..., Mapping[int, Sequence[Action | None]]]


@dataclass(frozen=True)
class MicrobatchRule:
    """Which numbers of microbatches a schedule can serve; both take (pp, vpp, microbatches)."""

    holds: Callable[[int, int, int], bool]
    equation: Callable[[int, int, int], str]


@dataclass(frozen=True)
class Schedule:
    """An entry of the registry.

    Attributes:
        function: Takes `pp`, `vpp` and `num_microbatches`, and `group` where `grouped`, by keyword
            and returns every rank's computations; None in them is an idle slot.
        placement: `loop` puts stage s on rank s % pp; `v` goes to the last rank and back.
        virtual_stages: Legal stages per rank, ascending; None is any.
        delays_weights: Whether it lists weight gradients apart, as I and W.
        rule: Legal numbers of microbatches; None is any.
        grouped: Whether it takes a microbatch group size.
    """

    function: ScheduleFunction
    placement: Literal["loop", "v"] = "loop"
    virtual_stages: Sequence[int] | None = None
    delays_weights: bool = False
    rule: MicrobatchRule | None = None
    grouped: bool = False

    def allows(self, vpp: int) -> bool:
        """Say whether a rank may have so many stages."""
        return self.virtual_stages is None or vpp in self.virtual_stages

    def serves(self, pp: int, vpp: int, num_microbatches: int) -> bool:
        """Say whether it has an order for so many microbatches."""
        return self.rule is None or self.rule.holds(pp, vpp, num_microbatches)

    @property
    def least_stages(self) -> int:
        """The smallest legal number of stages per rank."""
        return 1 if self.virtual_stages is None else self.virtual_stages[0]


@dataclass(frozen=True)
class Plan:
    """One step of a pipeline, for all its ranks. Ranks are coordinates on the pp axis.

    Attributes:
        actions: Computations of each rank, in order: F, B, and I and W where the weight gradients
            are delayed.
        lowered: The same with sends and receives.
        placement: Rank of each stage.
        delays_weights: Whether it has I and W in place of B somewhere.
    """

    name: str
    pp: int
    vpp: int
    num_microbatches: int
    actions: Mapping[int, tuple[Action, ...]]
    lowered: Mapping[int, tuple[Action, ...]]
    placement: tuple[int, ...]
    delays_weights: bool
    forward_only: bool = False

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, in the order of the forward."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)


def register_schedule(
    name: str,
    function: ScheduleFunction,
    *,
    placement: Literal["loop", "v"] = "loop",
    virtual_stages: Iterable[int] | None = None,
    delays_weights: bool = False,
) -> None:
    """Make `FoldedMoEStrategy(pipeline_schedule=name)` use a schedule of yours.

    Args:
        name: Any name but those built in; an earlier entry of this name is replaced.
        function: Takes `pp`, `vpp` and `num_microbatches` by keyword and returns a list of
            `lightning_fold.pipeline.Action` for each rank, computations only. A ValueError that
            it raises reaches the user; its lists are checked whenever they are made.
        placement: `loop` puts stage s on rank s % pp; `v` puts the second half of the stages on
            the ranks in descending order. V needs exactly two stages per rank.
        virtual_stages: Legal stages per rank; None is any.
        delays_weights: Whether the lists hold I and W in place of B.

    Raises:
        ValueError: The name is built in, the placement unknown, or no number of stages legal.
        TypeError: The function cannot be called.
    """
    if name in BUILT_IN:
        raise ValueError(
            f"schedule {name!r} is built in and cannot be replaced. Legal: any name but "
            f"{_listed(BUILT_IN)}.  Change `name`."
        )
    if placement not in ("loop", "v"):
        raise ValueError(
            f"placement={placement!r} is no placement. Legal placement: 'loop', 'v'.  "
            "Change `placement`."
        )
    if not callable(function):
        kind = type(function).__name__
        raise TypeError(f"the function of schedule {name!r} must be callable, not {kind}")
    legal = None if virtual_stages is None else tuple(sorted(set(virtual_stages)))
    if placement == "v":
        legal = (2,) if legal is None or 2 in legal else ()
    if legal is not None and (not legal or legal[0] < 1):
        raise ValueError(
            f"virtual_stages={virtual_stages!r} with placement={placement!r} leaves no legal "
            "number of stages per rank. Legal: positive integers, and 2 for 'v'.  "
            "Change `virtual_stages`."
        )
    _REGISTERED[name] = Schedule(function, placement, legal, delays_weights)


def check_schedule(name: str, pp: int, vpp: int, num_microbatches: int | None = None) -> None:
    """Refuse a schedule that there is not, or that cannot serve the numbers.

    Args:
        name: Its name.
        pp: Ranks of the pipeline.
        vpp: Stages of each rank.
        num_microbatches: Microbatches of one step; None leaves them unchecked.

    Raises:
        ValueError: Names what breaks, the legal values and the argument to change.
    """
    schedule = schedule_of(name)
    check_count("pipeline_parallel_size", pp)
    check_count("virtual_pipeline_size", vpp)
    _check_stages(name, schedule, pp, vpp)
    if num_microbatches is None:
        return
    check_count("num_microbatches", num_microbatches)
    rule = schedule.rule
    if rule is not None and not schedule.serves(pp, vpp, num_microbatches):
        raise ValueError(
            f"pipeline_schedule={name!r} needs {rule.equation(pp, vpp, num_microbatches)}; "
            f"num_microbatches={num_microbatches}. Legal num_microbatches: "
            f"{_near(rule, pp, vpp, num_microbatches)}  Change `num_microbatches`."
        )


def check_count(name: str, number: object) -> None:
    """Refuse what is not a positive int; names it as the argument to change."""
    if type(number) is not int or number < 1:
        raise ValueError(
            f"{name}={number!r}, which must be a positive int. Legal {name}: 1, 2, 3, ...  "
            f"Change `{name}`."
        )


def schedule_of(name: str) -> Schedule:
    """Look a schedule up.

    Raises:
        ValueError: There is none of this name; names the nearest.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    likely = nearest(str(name), SCHEDULES)
    hint = f"Did you mean {likely!r}? " if likely else ""
    raise ValueError(
        f"pipeline_schedule={name!r} is no schedule. {hint}Legal pipeline_schedule: "
        f"{_listed(SCHEDULES)}; `lightning_fold.register_schedule` adds others.  "
        "Change `pipeline_schedule`."
    )


def actions_of(
    name: str,
    *,
    pp: int,
    vpp: int,
    num_microbatches: int,
    forward_only: bool = False,
    group: int | None = None,
) -> Plan:
    """Return the plan of one step, checked. Equal arguments return the same object.

    Args:
        name: A name of `SCHEDULES`.
        pp: Ranks of the pipeline.
        vpp: Stages of each rank.
        num_microbatches: Microbatches of one step.
        forward_only: Leave every backward out, for evaluation; then any number of microbatches
            is legal.
        group: Microbatches that a stage takes before the rank turns to its next stage, for
            schedules that are grouped; None is pp. Larger groups hide the latency of messages and
            cost activations. Where it does not divide the microbatches, groups grow by one.

    Raises:
        ValueError: The numbers are illegal, or a registered schedule lists what cannot be run.
    """
    check_schedule(name, pp, vpp, None if forward_only else num_microbatches)
    check_count("num_microbatches", num_microbatches)
    schedule = schedule_of(name)
    _check_group(name, schedule, pp, group)
    return plan_of(name, schedule, pp, vpp, num_microbatches, group, forward_only)


def _has_equal_rounds(pp: int, vpp: int, num_microbatches: int) -> bool:
    return num_microbatches % max(1, num_microbatches // pp) == 0


def _say_equal_rounds(pp: int, vpp: int, num_microbatches: int) -> str:
    rounds = max(1, num_microbatches // pp)
    return (
        f"equal rounds, but {num_microbatches} // pp = {num_microbatches} // {pp} = {rounds} "
        f"rounds leave {num_microbatches} % {rounds} = {num_microbatches % rounds} over"
    )


_ENOUGH = MicrobatchRule(
    lambda pp, vpp, n: n >= pp * vpp,
    lambda pp, vpp, n: f"as many microbatches as stages, pp*vpp = {pp}*{vpp} = {pp * vpp}",
)
_ROUNDS = MicrobatchRule(_has_equal_rounds, _say_equal_rounds)
_SEVERAL = range(2, sys.maxsize)
_REGISTERED: dict[str, Schedule] = {
    "gpipe": Schedule(orders.gpipe, virtual_stages=(1,)),
    "1f1b": Schedule(orders.one_f_one_b, virtual_stages=(1,)),
    "interleaved_1f1b": Schedule(orders.interleaved_1f1b, virtual_stages=_SEVERAL, grouped=True),
    "interleaved_zero_bubble": Schedule(
        orders.interleaved_zero_bubble, virtual_stages=_SEVERAL, delays_weights=True, rule=_ROUNDS
    ),
    "zbv": Schedule(orders.zbv, "v", (2,), delays_weights=True, rule=_ENOUGH),
    "dualpipev": Schedule(orders.dualpipev, "v", (2,), delays_weights=True, rule=_ENOUGH),
}
BUILT_IN = tuple(_REGISTERED)
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(_REGISTERED)
"""All schedules by name, users' included."""


# Evaluation and the last batch of an epoch have numbers of their own, so a run needs a few.
@lru_cache(maxsize=64)
def plan_of(
    name: str,
    schedule: Schedule,
    pp: int,
    vpp: int,
    num_microbatches: int,
    group: int | None,
    forward_only: bool,
) -> Plan:
    """The checked and lowered lists of a schedule, whatever its rule says of the numbers."""
    placement = _placement(schedule, pp, vpp)
    options = {"group": group} if schedule.grouped else {}
    listed = (
        orders.forward_only(placement, num_microbatches)
        if forward_only
        else schedule.function(pp=pp, vpp=vpp, num_microbatches=num_microbatches, **options)
    )
    actions = without_pairs(listed)
    delays = schedule.delays_weights and not forward_only
    legal = {"F"} if forward_only else {"F B", "F I W"} if delays else {"F B"}
    try:
        _check_complete(actions, placement, num_microbatches, legal=legal)
        lowered = lower(actions, placement)
        check_p2p_order(lowered, placement)
    except ValueError as error:
        raise ValueError(
            f"pipeline_schedule={name!r} lists what cannot be run for pp={pp} vpp={vpp} "
            f"num_microbatches={num_microbatches}: {error}.  Change `pipeline_schedule`."
        ) from None
    return Plan(
        name=name,
        pp=pp,
        vpp=vpp,
        num_microbatches=num_microbatches,
        actions=MappingProxyType(actions),
        lowered=MappingProxyType(lowered),
        placement=placement,
        delays_weights=delays,
        forward_only=forward_only,
    )


def _placement(schedule: Schedule, pp: int, vpp: int) -> tuple[int, ...]:
    there = tuple(range(pp))
    return there + there[::-1] if schedule.placement == "v" else there * vpp


def _check_complete(
    actions: Actions, placement: Sequence[int], num_microbatches: int, *, legal: set[str]
) -> None:
    """Refuse lists that leave something out, repeat it, misplace it or turn it around."""
    if set(actions) != set(placement):
        raise ValueError(f"it lists ranks {sorted(actions)}, not 0 to {max(placement)}")
    kinds: defaultdict[tuple[int, int, int | None], list[str]] = defaultdict(list)
    for rank, listed in actions.items():
        for stage, kind, microbatch, _ in listed:
            kinds[rank, stage, microbatch].append(kind.value)
    every = range(num_microbatches)
    wanted = {(rank, stage, m) for stage, rank in enumerate(placement) for m in every}
    for rank, stage, microbatch in sorted(wanted) + [key for key in kinds if key not in wanted]:
        found = " ".join(kinds.get((rank, stage, microbatch), ()))
        expected = legal if (rank, stage, microbatch) in wanted else {"nothing"}
        if found not in expected:
            raise ValueError(
                f"rank {rank} computes {found or 'nothing'} for microbatch {microbatch} on stage "
                f"{stage}, which should be {' or '.join(sorted(expected))}"
            )
    last = len(placement) - 1
    order = [a.microbatch_index for a in actions[placement[last]] if a[:2] == (last, F)]
    if order != list(every):
        raise ValueError(f"the last stage's forwards run in the order {order}, not ascending")


def _check_stages(name: str, schedule: Schedule, pp: int, vpp: int) -> None:
    if schedule.allows(vpp) and (pp > 1 or schedule.allows(1)):
        return
    if pp == 1 and not schedule.allows(1):
        others = _listed(other for other, entry in SCHEDULES.items() if entry.allows(1))
        raise ValueError(
            f"pipeline_schedule={name!r} fills the waits between ranks, and pp = 1 has none. "
            f"Legal pipeline_schedule for pp=1: {others}.  Change `pipeline_parallel_size` or "
            "`pipeline_schedule`."
        )
    others = _listed(other for other, entry in SCHEDULES.items() if entry.allows(vpp))
    raise ValueError(
        f"pipeline_schedule={name!r} cannot run pp*vpp = {pp}*{vpp} = {pp * vpp} stages, {vpp} on "
        f"each rank. Legal pipeline_schedule for virtual_pipeline_size={vpp}: {others or 'none'}; "
        f"legal virtual_pipeline_size for {name!r}: {_numbers(schedule.virtual_stages or ())}  "
        "Change `virtual_pipeline_size` or `pipeline_schedule`."
    )


def _check_group(name: str, schedule: Schedule, pp: int, group: int | None) -> None:
    if group is None:
        return
    check_count("group", group)
    if not schedule.grouped:
        others = _listed(other for other, entry in SCHEDULES.items() if entry.grouped)
        raise ValueError(
            f"pipeline_schedule={name!r} has no groups of microbatches, but group={group}. Legal "
            f"pipeline_schedule with groups: {others}.  Change `group`."
        )
    if group < pp:
        raise ValueError(
            f"group={group} microbatches come back to their rank before it has sent them all: "
            f"group must be at least pp = {pp}. Legal group: {_numbers(range(pp, sys.maxsize))}  "
            "Change `group`."
        )


def _near(rule: MicrobatchRule, pp: int, vpp: int, num_microbatches: int) -> str:
    def legal(numbers: Iterable[int]) -> Iterator[int]:
        return (number for number in numbers if rule.holds(pp, vpp, number))

    below = islice(legal(range(num_microbatches - 1, 0, -1)), 1)
    above = islice(legal(count(num_microbatches + 1)), 3)
    return ", ".join(map(str, [*below, *above])) + ", ..."


def _numbers(legal: Sequence[int]) -> str:
    return ", ".join(map(str, legal[:3])) + (", ..." if len(legal) > 3 else ".")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
