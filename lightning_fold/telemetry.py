"""Event types of one rank and the sink that hands them to subscribers.

Numbers flow back as events: the layers emit, callbacks subscribe, and neither knows the other.
Invariant: emitting a kind that nobody subscribed to costs one dictionary lookup, and code that
would have to compute an event first asks `wants`. Nothing here communicates, syncs or stores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

# Shapes.  E all experts

E = TypeVar("E")


@dataclass(frozen=True, eq=False)
class RoutingCounts:
    """Routed rows of this rank's own tokens in one forward of one MoE layer.

    Attributes:
        layer: Path of the MoE layer in the model, the same on every rank.
        counts_E: int64 [E] on the layer's device, over global experts. The subscriber must not
            write to it.
        training: Whether the layer was in training mode.
    """

    layer: str
    counts_E: Tensor
    training: bool


@dataclass(frozen=True)
class CollectiveBytes:
    """Bytes that this rank hands to one collective on `axis`."""

    axis: str
    operation: str
    num_bytes: int


@dataclass(frozen=True)
class Flight:
    """One collective of rows from its start to the end of its wait; seconds of `perf_counter`.

    Told where the host waits for it, as on CPUs: on a GPU the stream waits, and none is told.

    Attributes:
        issued_s: When it was started.
        arrived_s: When its result was there; the end of the wait where the collective cannot tell.
        waited_s: How long this rank stood still for it: the part that was not hidden.
    """

    axis: str
    operation: str
    issued_s: float
    arrived_s: float
    waited_s: float


class Telemetry:
    """Hands each event to the handlers of its exact type, in order of subscription."""

    def __init__(self) -> None:
        # Tuples, so that a handler may subscribe or unsubscribe while an event is handed out.
        self._handlers: dict[type[Any], tuple[Callable[[Any], None], ...]] = {}

    def subscribe(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Call `handler` for every later event of type `kind`, on the thread that emits it."""
        self._handlers[kind] = (*self._handlers.get(kind, ()), handler)

    def unsubscribe(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Undo one `subscribe`.

        Raises:
            RuntimeError: If the handler is not subscribed to `kind`.
        """
        handlers = list(self._handlers.get(kind, ()))
        if handler not in handlers:
            raise RuntimeError(f"{handler!r} is not subscribed to {kind.__name__}.")
        handlers.remove(handler)
        if handlers:
            self._handlers[kind] = tuple(handlers)
        else:
            del self._handlers[kind]

    def wants(self, kind: type[Any]) -> bool:
        """Say whether anybody listens, so that the emitter can skip computing the event."""
        return kind in self._handlers

    def emit(self, event: object) -> None:
        """Hand out one event; an exception of a handler is the caller's."""
        for handler in self._handlers.get(type(event), ()):
            handler(event)
