"""Run one rank's list of pipeline actions: compute, sends and receives, in the order of the list.

Owns what is in flight: activations that wait for their backward, what arrives, and weight
gradients that are put off. Every message has the shape of its own microbatch, which both sides
know. Knows no Lightning and no model: what an action computes is `StepCalls`'.
"""

# Shapes.  B sequences   s tokens of a sequence on this rank   D model width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fold_kernels.weight_store import WeightStore, deferring
from lightning_fold.model.passage import StageOutput
from lightning_fold.pipeline import actions as ir
from lightning_fold.pipeline.schedules import Plan
from lightning_fold.pipeline.sends import Sends
from lightning_fold.pipeline.stamps import Stamps
from lightning_fold.pipeline.tape import Context, Steps, Value, drain, weave
from lightning_fold.topology.comm import Comm

Key = tuple[int, int]
"""A stage and a microbatch."""


class PipelineError(RuntimeError):
    """An action failed; names rank, stage, microbatch and action."""


@dataclass(frozen=True)
class Border:
    """What one microbatch brings across the border into a stage.

    Attributes:
        shape: Of the hidden states, [B, s, D].
        dtype: Of the hidden states.
        loads: Elements of the flat `StageOutput.loads`; 0 where none are sent.
        loads_dtype: Their dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    loads: int = 0
    loads_dtype: torch.dtype = torch.float32


class StepCalls(Protocol):
    """What the actions of one step compute."""

    def border(self, stage: int, microbatch: int) -> Border:
        """What comes into `stage`."""

    def forward(
        self, stage: int, microbatch: int, hidden: Tensor | None, loads: Tensor | None
    ) -> StageOutput | Tensor | None:
        """Run a stage; on the last one the root of the backward, or None in evaluation."""

    def weaves(self, stage: int) -> bool:
        """Whether a stage runs in pieces, so by `steps` and not by `forward`."""

    def steps(
        self,
        stage: int,
        microbatch: int,
        inputs: tuple[Tensor, ...],
        *,
        clock: Context,
        store: WeightStore | None,
    ) -> Steps[Woven]:
        """Run a stage in pieces, as a pass of `pipeline.tape`."""


class Woven(Protocol):
    """A microbatch between its forward and its backward on a stage that runs in pieces."""

    outputs: tuple[Value, ...]

    def backward(
        self,
        grads: tuple[Tensor, ...],
        *,
        clock: Context,
        in_the_gap: Callable[[], None] | None,
    ) -> Steps[tuple[Tensor, ...]]:
        """Gradients of the inputs, from those of the outputs; none at the root of the loss."""


@dataclass
class _Live:
    """A microbatch between its forward and its backward on a stage that runs at once."""

    inputs: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]

    def backward(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of the inputs, from those of the roots; none at the root of the loss."""
        pairs = [
            (root, grad)
            for root, grad in zip(self.roots, grads or (None,), strict=True)
            if root.requires_grad
        ]
        if pairs:
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in self.inputs)


