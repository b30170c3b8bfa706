"""Compute that is slept: what an emulated cluster computes.

A piece takes its time in the forward, as long for the gradient of its input in the backward, and as
long once more for the gradients of its weights: at once, or whenever the active store
(`fold_kernels.weight_store`) is emptied, as the product's own operations do. Its arithmetic runs as
well, on small tensors, and what is left of the time is slept. Times follow from shapes: attention
costs by tokens and local heads, experts by the rows that arrived and the local width.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fold_kernels.weight_store import Gradients, PutOff, WeightStore, active_store
from lightning_fold.model.decoder import Attention
from lightning_fold.topology.comm import Comm, Pending, Works


@dataclass(frozen=True)
class Costs:
    """Seconds of the forward of one layer.

    Attributes:
        attend: Of one token in all heads.
        experts: Of one row in one whole expert.
    """

    attend: float
    experts: float


@dataclass(frozen=True)
class Slept:
    """One piece of compute.

    Attributes:
        what: `attend` or `experts`.
        kind: F, I (gradient of the input) or W (of the weights), as in a pipeline's timeline.
    """

    what: str
    kind: str
    start_s: float
    end_s: float


class Sleeper:
    """Sleeps for one rank, and keeps what it has slept.

    Args:
        counts_rest: Whether what a rank computes between two pieces is part of the second one. It
            would be on a machine of the rank's own, where it is a small one; here eight ranks do
            it on two cores. Waits that go through `topology.comm` are no computing; those of
            FSDP2 are not seen, so it suits pipelines, which have them outside of their schedule.

    Attributes:
        slept: In order.
        is_waiting: Whether the rank waits.
    """

    def __init__(self, *, counts_rest: bool = False) -> None:
        self.slept: list[Slept] = []
        self._counts_rest = counts_rest
        self.is_waiting = False
        self._rest_s, self._mark_s = 0.0, time.perf_counter()

    def start(self) -> None:
        """Forget what was computed before: a step begins."""
        self._rest_s, self._mark_s = 0.0, time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait."""
        self._rest_s += time.perf_counter() - self._mark_s
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False
            self._mark_s = time.perf_counter()

    def piece(
        self,
        what: str,
        seconds: float,
        run: Callable[[Tensor], Tensor],
        x: Tensor,
        *,
        weights_apart: bool = False,
    ) -> Tensor:
        """`run(x)`, which takes so long, and so does each half of its backward.

        Args:
            what: Of `Slept`.
            seconds: Of each.
            run: Computes.
            x: Its input.
            weights_apart: Whether somebody else sleeps for the gradients of its weights.
        """
        backward = _Backward(self, what, seconds, active_store(), weights_apart)
        self.begin()
        out = run(_Enter.apply(x, backward))
        self.end(what, "F", seconds)
        left: Tensor = _Leave.apply(out, backward)
        return left

    def begin(self) -> None:
        """A piece begins."""
        if not self._counts_rest:
            self.start()

    def end(self, what: str, kind: str, seconds: float) -> None:
        """Sleep until the piece has taken so long."""
        start = self._mark_s
        done = self._rest_s + time.perf_counter() - start
        time.sleep(max(0.0, seconds - done))
        self.start()
        self.slept.append(Slept(what, kind, start, self._mark_s))


def slow_attention(model: nn.Module, sleeper: Sleeper, seconds: float) -> None:
    """Make the attention of a built-in decoder take `seconds` a token, all heads together.

    To be called before the model is folded: a tensor-parallel rank then has fewer heads.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            heads = module.q_proj.out_features // module.head_dim
            module.attend = _slow_attend(module.attend, sleeper, seconds / heads)


@contextmanager
def slow_experts(sleeper: Sleeper, seconds: float, width: int) -> Iterator[None]:
    """Make every row of a MoE layer take `seconds`, on a rank that has all of an expert's `width`.

    Raises:
        RuntimeError: The product has no `run_experts` any more.
    """
    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("lightning_fold.") and hasattr(module, "run_experts")
    ]
    if not users:
        raise RuntimeError("no module of lightning_fold has `run_experts`: adapt slow_experts")
    originals = [module.run_experts for module in users]
    for module, run in zip(users, originals, strict=True):
        module.run_experts = _slow_rows(run, sleeper, seconds / width)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, run in zip(users, originals, strict=True):
            module.run_experts = run  # type: ignore[attr-defined]


@contextmanager
def waits_told(sleeper: Sleeper) -> Iterator[None]:
    """Tell `sleeper` of all that waits in `topology.comm`."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in _WAITS]
    for owner, name, original in originals:
        setattr(owner, name, _told(original, sleeper))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


