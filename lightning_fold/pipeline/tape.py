"""One microbatch's way through a stage as computations and exchanges, in both directions.

Every computation is an autograd graph of its own, and no graph spans an exchange: so an exchange is
plain asynchronous communication forwards and backwards, and one Python thread can advance the
backward of one microbatch between the computations of another's forward. A pass is a generator
that yields once an exchange, right after it has been launched.

Invariant, which keeps ranks from waiting for each other: in which order passes launch their
exchanges follows from the list of actions alone, never from what has arrived. Every exchange is
launched by every rank, also with zero rows, and each pass has one in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from lightning_fold.model.recompute import Kept, keeping, replaying
from lightning_fold.topology.comm import Comm, Pending
from lightning_fold.topology.in_flight import Hop

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A pass: yields when something is on the wire and somebody else may compute."""
Run = Callable[..., tuple[Tensor, ...]]
Context = Callable[[], AbstractContextManager[Any]]


class Slot:
    """Where the gradient of one value gathers."""

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        """Add what one use of the value gives."""
        self.grad = grad if self.grad is None else self.grad + grad

    def take(self) -> Tensor | None:
        """The gradient, which is forgotten here."""
        grad, self.grad = self.grad, None
        return grad


class Value:
    """A tensor without history on the border of two pieces, and its gradient's place."""

    __slots__ = ("data", "slot")

    def __init__(self, data: Tensor) -> None:
        self.data, self.slot = data.detach(), Slot()


class Surroundings(Protocol):
    """What a microbatch's computations have around them: precision, token layouts, random numbers.

    Microbatches take turns, so none of it may be left to who ran before.
    """

    def mark(self) -> Any:
        """What a repetition of the next computation has to start from."""

    def __call__(self, mark: Any = None, *, repeats: bool = False) -> AbstractContextManager[Any]:
        """Enter them, for a repetition at its mark, else where the last computation left off."""


class Compute:
    """One piece of a pass; `backward` may run it again first.

    Args:
        run: Takes the tensors and returns some, of which those with a graph have gradients.
        values: Its inputs.
        around: Entered for every run.
        repeats: Whether to keep no graph and to run again, with every choice as it was.
    """

    def __init__(
        self, run: Run, values: Sequence[Value], around: Surroundings, *, repeats: bool
    ) -> None:
        self._run, self._around, self._repeats = run, around, repeats
        self._slots = [value.slot for value in values]
        self._inputs = [value.data for value in values]
        self._roots: list[Any] | None = None
        self._outputs: list[Slot] = []
        self._kept: Kept = []

    def forward(self) -> tuple[Value, ...]:
        """Compute; the inputs are let go unless it repeats."""
        if self._repeats:
            self._mark = self._around.mark()
            with self._around(), torch.no_grad(), keeping(self._kept):
                outputs = self._run(*self._inputs)
        else:
            with self._around(), torch.enable_grad():
                outputs = self._graph()
            self._inputs = []
        values = tuple(Value(out) for out in outputs)
        self._outputs = [value.slot for value in values]
        return values

    def prepare(self) -> None:
        """Run again, if that is still to be done; needs no gradient, so one may be travelling."""
        if self._roots is None:
            with self._around(self._mark, repeats=True), torch.enable_grad(), replaying(self._kept):
                self._graph()
            self._inputs, self._kept = [], []

    def backward(self) -> None:
        """Give the inputs' slots what the outputs' hold."""
        self.prepare()
        assert self._roots is not None
        grads = [slot.take() for slot in self._outputs]
        pairs = [
            (root, grad)
            for root, grad in zip(self._roots, grads, strict=True)
            if root is not None and grad is not None
        ]
        self._roots = []
        if pairs:
            edges, given = zip(*pairs, strict=True)
            del pairs, grads
            torch.autograd.backward(edges, given)

    def _graph(self) -> tuple[Tensor, ...]:
        """Compute with a graph, of which the ends are kept and no tensor is."""
        entered = [
            _Enter.apply(_tie(x), x, slot) if x.is_floating_point() else x
            for x, slot in zip(self._inputs, self._slots, strict=True)
        ]
        outputs = self._run(*entered)
        self._roots = [get_gradient_edge(out) if out.requires_grad else None for out in outputs]
        return outputs


