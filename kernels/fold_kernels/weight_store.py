"""Weight gradients put off: backward leaves them in a store, which is emptied when it suits.

Backward stays the ordinary one, run once; of an operation that asks `delay` it gives the gradients
of the inputs, and what the gradients of the weights are made of waits. Emptying the store computes
them and hands them to autograd at the weights: hooks, dtypes, views, shards and sums of several
uses are autograd's, as ever. Which operations ask, and when a store is emptied, is not decided
here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Gradients = Callable[[], Sequence[Tensor | None]]
_Left = tuple[tuple[Tensor, ...], Gradients]


class WeightStore:
    """What backwards have left, in their order."""

    def __init__(self) -> None:
        self._left: deque[_Left] = deque()

    @property
    def num_left(self) -> int:
        """Uses of weights whose gradients nobody has taken."""
        return len(self._left)

    def put(self, weights: tuple[Tensor, ...], gradients: Gradients) -> None:
        """Leave the gradients of `weights`.

        Args:
            weights: As the forward used them: parameters, or what was made of them, with its graph.
            gradients: Computes one gradient for each, None where the weight is frozen; runs once
                and is freed right after, with whatever tensors it holds.
        """
        self._left.append((weights, gradients))

    def take(self) -> Callable[[], None]:
        """What was left since the last call, as a function that computes and accumulates it.

        The function frees what it has worked off, piece by piece; a second call does nothing. It
        has to run outside of a backward, and it may run after later backwards and their takes.
        """
        left, self._left = self._left, deque()

        def run() -> None:
            while left:
                _accumulate_first(left)

        return run


class PutOff(Protocol):
    """Where the backward of one operation leaves the gradients of its weights.

    The operation takes the weights detached, and the anchor as one more input.
    """

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """As the forward uses them."""
        ...

    def anchor(self) -> Tensor:
        """An input that makes autograd run the backward, although no weight is an input."""
        ...

    def leave(self, gradients: Gradients) -> None:
        """Leave them; `WeightStore.put` says what `gradients` is."""
        ...


class WeightNode:
    """A node of the graph, made before its operation, that computes the gradients of its weights.

    Autograd runs it behind the nodes that were made later and before those made earlier: so what
    is made around it in the forward, such as the two ends of an exchange, is around it in backward.
    The weights are inputs of the graph as ever. It serves one operation.
    """

    def __init__(self, *weights: Tensor) -> None:
        self.weights = weights
        self._left: list[Gradients] = []
        self._tie: Tensor = _Node.apply(self._left, *weights)

    def anchor(self) -> Tensor:
        """See `PutOff`."""
        return self._tie

    def leave(self, gradients: Gradients) -> None:
        """See `PutOff`."""
        self._left.append(gradients)


@dataclass(frozen=True)
class Delay:
    """A place in a store, as `PutOff` says."""

    store: WeightStore
    weights: tuple[Tensor, ...]

    def anchor(self) -> Tensor:
        """See `PutOff`."""
        return torch.empty(0, device=self.weights[0].device, requires_grad=True)

    def leave(self, gradients: Gradients) -> None:
        """See `PutOff`."""
        self.store.put(self.weights, gradients)


# A context variable, because backward of a CUDA graph runs in another thread: an operation reads it
# in its forward and keeps what it found.
_ACTIVE: ContextVar[WeightStore | None] = ContextVar("active_weight_store", default=None)


def active_store() -> WeightStore | None:
    """The store that forwards of this thread use; None where gradients come at once."""
    return _ACTIVE.get()


@contextmanager
def deferring(store: WeightStore | None) -> Iterator[None]:
    """Make the backward of every forward inside leave its weight gradients in `store`."""
    before = _ACTIVE.set(store)
    try:
        yield
    finally:
        _ACTIVE.reset(before)


def delay(*weights: Tensor) -> Delay | None:
    """Where the operation that is about to run on `weights` has to leave their gradients.

    Returns:
        None where their gradients are to come at once, or there will be none.
    """
    store = _ACTIVE.get()
    return Delay(store, weights) if store is not None and _have_gradients(weights) else None


def weight_node(*weights: Tensor) -> WeightNode | None:
    """A node here for the gradients of `weights`, which an operation is about to run on.

    Returns:
        None where a store is active, or there will be no gradients.
    """
    return WeightNode(*weights) if _ACTIVE.get() is None and _have_gradients(weights) else None


def _have_gradients(weights: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(w.requires_grad for w in weights)


def _accumulate_first(left: deque[_Left]) -> None:
    weights, gradients = left.popleft()
    # One call of autograd a use and not one for all: what lies between a weight and its parameter
    # is then done before the next gradient is computed, and no two need room at a time.
    with torch.enable_grad():
        late = _Late.apply(gradients, *weights)
    # The last reference to what it holds is then the operation's own.
    del gradients
    torch.autograd.backward(late, torch.empty_like(late))


class _Late(Function):
    """The operation whose backward a store has kept, now without an output."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.empty(0, device=weights[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Computed inside of autograd, which may then take the result over as a parameter's
        # gradient; a caller's reference to it would force a copy.
        gradients, ctx.gradients = ctx.gradients, None
        with torch.autocast(grad.device.type, enabled=False):
            return None, *gradients()


class _Node(Function):
    """Its backward is the half of an operation's that makes gradients of weights."""

    @staticmethod
    def forward(ctx: Any, left: list[Gradients], *weights: Tensor) -> Tensor:
        ctx.left = left
        return torch.empty(0, device=weights[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            return None, *ctx.left.pop()()
