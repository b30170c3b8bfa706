"""The orders of computation that are built in, each a pure function of a few integers.

Owns gpipe, 1f1b, interleaved_1f1b and the forward-only order; the others are torch's. Says nothing
about which numbers are legal, and checks nothing (`schedules` does both).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_fold.pipeline.actions import Action, Actions, B, F, pair, torch_actions


def gpipe(*, pp: int, vpp: int, num_microbatches: int) -> Actions:
    """All forwards, then all backwards."""
    every = range(num_microbatches)
    return {
        rank: [Action(rank, F, m) for m in every] + [Action(rank, B, m) for m in every]
        for rank in range(pp)
    }


def one_f_one_b(*, pp: int, vpp: int, num_microbatches: int, overlap: bool = False) -> Actions:
    """As many forwards as there are ranks behind, then one forward and one backward in turns.

    torch's own list lacks the first forward of the last rank.

    With `overlap` the turns are pairs. What a pair makes leaves when all of it is done, so a
    microbatch takes one pair per rank behind, one to turn around, and one per rank again: between
    its forward and its backward a rank has 2 * behind + 1 forwards to start, its warm-up.
    """
    return {rank: _one_f_one_b_rank(rank, pp, num_microbatches, overlap) for rank in range(pp)}


def interleaved_1f1b(
    *, pp: int, vpp: int, num_microbatches: int, group: int | None = None, overlap: bool = False
) -> Actions:
    """1F1B in which a rank's stages take turns, a group of microbatches each (arXiv 2104.04473).

    With `overlap` the turns are pairs. The warm-up has room for both ways already; the one forward
    more is that of the turn around, since a pair has no two halves of one microbatch.
    """
    groups = _groups(num_microbatches, group or pp)
    order = [(chunk, m) for group_ in groups for chunk in range(vpp) for m in group_]
    back = [(vpp - 1 - chunk, m) for chunk, m in order]
    actions = {}
    for rank in range(pp):
        warm_up = 2 * (pp - 1 - rank) + (vpp - 1) * len(groups[0]) + overlap
        forwards = [Action(chunk * pp + rank, F, m) for chunk, m in order]
        backwards = [Action(chunk * pp + rank, B, m) for chunk, m in back]
        actions[rank] = _in_turns(forwards, backwards, min(warm_up, len(order)), overlap)
    return actions


def interleaved_zero_bubble(*, pp: int, vpp: int, num_microbatches: int) -> Actions:
    """Interleaved with weight gradients in the gaps (ZB1P of arXiv 2401.10241); torch's list."""
    return torch_actions("ScheduleInterleavedZeroBubble", pp, vpp, num_microbatches)


def zbv(*, pp: int, vpp: int, num_microbatches: int) -> Actions:
    """Two stages per rank, there and back (ZB-V of arXiv 2405.15362); torch's list."""
    return torch_actions("ScheduleZBVZeroBubble", pp, vpp, num_microbatches)


def dualpipev(*, pp: int, vpp: int, num_microbatches: int) -> Actions:
    """DualPipe of arXiv 2412.19437 folded at its middle; torch's list, pairs in it."""
    return torch_actions("ScheduleDualPipeV", pp, vpp, num_microbatches)


def forward_only(placement: Sequence[int], num_microbatches: int) -> dict[int, list[Action]]:
    """Forwards in the order of a run in which every rank takes its deepest stage that is ready.

    What was run once in this order can be run again, so it has no deadlock.
    """
    actions: dict[int, list[Action]] = {rank: [] for rank in range(max(placement) + 1)}
    last = len(placement) - 1
    done = [0] * len(placement)
    while done[last] < num_microbatches:
        arrived = [num_microbatches, *done[:-1]]
        ready = {
            placement[stage]: stage for stage in range(last + 1) if done[stage] < arrived[stage]
        }
        for rank, stage in ready.items():
            actions[rank].append(Action(stage, F, done[stage]))
            done[stage] += 1
    return actions


def there_and_back(*, pp: int, vpp: int, num_microbatches: int) -> Actions:
    """All forwards, then all backwards, over two stages per rank, there and back.

    For fewer microbatches than zbv and dualpipev can do with.
    """
    placement = [*range(pp), *reversed(range(pp))]
    actions = forward_only(placement, num_microbatches)
    last = len(placement) - 1
    # Backwards are forwards from the other end: a v looks the same from both.
    mirrored = {
        rank: [(last - a.stage_index, a.microbatch_index) for a in listed]
        for rank, listed in actions.items()
    }
    return {
        rank: [*listed, *(Action(stage, B, m) for stage, m in mirrored[rank])]
        for rank, listed in actions.items()
    }


def _one_f_one_b_rank(rank: int, pp: int, num_microbatches: int, overlap: bool) -> list[Action]:
    forwards = [Action(rank, F, m) for m in range(num_microbatches)]
    backwards = [Action(rank, B, m) for m in range(num_microbatches)]
    behind = pp - 1 - rank
    warm_up = 2 * behind + 1 if overlap else behind
    return _in_turns(forwards, backwards, min(warm_up, num_microbatches), overlap)


def _in_turns(
    forwards: list[Action], backwards: list[Action], warm_up: int, overlap: bool
) -> list[Action]:
    turns = zip(forwards[warm_up:], backwards, strict=False)
    steady = [pair(*turn) for turn in turns] if overlap else [a for turn in turns for a in turn]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def _groups(num_microbatches: int, group: int) -> list[range]:
    """Cut into groups of `group` or a few more: a shorter last one can deadlock."""
    number = max(1, num_microbatches // group)
    size, larger = divmod(num_microbatches, number)
    starts = [index * size + min(index, larger) for index in range(number + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