@dataclass
class _Flight:
    """Everything in flight in one step."""

    live: dict[Key, _Live | Woven] = field(default_factory=dict)
    begun: set[Key] = field(default_factory=set)
    arrived: dict[tuple[str, int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    receiving: dict[tuple[str, int, int], Any] = field(default_factory=dict)
    leaving: dict[tuple[str, int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    later: dict[Key, Callable[[], None]] = field(default_factory=dict)
    left_by: Any = None


class Executor:
    """Runs steps of one rank.

    Args:
        comm: Collectives; messages travel over pp.
        num_stages: Stages of all ranks.
        device: Of the tensors.

    Attributes:
        peak_live: Most microbatches, over all stages of this rank, between forward and backward in
            the latest step.
        sends: Messages on their way, and how many they were at most in the latest step.
        action: What runs; None between steps.
        stamps: Start and end of every action, if somebody asked.
    """

    def __init__(self, comm: Comm, *, num_stages: int, device: torch.device) -> None:
        self.comm = comm
        self.num_stages = num_stages
        self.device = device
        self.peak_live = 0
        self.sends = Sends(device)
        self.action: ir.Action | None = None
        self.stamps = Stamps(device)
        self._flight = _Flight()
        self._store = WeightStore()

    def run(self, plan: Plan, calls: StepCalls, *, train: bool) -> None:
        """Run all actions of this rank. Collective over pp, and over what the stages are spread.

        Raises:
            PipelineError: An action failed.
        """
        rank = self.comm.rank("pp")
        self._flight, self.peak_live = _Flight(), 0
        self.sends.start()
        self._ranks, self._calls, self._train = plan.placement, calls, train
        self._weaves = train and plan.overlap
        # Woven, weight gradients fill the time in which a gradient travels.
        self._puts_off = train and (plan.delays_weights or plan.overlap)
        verbs = {
            ir.F: self._alone,
            ir.B: self._alone,
            ir.I: self._alone,
            ir.OVERLAP_F_B: self._pair,
            ir.W: self._weights,
            ir.SEND_F: self._send,
            ir.SEND_B: self._send,
            ir.RECV_F: self._receive,
            ir.RECV_B: self._receive,
        }
        for action in plan.lowered[rank]:
            self.action = action
            with self._named():
                verbs[action.computation_type](action)
                self.sends.reap()
        with self._named():
            self._leave_none()
        self.sends.finish()
        self._flight, self.action = _Flight(), None

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say of what fails inside where it was."""
        try:
            yield
        except Exception as error:
            raise PipelineError(
                f"pipeline: rank {self.comm.global_rank}, {self.where}: "
                f"{type(error).__name__}: {error}"
            ) from error

    @property
    def where(self) -> str:
        """Stage, microbatch and action that run, for messages; empty between steps."""
        a = self.action
        return f"stage {a.stage_index}, microbatch {a.microbatch_index}, action {a}" if a else ""

    # Compute.

    def _alone(self, action: Any) -> None:
        drain(self._pass(action))

    def _pair(self, action: Any) -> None:
        forward, backward = action.sub_actions
        # The backward first: its combine travels under the forward's attention.
        weave(*(self._as(half, self._pass(half)) for half in (backward, forward)))

    def _as(self, action: Any, steps: Steps[None]) -> Steps[None]:
        """The pass of one half, which `action` names whenever it is its turn."""
        while True:
            self.action = action
            try:
                next(steps)
            except StopIteration:
                return
            yield

    def _pass(self, action: Any) -> Steps[None]:
        return self._forward(action) if action.computation_type == ir.F else self._backward(action)

    def _forward(self, action: Any) -> Steps[None]:
        stage, m = action.stage_index, action.microbatch_index
        inputs = self._take("F", stage, m) if stage > 0 else ()
        if self._train:
            # From here to the end of its backward: a pair has two that are both on their way.
            self._flight.begun.add((stage, m))
            self.peak_live = max(self.peak_live, len(self._flight.begun))
        store = self._store if self._puts_off else None
        if self._weaves and self._calls.weaves(stage):
            clock = partial(self.stamps.of, action)
            live = yield from self._calls.steps(stage, m, inputs, clock=clock, store=store)
            self._pass_on(stage, m, tuple(value.data for value in live.outputs))
            self._flight.live[stage, m] = live
            return
        if self._train:
            inputs = tuple(x.requires_grad_() for x in inputs)
        hidden, loads = (*inputs, None, None)[:2]
        with self.stamps.of(action), deferring(store):
            out = self._calls.forward(stage, m, hidden, loads)
        if isinstance(out, StageOutput):
            roots: tuple[Tensor, ...] = (out.hidden,)
            roots += () if out.loads is None else (out.loads,)
            self._pass_on(stage, m, tuple(x.detach() for x in roots))
        else:
            roots = () if out is None else (out,)
        if self._train:
            self._flight.live[stage, m] = _Live(inputs, roots)

    def _pass_on(self, stage: int, m: int, tensors: tuple[Tensor, ...]) -> None:
        """What a stage has made goes to the next one; the last one's stays."""
        if stage < self.num_stages - 1:
            self._check(tensors, self._calls.border(stage + 1, m))
            self._give("F", stage + 1, m, tensors)

    def _backward(self, action: Any) -> Steps[None]:
        stage, m = key = action.stage_index, action.microbatch_index
        grads = () if stage == self.num_stages - 1 else self._take("B", stage, m)
        live = self._flight.live.pop(key)
        clock, at_once = partial(self.stamps.of, action), action.computation_type == ir.B
        # What the backward before has left over.
        left, had_gap = self._store.take(), False

        def weights() -> None:
            nonlocal had_gap
            had_gap = True
            left()
            if at_once:
                self._weights_now()

        if isinstance(live, _Live):
            # A model that recomputes its layers in backward has to meet the store of its forward.
            with clock(), deferring(self._store if self._puts_off else None):
                got = live.backward(grads)
                weights()
        else:
            got = yield from live.backward(grads, clock=clock, in_the_gap=weights)
            if not had_gap:
                with clock():
                    weights()
        self._flight.begun.discard(key)
        # What the last piece leaves waits for the first gap of the next backward: nothing else is
        # left to compute there while the row counts of the other half travel.
        self._flight.left_by = action
        if self._puts_off and not at_once:
            self._flight.later[key] = self._store.take()
        if stage > 0:
            self._give("B", stage - 1, m, got)

    def _leave_none(self) -> None:
        """Compute what the last backward has left over."""
        if self._store.num_left:
            with self.stamps.of(self._flight.left_by):
                self._weights_now()

    def _weights_now(self) -> None:
        self._store.take()()

    def _weights(self, action: Any) -> None:
        with self.stamps.of(action):
            self._flight.later.pop((action.stage_index, action.microbatch_index))()

    def _check(self, roots: Sequence[Tensor], border: Border) -> None:
        """Refuse to send what the receiver does not expect: it would read garbage."""
        hidden = roots[0]
        if tuple(hidden.shape) != border.shape or hidden.dtype != border.dtype:
            raise ValueError(
                f"the stage gives hidden states {list(hidden.shape)} in {hidden.dtype}, and the "
                f"next one expects {list(border.shape)} in {border.dtype}"
            )
        loads = sum(x.numel() for x in roots[1:])
        if loads != border.loads:
            raise ValueError(
                f"the stage gives {loads} numbers of its routers, and the next one expects "
                f"{border.loads}"
            )

    # Messages. A key names what travels (F or B) and where it is going: stage and microbatch.

    def _take(self, kind: str, stage: int, m: int) -> tuple[Tensor, ...]:
        """What has come for a stage: from this rank, or by a message, waited for."""
        key = (kind, stage, m)
        work = self._flight.receiving.pop(key, None)
        if work is not None:
            work.wait()
        return self._flight.arrived.pop(key)

    def _give(self, kind: str, stage: int, m: int, tensors: tuple[Tensor, ...]) -> None:
        is_here = self._ranks[stage] == self.comm.rank("pp")
        box = self._flight.arrived if is_here else self._flight.leaving
        box[(kind, stage, m)] = tensors

    def _send(self, action: Any) -> None:
        forward = action.computation_type == ir.SEND_F
        kind, target = ("F", action.stage_index + 1) if forward else ("B", action.stage_index - 1)
        key = (kind, target, action.microbatch_index)
        tensors = tuple(x.contiguous() for x in self._flight.leaving.pop(key))
        work = self.comm.start_send(tensors, to=self._ranks[target], axis="pp")
        self.sends.keep(work, tensors, to=self._ranks[target])

    def _receive(self, action: Any) -> None:
        forward = action.computation_type == ir.RECV_F
        stage, m = action.stage_index, action.microbatch_index
        kind, source = ("F", stage - 1) if forward else ("B", stage + 1)
        # A gradient has the shape of what it belongs to.
        border = self._calls.border(stage if forward else stage + 1, m)
        buffers = [torch.empty(border.shape, dtype=border.dtype, device=self.device)]
        if border.loads:
            buffers.append(torch.empty(border.loads, dtype=border.loads_dtype, device=self.device))
        key = (kind, stage, m)
        work = self.comm.start_receive(buffers, source=self._ranks[source], axis="pp")
        self._flight.receiving[key] = work
        self._flight.arrived[key] = tuple(buffers)
