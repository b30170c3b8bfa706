"""The language of schedules: torch's pipeline actions, under this project's names.

Owns every private name of `torch.distributed.pipelining` that the project uses (written against
torch 2.13; `test_schedules.py` tells when one is gone), and what turns a list of computations into
one with messages. Invariant: messages between two ranks are received in the order in which they
are sent, since nothing else tells them apart. Pure: no process group, no tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import SimpleNamespace

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    F,
    I,
    W,
    _add_send_recv,
)
from torch.distributed.pipelining.schedules import _Action as Action
from torch.distributed.pipelining.schedules import _ComputationType as ActionKind

__all__ = [
    "OVERLAP_F_B",
    "RECV_B",
    "RECV_F",
    "SEND_B",
    "SEND_F",
    "Action",
    "ActionKind",
    "Actions",
    "B",
    "F",
    "I",
    "W",
    "check_p2p_order",
    "halves",
    "lower",
    "pair",
    "torch_actions",
    "with_pairs",
    "without_pairs",
]

Actions = Mapping[int, Sequence[Action]]
"""What each rank of a pipeline does, in order, by its coordinate on the pp axis."""


def pair(forward: Action, backward: Action) -> Action:
    """Weave a forward and a backward (B or I) of another microbatch, of any stages of one rank."""
    return Action(-1, OVERLAP_F_B, None, (forward, backward))


def halves(action: Action) -> tuple[Action, ...]:
    """The two computations of a pair, the backward first as it starts first; or the action."""
    if action.sub_actions is None:
        return (action,)
    return tuple(sorted(action.sub_actions, key=lambda half: half.computation_type == F))


def torch_actions(name: str, pp: int, vpp: int, num_microbatches: int) -> dict[int, list[Action]]:
    """Return the computations that one of torch's schedule classes lists.

    Args:
        name: Its class, such as `ScheduleZBVZeroBubble`.
        pp: Ranks of the pipeline.
        vpp: Stages of each rank.
        num_microbatches: Microbatches of one step.

    Raises:
        ValueError: As the class does, for numbers that it cannot serve.
    """
    stages = [_stage(pp, vpp, index) for index in range(vpp)]
    kind = getattr(torch_schedules, name)
    multi = issubclass(kind, torch_schedules.PipelineScheduleMulti)
    order = kind(stages if multi else stages[0], num_microbatches).pipeline_order
    return {
        rank: [action for action in actions if action is not None and action.is_compute_op]
        for rank, actions in order.items()
    }


def with_pairs(actions: Mapping[int, Sequence[Action | None]]) -> dict[int, tuple[Action, ...]]:
    """Bring OVERLAP_F_B pairs to the form of `pair`. Idle slots go.

    Raises:
        ValueError: A pair is of other kinds, or its halves wait for each other; names it.
    """
    return {
        rank: tuple(_in_form(action) for action in listed if action is not None)
        for rank, listed in actions.items()
    }


def without_pairs(actions: Mapping[int, Sequence[Action | None]]) -> dict[int, tuple[Action, ...]]:
    """Run the halves of an OVERLAP_F_B pair one after the other, the backward first.

    A pair starts when the inputs of both halves are there, so any order of them can run; the
    backward first frees its activations before the forward adds its own. Idle slots go as well.
    """
    return {
        rank: tuple(half for action in listed if action is not None for half in halves(action))
        for rank, listed in actions.items()
    }


def lower(actions: Actions, placement: Sequence[int]) -> dict[int, tuple[Action, ...]]:
    """Add the sends, right after what makes the tensor, and the receives, as early as they can be.

    Receives are never put off: torch's way to do so swaps tensors without an error. A pair is one
    computation here: what both halves need is received before it, what they make is sent after it.

    Args:
        actions: Computations of every rank.
        placement: Rank of each stage.

    Raises:
        ValueError: The lists wait for each other; names the stuck actions.
    """
    waiting = {rank: list(listed) for rank, listed in actions.items() if listed}
    try:
        lowered = _add_send_recv(waiting, placement.__getitem__, len(placement))
    except AssertionError:
        stuck = ", ".join(f"rank {rank} at {listed[0]}" for rank, listed in waiting.items())
        raise ValueError(f"the ranks wait for each other: {stuck}") from None
    return {rank: tuple(lowered.get(rank, ())) for rank in actions}


def check_p2p_order(lowered: Actions, placement: Sequence[int]) -> None:
    """Refuse lists in which a rank posts receives in another order than its peer sends.

    Raises:
        ValueError: Names the first send and the receive that would take its tensor.
    """
    sends: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, listed in lowered.items():
        for action in listed:
            if action.computation_type in _STEP_OF_SEND:
                peer = placement[action.stage_index + _STEP_OF_SEND[action.computation_type]]
                sends[rank, peer].append(action)
            elif action.computation_type in _STEP_TO_SENDER:
                peer = placement[action.stage_index + _STEP_TO_SENDER[action.computation_type]]
                receives[peer, rank].append(action)
    for sender, receiver in sorted({*sends, *receives}):
        both = zip_longest(sends[sender, receiver], receives[sender, receiver])
        for number, (send, receive) in enumerate(both):
            if send is None or receive != _receive_of(send):
                raise ValueError(
                    f"message {number} from rank {sender} to rank {receiver} is sent as {send} "
                    f"and received as {receive}: tensors are matched by their order alone"
                )


# A message goes from a stage to the next one or to the one before.
_STEP_OF_SEND = {SEND_F: 1, SEND_B: -1}
_STEP_TO_SENDER = {RECV_F: -1, RECV_B: 1}
_RECEIVED_AS = {SEND_F: RECV_F, SEND_B: RECV_B}


def _stage(pp: int, vpp: int, index: int) -> SimpleNamespace:
    """What torch's schedules ask of a stage before they have listed their actions."""
    return SimpleNamespace(
        num_stages=pp * vpp,
        group_size=pp,
        group_rank=0,
        submod=nn.Identity(),
        stage_index=index,
        is_last=False,
    )


def _in_form(action: Action) -> Action:
    if action.sub_actions is None:
        return action
    kinds = {half.computation_type for half in action.sub_actions}
    if len(action.sub_actions) != 2 or kinds not in ({F, B}, {F, I}):
        raise ValueError(f"{action} is no pair of one F and one B or I")
    backward, forward = halves(action)
    if forward.microbatch_index == backward.microbatch_index:
        raise ValueError(
            f"the halves of {action} wait for each other: {backward} needs all forwards of "
            f"microbatch {backward.microbatch_index}, and {forward} is one"
        )
    return pair(forward, backward)


def _receive_of(send: Action) -> Action:
    kind = send.computation_type
    return Action(send.stage_index + _STEP_OF_SEND[kind], _RECEIVED_AS[kind], send.microbatch_index)