_WAITS: tuple[tuple[type[Any], str], ...] = (
    (Pending, "wait"),
    (Works, "wait"),
    (Comm, "all_reduce"),
    (Comm, "all_to_all_rows"),
    (Comm, "all_gather_rows"),
    (Comm, "reduce_scatter_rows"),
    (Comm, "gather_from_all"),
    (Comm, "swap"),
)


def _told(original: Callable[..., Any], sleeper: Sleeper) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if sleeper.is_waiting:
            return original(*args, **options)
        with sleeper.waiting():
            return original(*args, **options)

    return call


@dataclass(frozen=True)
class _Backward:
    """The backward of one piece, from the gradient of its output to that of its input."""

    sleeper: Sleeper
    what: str
    seconds: float
    store: WeightStore | None
    weights_apart: bool

    def end(self) -> None:
        self.sleeper.end(self.what, "I", self.seconds)
        if self.weights_apart:
            return
        if self.store is None:
            self.weights()
        else:
            # A weight without elements, whose gradient nobody needs.
            self.store.put((torch.empty(0, requires_grad=True),), self.weights)

    def weights(self) -> Sequence[None]:
        self.sleeper.begin()
        self.sleeper.end(self.what, "W", self.seconds)
        return (None,)


@dataclass(frozen=True)
class _SlowGradients:
    """Where an operation leaves its weights' gradients, which then take their time."""

    place: PutOff
    sleeper: Sleeper
    what: str
    seconds: float

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.place.weights

    def anchor(self) -> Tensor:
        return self.place.anchor()

    def leave(self, gradients: Gradients) -> None:
        def slow() -> Sequence[Tensor | None]:
            self.sleeper.begin()
            found = gradients()
            self.sleeper.end(self.what, "W", self.seconds)
            return found

        self.place.leave(slow)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: _Backward) -> Tensor:
        ctx.end = backward.end
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.end()
        return grad, None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: _Backward) -> Tensor:
        ctx.begin = backward.sleeper.begin
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.begin()
        return grad, None


def _slow_attend(
    attend: Callable[..., tuple[Tensor, None]], sleeper: Sleeper, seconds: float
) -> Callable[..., tuple[Tensor, None]]:
    def slow(module: nn.Module, query: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
        def run(query: Tensor) -> Tensor:
            return attend(module, query, *rest, **options)[0]

        batch, heads, length = query.shape[:3]
        return sleeper.piece("attend", seconds * batch * heads * length, run, query), None

    return slow


def _slow_rows(
    run_experts: Callable[..., Tensor], sleeper: Sleeper, seconds: float
) -> Callable[..., Tensor]:
    def slow(inputs: Any, *, gate_up_e2FD: Tensor, **options: Any) -> Tensor:
        rows, width = inputs.origin_R.shape[0], gate_up_e2FD.shape[2]
        spent, place = seconds * rows * width, options.get("put_off")
        if place is not None:
            options["put_off"] = place = _SlowGradients(place, sleeper, "experts", spent)

        def run(source: Tensor) -> Tensor:
            arrived = replace(inputs, source_SD=source)
            return run_experts(arrived, gate_up_e2FD=gate_up_e2FD, **options)

        apart = place is not None
        return sleeper.piece("experts", spent, run, inputs.source_SD, weights_apart=apart)

    return slow
