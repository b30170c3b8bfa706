"""A clock for plans: when each action would start and end, if every stage took what it costs.

Invariant: a rank does its list in order, and an action starts when its rank is free and its inputs
are there, which take `hop` to reach another rank. Sends and receives cost a rank nothing. Both
results of a pair are made at its end, and its backward starts first: it may fill the wait for the
forward's input. Knows neither tensors nor process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_fold.pipeline.actions import Action, B, F, I, W, halves
from lightning_fold.pipeline.schedules import Plan
from lightning_fold.pipeline.timeline import Span, Timeline

_Made = tuple[str, int, int | None]
"""What an action makes: `F` an activation, `B` a gradient; of which stage and microbatch."""

_Piece = tuple[Action, float, float]
"""Part of an action, with its start and end."""


@dataclass(frozen=True)
class Costs:
    """What the actions of one microbatch take, in seconds or any other unit.

    Each of the first three is one number for all stages, or one per stage.

    Attributes:
        forward: F.
        input_grad: I, the backward that leaves the weight gradients out.
        weight_grad: W. B takes both.
        hop: From the end of an action to its result's arrival on another rank.
    """

    forward: float | Sequence[float] = 1.0
    input_grad: float | Sequence[float] = 1.0
    weight_grad: float | Sequence[float] = 1.0
    hop: float = 0.0

    @classmethod
    def measured(cls, timeline: Timeline, *, hop: float = 0.0) -> Costs:
        """What the actions of a run have taken: the mean of each kind on each stage.

        A stage that has whole backwards alone has them as `input_grad`, its `weight_grad` is 0.
        """
        mean = timeline.mean_durations
        stages = range(1 + max((stage for stage, _ in mean), default=-1))
        return cls(
            forward=[mean.get((stage, "F"), 0.0) for stage in stages],
            input_grad=[mean.get((stage, "I"), mean.get((stage, "B"), 0.0)) for stage in stages],
            weight_grad=[mean.get((stage, "W"), 0.0) for stage in stages],
            hop=hop,
        )

    def of(self, action: Action) -> float:
        """Duration of one action, no pair."""
        stage = action.stage_index
        parts = {
            F: (self.forward,),
            I: (self.input_grad,),
            W: (self.weight_grad,),
            B: (self.input_grad, self.weight_grad),
        }
        return sum(_at(cost, stage) for cost in parts[action.computation_type])

    def check(self, num_stages: int) -> None:
        """Refuse costs that are no durations, or not one for each stage.

        Raises:
            ValueError: Names the cost.
        """
        for name in ("forward", "input_grad", "weight_grad", "hop"):
            cost = getattr(self, name)
            several = isinstance(cost, Sequence)
            if several and len(cost) != num_stages:
                raise ValueError(
                    f"{name} has {len(cost)} costs for {num_stages} stages.  Change `{name}`."
                )
            for value in cost if several else (cost,):
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(
                        f"{name}={value} is no duration. Legal {name}: 0 or more, finite.  "
                        f"Change `{name}`."
                    )


def simulate(plan: Plan, costs: Costs | None = None) -> Timeline:
    """Put a plan on the clock.

    Raises:
        ValueError: A cost is no duration, or the ranks wait for each other; then the action at
            which each rank stands is named.
    """
    costs = costs or Costs()
    costs.check(plan.num_stages)
    clock = _Clock(plan, costs)
    while clock.advance():
        pass
    stuck = [f"rank {rank} at {action}" for rank, action in clock.heads()]
    if stuck:
        raise ValueError(
            f"pipeline_schedule={plan.name!r} cannot go on, its ranks wait for each other: "
            f"{', '.join(stuck)}.  Change `pipeline_schedule`."
        )
    return Timeline(tuple(sorted(clock.spans, key=lambda span: (span.rank, span.start_s))))


class _Clock:
    """One run of a plan: how far each rank is, and when things were made."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.spans: list[Span] = []
        self._plan, self._costs = plan, costs
        self._made: dict[_Made, float] = {}
        self._free = dict.fromkeys(plan.actions, 0.0)
        self._next = dict.fromkeys(plan.actions, 0)

    def heads(self) -> Iterator[tuple[int, Action]]:
        """The next action of every rank that is not done."""
        for rank, number in self._next.items():
            if number < len(self._plan.actions[rank]):
                yield rank, self._plan.actions[rank][number]

    def advance(self) -> bool:
        """Run what can run on each rank; False where nothing can."""
        before = len(self.spans)
        for rank, listed in self._plan.actions.items():
            while self._next[rank] < len(listed):
                parts = halves(listed[self._next[rank]])
                needs = (need for part in parts for need in _needs(part, self._plan.num_stages))
                if any(need not in self._made for need in needs):
                    break
                self._run(rank, parts)
        return len(self.spans) > before

    def _run(self, rank: int, parts: tuple[Action, ...]) -> None:
        pieces = self._pieces(rank, parts)
        self._free[rank] = end = pieces[-1][2]
        for (stage, kind, microbatch, _), start, stop in pieces:
            if kind != W:
                self._made["F" if kind == F else "B", stage, microbatch] = end
            self.spans.append(Span(rank, stage, int(microbatch or 0), kind.value, start, stop))
        self._next[rank] += 1

    def _pieces(self, rank: int, parts: tuple[Action, ...]) -> list[_Piece]:
        """When an action, or each half of a pair, computes."""
        first, *others = parts
        start = max(self._free[rank], self._arrival(first, rank))
        alone = (first, start, start + self._costs.of(first))
        if not others:
            return [alone]
        (second,) = others
        return _weave(alone, second, self._arrival(second, rank), self._costs.of(second))

    def _arrival(self, action: Action, rank: int) -> float:
        """When the last input of an action is there."""
        needs = _needs(action, self._plan.num_stages)
        return max((self._delivery(need, rank) for need in needs), default=0.0)

    def _delivery(self, need: _Made, rank: int) -> float:
        is_here = self._plan.placement[need[1]] == rank
        return self._made[need] + (0.0 if is_here else self._costs.hop)


def _weave(alone: _Piece, second: Action, arrival: float, cost: float) -> list[_Piece]:
    """Half of each in turns: both are live at once, as in a run, whose pieces are smaller.

    The first half, given as it would run alone, goes on while the other one's input is late.
    """
    first, start, end = alone
    if arrival >= end:
        return [alone, (second, arrival, arrival + cost)]
    turn = max((start + end) / 2, arrival)
    again = turn + cost / 2
    rest = again + (end - turn)
    return [
        (first, start, turn),
        (second, turn, again),
        (first, again, rest),
        (second, rest, end + cost),
    ]


def _needs(action: Action, num_stages: int) -> Iterator[_Made]:
    stage, kind, microbatch, _ = action
    if kind == F:
        if stage > 0:
            yield "F", stage - 1, microbatch
    elif kind == W:
        yield "B", stage, microbatch
    else:
        yield "F", stage, microbatch
        if stage < num_stages - 1:
            yield "B", stage + 1, microbatch


def _at(cost: float | Sequence[float], stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost
