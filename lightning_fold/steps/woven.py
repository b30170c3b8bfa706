"""One microbatch through a stage in pieces: what `UserStep.forward` does at once, as a pass.

The core is called twice, and neither time runs a layer: before the layers, which says what they are
called with and embeds on the first stage, and behind them, on the last stage from inside the user's
step. In between the layers run on a tape.
"""

# Shapes.  B sequences   s tokens of a sequence on this rank   D model width

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fold_kernels.weight_store import WeightStore, deferring
from lightning_fold.model.balance import Balance, Collected
from lightning_fold.model.token_layout import Layouts, TokenWatch
from lightning_fold.moe.balance import Routed
from lightning_fold.moe.tokens import repeating
from lightning_fold.pipeline.segments import LayerCall, call_layer
from lightning_fold.pipeline.tape import Context, Steps, Tape, Value
from lightning_fold.pipeline.woven import Weaving
from lightning_fold.steps.randomness import Generators


class Around:
    """What a microbatch's pieces have around them (`tape.Surroundings`).

    Args:
        watch: Tells layers their tokens.
        precision: Lightning's context of a forward.
        store: Where backward leaves weight gradients.
        is_random: Whether random numbers are drawn, of which each microbatch has its own.

    Attributes:
        layouts: Of this microbatch's forward, once it has begun.
    """

    def __init__(
        self,
        watch: TokenWatch,
        precision: Callable[[], AbstractContextManager[Any]],
        store: WeightStore | None,
        *,
        is_random: bool,
    ) -> None:
        self.layouts: Layouts = (None, None)
        self._watch, self._precision, self._store = watch, precision, store
        self._is_random = is_random
        self._numbers: Generators | None = None

    def mark(self) -> Generators | None:
        """The random numbers' state."""
        return self._numbers

    @contextmanager
    def __call__(self, mark: Generators | None = None, *, repeats: bool = False) -> Iterator[None]:
        """Enter all of it."""
        tokens = self._watch.tokens
        before, tokens.in_pieces = tokens.in_pieces, True
        numbers = self._own_numbers(mark) if self._is_random else nullcontext()
        seeing, deferred = self._watch.seeing(self.layouts), deferring(self._store)
        try:
            again = repeating() if repeats else nullcontext()
            with seeing, self._precision(), deferred, numbers, again:
                yield
        finally:
            tokens.in_pieces = before

    @contextmanager
    def _own_numbers(self, mark: Generators | None) -> Iterator[None]:
        others = Generators.now()
        start = mark or self._numbers
        if start is not None:
            start.restore()
        try:
            yield
        finally:
            if mark is None:
                self._numbers = Generators.now()
            others.restore()


@dataclass
class StagePass:
    """A microbatch between its forward and its backward on one stage.

    Attributes:
        tape: What it remembers.
        inputs: Hidden states and loads that have come in.
        outputs: Those that go on, or the root of the loss.
    """

    tape: Tape
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def backward(
        self,
        grads: tuple[Tensor, ...],
        *,
        clock: Context,
        in_the_gap: Callable[[], None] | None,
    ) -> Steps[tuple[Tensor, ...]]:
        """Gradients of the inputs.

        Args:
            grads: Of the outputs; empty at the root.
            clock: Entered around all that is computed.
            in_the_gap: See `Tape`.
        """
        self.tape.clock, self.tape.in_the_gap = clock, in_the_gap
        given = grads or tuple(torch.ones_like(value.data) for value in self.outputs)
        for value, grad in zip(self.outputs, given, strict=True):
            value.slot.add(grad)
        self.outputs = ()
        yield from self.tape.backward()
        return tuple(_grad_of(value) for value in self.inputs)


@dataclass(frozen=True)
class StageCalls:
    """The parts of a stage that are the user's code.

    Attributes:
        before: Calls the core up to the layers: hidden states, and what the layers would be called
            with.
        behind: Runs the user's step on what the layers have made, on the last stage; else None.
        balance: Balances the experts; None where nothing does.
        core: The core.
    """

    before: Callable[[Tensor | None, Tensor | None], tuple[Tensor, list[LayerCall]]]
    behind: Callable[[Tensor, Tensor | None], Tensor] | None
    balance: Balance | None
    core: nn.Module


def stage_steps(
    stage: int,
    weaving: Weaving,
    calls: StageCalls,
    around: Around,
    *,
    watch: TokenWatch,
    inputs: tuple[Tensor, ...],
    clock: Context,
) -> Steps[StagePass]:
    """The forward of a microbatch on a woven stage. Collective over what its layers are spread."""
    tape = Tape(around, repeats=weaving.repeats)
    tape.clock = clock
    arrived = tuple(Value(x) for x in inputs)
    loads = arrived[1:]
    hidden, layer_calls = _enter(tape, calls, around, watch, arrived)
    routed: list[tuple[int, Routed, Value]] = []
    for (layer, pieces), call in zip(weaving.stages[stage], layer_calls, strict=True):
        if pieces is None:
            run = partial(_dense, layer, call, weaving.in_tuple)
            (hidden,) = tape.compute(run, hidden)
        else:
            hidden = yield from pieces.steps(tape, hidden, call, routed)
    outputs = _leave(tape, calls, hidden, loads, routed)
    return StagePass(tape, arrived, outputs)


def _enter(
    tape: Tape, calls: StageCalls, around: Around, watch: TokenWatch, arrived: tuple[Value, ...]
) -> tuple[Value, list[LayerCall]]:
    given = (*(value.data for value in arrived), None, None)[:2]
    found: list[LayerCall] = []

    def run() -> tuple[Tensor, ...]:
        hidden, layer_calls = calls.before(*given)
        around.layouts = watch.latest
        _check_calls(layer_calls)
        found.extend(layer_calls)
        return (hidden,)

    if not arrived:
        (hidden,) = tape.compute(run, once=True)
        return hidden, found
    # With gradients, though nothing has one: what the call sees is a training step.
    with tape.clock(), around(), torch.enable_grad():
        run()
    return arrived[0], found


def _check_calls(layer_calls: list[LayerCall]) -> None:
    """Refuse arguments of layers that would need a gradient of their own."""
    tensors = [x for x in tree_leaves(layer_calls) if isinstance(x, Tensor)]
    if any(x.requires_grad for x in tensors):
        raise ValueError(
            "the core computes an argument of its layers from parameters (a learned position bias, "
            "say), and pieces of layers give it no gradient. Legal pipeline_overlap: False.  "
            "Change `pipeline_overlap`."
        )


def _leave(
    tape: Tape,
    calls: StageCalls,
    hidden: Value,
    loads: tuple[Value, ...],
    routed: list[tuple[int, Routed, Value]],
) -> tuple[Value, ...]:
    """The rest of a stage: the user's step on the last one, else what goes on of the balance."""
    behind = calls.behind
    logits = [value for _, _, value in routed]

    def collected(given: tuple[Tensor, ...]) -> list[Collected]:
        pairs = zip(routed, given, strict=True)
        return [(number, decision.with_logits(x)) for (number, decision, _), x in pairs]

    def last(hidden: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        assert behind is not None
        here, come = given[: len(logits)], given[len(logits) :]
        with _given(calls.balance, collected(here)):
            return (behind(hidden, come[0] if come else None),)

    def send(*given: Tensor) -> tuple[Tensor, ...]:
        assert calls.balance is not None
        here, come = given[: len(logits)], given[len(logits) :]
        sent = calls.balance.leave_stage(calls.core, collected(here), come[0] if come else None)
        return () if sent is None else (sent,)

    if behind is not None:
        return tape.compute(last, hidden, *logits, *loads, once=True)
    if calls.balance is None:
        return (hidden,)
    return (hidden, *tape.compute(send, *logits, *loads, once=True))


def _given(balance: Balance | None, collected: list[Collected]) -> AbstractContextManager[Any]:
    return nullcontext() if balance is None else balance.given(collected)


def _dense(layer: nn.Module, call: LayerCall, in_tuple: bool, hidden: Tensor) -> tuple[Tensor, ...]:
    return (call_layer(layer, hidden, call, in_tuple=in_tuple),)


def _grad_of(value: Value) -> Tensor:
    grad = value.slot.take()
    return torch.zeros_like(value.data) if grad is None else grad
