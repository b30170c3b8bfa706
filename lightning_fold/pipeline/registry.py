"""The registry of schedules: what each one is, and how users add theirs.

Owns the names that `pipeline_schedule` takes and the numbers of stages and microbatches that each
can serve. Makes no lists (`orders`) and checks none (`schedules`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lightning_fold.pipeline import orders
from lightning_fold.pipeline.actions import Action
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
        function: Takes `pp`, `vpp` and `num_microbatches`, `group` where `grouped`, and `overlap`
            where it has such a parameter, by keyword, and returns every rank's computations; None
            in them is an idle slot.
        placement: `loop` puts stage s on rank s % pp; `v` goes to the last rank and back.
        virtual_stages: Legal stages per rank, ascending; None is any.
        delays_weights: Whether it lists weight gradients apart, as I and W.
        rule: Legal numbers of microbatches; None is any.
        grouped: Whether it takes a microbatch group size.
        overlaps: Whether it has OVERLAP_F_B pairs, or has them when it is told `overlap`.
    """

    function: ScheduleFunction
    placement: Literal["loop", "v"] = "loop"
    virtual_stages: Sequence[int] | None = None
    delays_weights: bool = False
    rule: MicrobatchRule | None = None
    grouped: bool = False
    overlaps: bool = False

    def allows(self, vpp: int) -> bool:
        """Say whether a rank may have so many stages."""
        return self.virtual_stages is None or vpp in self.virtual_stages

    def serves(self, pp: int, vpp: int, num_microbatches: int) -> bool:
        """Say whether it has an order for so many microbatches."""
        return self.rule is None or self.rule.holds(pp, vpp, num_microbatches)

    @property
    def takes_overlap(self) -> bool:
        """Whether its function wants to know if pairs are kept: its order depends on that."""
        return "overlap" in inspect.signature(self.function).parameters

    @property
    def least_stages(self) -> int:
        """The smallest legal number of stages per rank."""
        return 1 if self.virtual_stages is None else self.virtual_stages[0]


def register_schedule(
    name: str,
    function: ScheduleFunction,
    *,
    placement: Literal["loop", "v"] = "loop",
    virtual_stages: Iterable[int] | None = None,
    delays_weights: bool = False,
    overlaps: bool = False,
) -> None:
    """Make `FoldedMoEStrategy(pipeline_schedule=name)` use a schedule of yours.

    Args:
        name: Any name but those built in; an earlier entry of this name is replaced.
        function: Takes `pp`, `vpp` and `num_microbatches` by keyword and returns a list of
            `lightning_fold.pipeline.Action` for each rank, computations only. A ValueError that
            it raises reaches the user; its lists are checked whenever they are made. One with a
            parameter `overlap` is told there whether pairs are kept.
        placement: `loop` puts stage s on rank s % pp; `v` puts the second half of the stages on
            the ranks in descending order. V needs exactly two stages per rank.
        virtual_stages: Legal stages per rank; None is any.
        delays_weights: Whether the lists hold I and W in place of B.
        overlaps: Whether the lists hold pairs of `lightning_fold.pipeline.actions.pair`. Without
            `pipeline_overlap` the halves of those run one after the other.

    Raises:
        ValueError: The name is built in, the placement unknown, or no number of stages legal.
        TypeError: The function cannot be called.
    """
    if name in BUILT_IN:
        raise ValueError(
            f"schedule {name!r} is built in and cannot be replaced. Legal: any name but "
            f"{quoted(BUILT_IN)}.  Change `name`."
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
    _REGISTERED[name] = Schedule(function, placement, legal, delays_weights, overlaps=overlaps)


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
        f"{quoted(SCHEDULES)}; `lightning_fold.register_schedule` adds others.  "
        "Change `pipeline_schedule`."
    )


def quoted(names: Iterable[str]) -> str:
    """List names in a message."""
    return ", ".join(repr(name) for name in names)


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
    "1f1b": Schedule(orders.one_f_one_b, virtual_stages=(1,), overlaps=True),
    "interleaved_1f1b": Schedule(
        orders.interleaved_1f1b, virtual_stages=_SEVERAL, grouped=True, overlaps=True
    ),
    "interleaved_zero_bubble": Schedule(
        orders.interleaved_zero_bubble, virtual_stages=_SEVERAL, delays_weights=True, rule=_ROUNDS
    ),
    "zbv": Schedule(orders.zbv, "v", (2,), delays_weights=True, rule=_ENOUGH),
    "dualpipev": Schedule(
        orders.dualpipev, "v", (2,), delays_weights=True, rule=_ENOUGH, overlaps=True
    ),
}
BUILT_IN = tuple(_REGISTERED)
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(_REGISTERED)
"""All schedules by name, users' included."""
