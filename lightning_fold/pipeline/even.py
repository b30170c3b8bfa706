"""Cut a row of weights into consecutive runs so that the dearest run is as cheap as it can be.

Owns the search behind `layout.even_layout`, on integers, in which equal cuts tie exactly.
Invariant: every run has a member, and the dearest run is as cheap as any cut makes it. Knows
nothing of models and texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

_Best = tuple[int, tuple[int, ...]]
"""The value of a cut, and how many members each of its runs has."""


def even_cut(weights: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return how many members each run has; there is a run for every entry of `ranks`.

    Of cuts with an equal dearest run: the one with the smallest sum of squares, then that whose
    first runs have fewer members. Where a rank holds several runs, single members are moved
    between runs after that, while a dearest rank gets cheaper and no run dearer than the dearest.
    This ends at the cheapest ranks where all weights but the first and the last are equal: the
    cuts are then the whole points of a box cut by a plane, and the value convex, so that a cut
    without a better neighbour is the best. With other weights it can miss it.

    Args:
        weights: At least 0 each, and at least as many as there are runs.
        ranks: Who holds each run.
    """
    dearest, _ = _cut(weights, len(ranks), cap=sum(weights), join=max)
    _, counts = _cut(weights, len(ranks), cap=dearest, join=_add_square)
    return counts if len(set(ranks)) == len(ranks) else _even_ranks(weights, counts, ranks)


def _add_square(cost: int, rest: int) -> int:
    return cost * cost + rest


def _cut(weights: Sequence[int], runs: int, *, cap: int, join: Callable[[int, int], int]) -> _Best:
    """Find the cut of the least value in which no run is dearer than `cap`; exact.

    The value joins the costs of the runs, from the last to the first.
    """
    rest: dict[int, _Best] = {len(weights): (0, ())}
    for following in range(runs):
        starts = range(len(weights) - following)
        found = ((start, _best_from(weights, start, cap, rest, join)) for start in starts)
        rest = {start: best for start, best in found if best is not None}
    return rest[0]


def _best_from(
    weights: Sequence[int],
    start: int,
    cap: int,
    rest: Mapping[int, _Best],
    join: Callable[[int, int], int],
) -> _Best | None:
    """The first run starts at `start`, the others as `rest` says; ties go to the shorter run."""
    best: _Best | None = None
    cost = 0
    for end in range(start + 1, len(weights) + 1):
        cost += weights[end - 1]
        if cost > cap:
            break
        if end in rest:
            value = join(cost, rest[end][0])
            if best is None or value < best[0]:
                best = (value, (end - start, *rest[end][1]))
    return best


def _even_ranks(
    weights: Sequence[int], counts: tuple[int, ...], ranks: Sequence[int]
) -> tuple[int, ...]:
    while True:
        value = _value_of(weights, counts, ranks)
        better = (moved for moved in _moves(counts) if _value_of(weights, moved, ranks) < value)
        moved = next(better, None)
        if moved is None:
            return counts
        counts = moved


def _value_of(
    weights: Sequence[int], counts: tuple[int, ...], ranks: Sequence[int]
) -> tuple[int, list[int], int, tuple[int, ...]]:
    """What is to be small, first things first: runs, ranks, unevenness, the first runs."""
    costs = [sum(weights[a:b]) for a, b in pairwise((0, *accumulate(counts)))]
    by_rank: Counter[int] = Counter()
    for rank, cost in zip(ranks, costs, strict=True):
        by_rank[rank] += cost
    dearest_first = sorted(by_rank.values(), reverse=True)
    return max(costs), dearest_first, sum(cost * cost for cost in costs), counts


def _moves(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All cuts in which one run has a member fewer and another one more."""
    for giver in range(len(counts)):
        for taker in range(len(counts)):
            if giver != taker and counts[giver] > 1:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