class Exchange:
    """One hop of some values of equal rows; its backward is the transposed one."""

    def __init__(
        self, hop: Hop, comm: Comm, values: Sequence[Value], *, rests: bool = False
    ) -> None:
        self.hop, self.comm, self.values, self.rests = hop, comm, values, rests
        self._slots = [value.slot for value in values]
        self._pending: list[Pending] = []
        self._like: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._outputs: list[Slot] = []

    def start(self) -> None:
        """Launch."""
        self._pending = [self.hop.start(value.data, self.comm) for value in self.values]

    def finish(self) -> tuple[Value, ...]:
        """Wait."""
        landed = tuple(Value(pending.wait()) for pending in self._pending)
        self._like = [(v.data.shape, v.data.dtype, v.data.device) for v in landed]
        self._outputs = [value.slot for value in landed]
        self._pending, self.values = [], ()
        return landed

    def start_backward(self) -> None:
        """Launch the gradients' way back; zeros where nobody has used a value."""
        self._pending = [
            self.hop.transposed.start(_or_zeros(slot.take(), like), self.comm)
            for slot, like in self._differentiable(self._outputs)
        ]

    def finish_backward(self) -> None:
        """Wait for them."""
        ends = [slot for slot, _ in self._differentiable(self._slots)]
        for slot, pending in zip(ends, self._pending, strict=True):
            slot.add(pending.wait())
        self._pending = []

    def _differentiable(self, slots: Sequence[Slot]) -> list[tuple[Slot, Any]]:
        # By dtype, which is equal on all ranks, and not by who needs a gradient.
        pairs = zip(slots, self._like, strict=True)
        return [(slot, like) for slot, like in pairs if like[1].is_floating_point]


class Tape:
    """What one microbatch remembers on one stage between its forward and its backward.

    Args:
        around: Of its computations.
        repeats: Whether computations keep no graph and run again.

    Attributes:
        clock: Entered around all that is computed, not around waits.
        in_the_gap: What to compute while a gradient travels: weight gradients that were put off.
    """

    def __init__(self, around: Surroundings, *, repeats: bool = False) -> None:
        self.clock: Context = nullcontext
        self.in_the_gap: Callable[[], None] | None = None
        self._around, self._repeats = around, repeats
        self._records: list[Compute | Exchange] = []

    def compute(self, run: Run, *values: Value, once: bool = False) -> tuple[Value, ...]:
        """Run a piece now.

        Args:
            run: See `Compute`.
            values: Its inputs.
            once: Never to be run again.
        """
        record = Compute(run, values, self._around, repeats=self._repeats and not once)
        with self.clock():
            outputs = record.forward()
        self._records.append(record)
        return outputs

    def exchange(
        self, hop: Hop, comm: Comm, *values: Value, rests: bool = False
    ) -> Steps[tuple[Value, ...]]:
        """Send values through a hop. Collective over its axis.

        Args:
            hop: The hop.
            comm: Collectives.
            values: Of equal rows.
            rests: Whether the backward yields once more, behind what fills the gap, as the forward
                does for what has no backward: two passes then keep step, their exchanges leave one
                after the other and not together, and neither pass ends with some alone.
        """
        record = Exchange(hop, comm, values, rests=rests)
        record.start()
        del values
        yield
        self._records.append(record)
        return record.finish()

    def backward(self) -> Steps[None]:
        """Go back the way; the gradients of the last outputs lie in their slots."""
        while self._records:
            record = self._records.pop()
            if isinstance(record, Compute):
                with self.clock():
                    record.backward()
                continue
            record.start_backward()
            yield
            # Behind what the other pass has computed meanwhile, so no wait stands before it.
            self._fill_gap()
            if record.rests:
                yield
            record.finish_backward()

    def _fill_gap(self) -> None:
        with self.clock():
            if self.in_the_gap is not None:
                self.in_the_gap()
            if self._records and isinstance(self._records[-1], Compute):
                self._records[-1].prepare()


def drain(steps: Steps[T]) -> T:
    """Run a pass alone."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            value: T = done.value
            return value


def weave(first: Steps[Any], second: Steps[Any]) -> None:
    """Advance two passes in turns: each computes while the other's exchange is in flight."""
    running = [first, second]
    while running:
        for steps in tuple(running):
            try:
                next(steps)
            except StopIteration:
                running.remove(steps)


class _Enter(Function):
    """The border into a graph: leaves the gradient in a slot, and keeps no tensor."""

    @staticmethod
    def forward(ctx: Any, tie: Tensor, x: Tensor, slot: Slot) -> Tensor:
        ctx.slot = slot
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.slot.add(grad.detach())
        return grad.new_empty(0), None, None


def _tie(x: Tensor) -> Tensor:
    return torch.empty(0, device=x.device, requires_grad=True)


def _or_zeros(grad: Tensor | None, like: Any) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
