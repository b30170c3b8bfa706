"""Schedules: which rank computes what, in which order, as pure functions of a few integers.

Owns plans and the checks of their arguments. Invariant: every plan that leaves this file computes
each microbatch on each stage once, cannot deadlock, receives in the order of the sends, and has
the last stage's forwards in ascending order. Not here: which schedules there are (`registry`), what
an action takes (`simulate`) and who runs it (`executor`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from types import MappingProxyType

from lightning_fold.pipeline import orders
from lightning_fold.pipeline.actions import (
    Action,
    Actions,
    F,
    check_p2p_order,
    lower,
    with_pairs,
    without_pairs,
)
from lightning_fold.pipeline.registry import (
    SCHEDULES,
    MicrobatchRule,
    Schedule,
    quoted,
    register_schedule,
    schedule_of,
)

__all__ = [
    "SCHEDULES",
    "Plan",
    "Schedule",
    "actions_of",
    "check_count",
    "check_schedule",
    "plan_of",
    "register_schedule",
    "schedule_of",
]


@dataclass(frozen=True)
class Plan:
    """One step of a pipeline, for all its ranks. Ranks are coordinates on the pp axis.

    Attributes:
        actions: Computations of each rank, in order: F, B, and I and W where the weight gradients
            are delayed. With `overlap` some are pairs of `actions.pair`.
        lowered: The same with sends and receives.
        placement: Rank of each stage.
        delays_weights: Whether it has I and W in place of B somewhere.
        overlap: Whether pairs are kept; few microbatches may leave none.
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
    overlap: bool = False

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, in the order of the forward."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)


def check_schedule(
    name: str, pp: int, vpp: int, num_microbatches: int | None = None, *, overlap: bool = False
) -> None:
    """Refuse a schedule that there is not, or that cannot serve the numbers.

    Args:
        name: Its name.
        pp: Ranks of the pipeline.
        vpp: Stages of each rank.
        num_microbatches: Microbatches of one step; None leaves them unchecked.
        overlap: Whether pairs of a forward and a backward are asked for.

    Raises:
        ValueError: Names what breaks, the legal values and the argument to change.
    """
    schedule = schedule_of(name)
    check_count("pipeline_parallel_size", pp)
    check_count("virtual_pipeline_size", vpp)
    _check_stages(name, schedule, pp, vpp)
    if overlap and not schedule.overlaps:
        others = quoted(other for other, entry in SCHEDULES.items() if entry.overlaps)
        raise ValueError(
            f"pipeline_overlap=True weaves pairs of a forward and a backward, and "
            f"pipeline_schedule={name!r} has none. Legal pipeline_schedule with pairs: {others}.  "
            "Change `pipeline_overlap` or `pipeline_schedule`."
        )
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


def actions_of(
    name: str,
    *,
    pp: int,
    vpp: int,
    num_microbatches: int,
    forward_only: bool = False,
    group: int | None = None,
    overlap: bool = False,
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
        overlap: Keep the pairs of a forward and a backward that are woven, for schedules that
            have them; evaluation has none.

    Raises:
        ValueError: The numbers are illegal, or a registered schedule lists what cannot be run.
    """
    overlap = overlap and not forward_only
    check_schedule(name, pp, vpp, None if forward_only else num_microbatches, overlap=overlap)
    check_count("num_microbatches", num_microbatches)
    schedule = schedule_of(name)
    _check_group(name, schedule, pp, group)
    return plan_of(name, schedule, pp, vpp, num_microbatches, group, forward_only, overlap)


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
    overlap: bool = False,
) -> Plan:
    """The checked and lowered lists of a schedule, whatever its rule says of the numbers."""
    placement = _placement(schedule, pp, vpp)
    listed = (
        orders.forward_only(placement, num_microbatches)
        if forward_only
        else _list(schedule, pp, vpp, num_microbatches, group, overlap)
    )
    delays = schedule.delays_weights and not forward_only
    legal = {"F"} if forward_only else {"F B", "F I W"} if delays else {"F B"}
    try:
        actions = with_pairs(listed) if overlap else without_pairs(listed)
        _check_complete(without_pairs(actions), placement, num_microbatches, legal=legal)
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
        overlap=overlap,
    )


def _list(
    schedule: Schedule, pp: int, vpp: int, num_microbatches: int, group: int | None, overlap: bool
) -> Mapping[int, Sequence[Action | None]]:
    options: dict[str, int | bool | None] = {"group": group} if schedule.grouped else {}
    if schedule.takes_overlap:
        options["overlap"] = overlap
    return schedule.function(pp=pp, vpp=vpp, num_microbatches=num_microbatches, **options)


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
        others = quoted(other for other, entry in SCHEDULES.items() if entry.allows(1))
        raise ValueError(
            f"pipeline_schedule={name!r} fills the waits between ranks, and pp = 1 has none. "
            f"Legal pipeline_schedule for pp=1: {others}.  Change `pipeline_parallel_size` or "
            "`pipeline_schedule`."
        )
    others = quoted(other for other, entry in SCHEDULES.items() if entry.allows(vpp))
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
        others = quoted(other for other, entry in SCHEDULES.items() if entry.grouped)
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
