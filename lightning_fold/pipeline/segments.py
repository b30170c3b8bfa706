"""A decoder layer in the five pieces between which rows travel, by its own modules.

    attend     the layer, its MoE block giving zeros, and the block up to its experts; packs rows
    dispatch   rows to their experts
    experts    this rank's experts on what has arrived
    combine    their outputs back
    merge      the block again, its experts giving what came back, added to the residual

A block that gives zeros shows what its output is added to, so nothing is said of how a layer is
written. What such a layer may not do is seen at set-up (`segment_probe`). The router's decision is
made once, in `attend`; `merge` is handed the same one, and shared experts run there.
"""

# Shapes.  B sequences   s tokens of a sequence on this rank   T = B*s   D model width   K top-k
#          S rows that arrived

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_fold.model.inspect import ROUTER_NAMES, ModelParts
from lightning_fold.moe.balance import Routed
from lightning_fold.moe.dispatch.base import AnySegmented, SegmentedDispatcher, Trip
from lightning_fold.moe.layer import FoldedExperts, compute_dtype
from lightning_fold.moe.routing import Routing
from lightning_fold.moe.tokens import repeating
from lightning_fold.pipeline.tape import Steps, Tape, Value

LayerCall = tuple[tuple[Any, ...], Mapping[str, Any], bool]
"""Arguments of a layer but its hidden states, and whether those are given by position."""
Collect = Callable[[list[tuple[int, Routed]] | None], Any]
"""A context in which routers' decisions are added to a list; None adds them nowhere."""


class Caught(NamedTuple):
    """A layer up to its experts.

    Attributes:
        residual: What the block's output is added to, [B, s, D].
        inside: The block's input, [B, s, D].
        hidden_TD: The experts' input.
        index_TK: Experts of every token.
        weights_TK: Their weights.
        routers: What the block's routers have returned, without graphs.
    """

    residual: Tensor
    inside: Tensor
    hidden_TD: Tensor
    index_TK: Tensor
    weights_TK: Tensor
    routers: Mapping[str, Any]


@dataclass(frozen=True)
class MoeLayer:
    """A decoder layer with one MoE block.

    Attributes:
        layer: The layer.
        block: Its block.
        experts: The container in that.
        in_tuple: Whether the layer returns a tuple around its hidden states.
    """

    layer: nn.Module
    block: nn.Module
    experts: nn.Module
    in_tuple: bool

    def catch(self, hidden: Tensor, call: LayerCall) -> Caught:
        """Run the layer, but neither its experts nor what follows them in the block."""
        seen: dict[str, Any] = {}
        routers: dict[str, Any] = {}
        block_forward: Callable[..., Tensor] = self.block.forward

        def stop(hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
            raise _Stop(hidden_TD, index_TK, weights_TK)

        def run_block(inside: Tensor, *more: Any, **named: Any) -> Tensor:
            if more or named:
                raise LookupError("the layer gives its block more than hidden states")
            if seen:
                raise LookupError("the layer calls its block a second time")
            try:
                with replaced(self.experts, stop), _noted(self.routers, routers):
                    block_forward(inside)
            except _Stop as end:
                seen.update(inside=inside, experts=end.given)
                return torch.zeros_like(inside)
            raise LookupError("the block does not call its experts")

        with replaced(self.block, run_block):
            residual = call_layer(self.layer, hidden, call, in_tuple=self.in_tuple)
        if not seen:
            raise LookupError("the layer does not call its block")
        hidden_TD, index_TK, weights_TK = seen["experts"]
        return Caught(residual, seen["inside"], hidden_TD, index_TK, weights_TK, routers)

    def merge(
        self, residual: Tensor, inside: Tensor, out_TD: Tensor, routers: Mapping[str, Any]
    ) -> Tensor:
        """The layer's output, where its experts' is `out_TD`."""
        left = [out_TD]

        def give(hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
            if not left:
                raise LookupError("the block calls its experts a second time")
            return left.pop()

        with ExitStack() as stack:
            # `catch` has called the block for this forward.
            stack.enter_context(repeating())
            stack.enter_context(replaced(self.experts, give))
            for name, out in routers.items():
                stack.enter_context(_recorded(self.block, name, out))
            out = self.block(inside)
        if not isinstance(out, Tensor) or out.shape != inside.shape:
            raise LookupError("the block gives something else than hidden states, shaped as given")
        add: Any = getattr(self.layer, "add_block", torch.add)
        added: Tensor = add(residual, out)
        return added

    @property
    def routers(self) -> dict[str, nn.Module]:
        """The block's routers by their names in it."""
        children = self.block._modules
        return {name: m for name in ROUTER_NAMES if (m := children.get(name)) is not None}


@dataclass
class Decision:
    """What one microbatch's attend has decided in one layer; a repetition decides nothing.

    Attributes:
        routing: The decision, its weights without a graph.
        begun: What the dispatcher's `begin` gave.
        trip: The rows' way.
        routers: As `Caught.routers`.
        dtype: Of the experts' output.
    """

    routing: Routing | None = None
    begun: Any = None
    trip: Trip[Any] | None = None
    routers: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


class Segments:
    """Runs one layer on a tape.

    Args:
        layer: With folded experts, or without any.
        collect: See `Collect`.
    """

    def __init__(self, layer: MoeLayer, collect: Collect) -> None:
        self.layer = layer
        self.collect = collect

    @property
    def folded(self) -> FoldedExperts:
        """The experts."""
        experts = self.layer.experts.forward
        assert isinstance(experts, FoldedExperts), "only folded experts run in pieces"
        return experts

    @property
    def dispatcher(self) -> AnySegmented:
        """Moves the rows."""
        dispatcher = self.folded.dispatcher
        assert isinstance(dispatcher, SegmentedDispatcher)
        return dispatcher

    def steps(
        self, tape: Tape, hidden: Value, call: LayerCall, routed: list[tuple[int, Routed, Value]]
    ) -> Steps[Value]:
        """Run the layer. Collective over ep and etp.

        Args:
            tape: Of this microbatch.
            hidden: [B, s, D].
            call: The layer's other arguments.
            routed: Gets the routers' decisions, each with the value of its logits.
        """
        kept, found = Decision(), list[tuple[int, Routed]]()
        attend = partial(self._attend, call, kept, found)
        residual, inside, *rest = tape.compute(attend, hidden)
        for (number, decision), logits in zip(found, rest, strict=False):
            routed.append((number, decision, logits))
        parts = tuple(rest[len(found) :])
        if self._has_peers:
            # How many rows come is on the wire.
            yield
        trip, comm = self._settle(kept), self.dispatcher.comm
        if trip.num_sent is not None and trip.num_sent < parts[0].data.shape[0]:
            parts = tape.compute(lambda *packed: tuple(map(trip.sent, packed)), *parts)
        del hidden, rest
        for hop in trip.hops:
            parts = yield from tape.exchange(hop, comm, *parts)
        rows = tape.compute(partial(self._experts, trip), *parts)
        del parts
        back = trip.hops_back
        for i, hop in enumerate(back, start=1):
            rows = yield from tape.exchange(hop, comm, *rows, rests=i == len(back))
        (out,) = tape.compute(partial(self._merge, kept), residual, inside, *rows)
        return out

    def _attend(
        self, call: LayerCall, kept: Decision, found: list[tuple[int, Routed]], hidden: Tensor
    ) -> tuple[Tensor, ...]:
        collected: list[tuple[int, Routed]] = []
        with self.collect(collected):
            caught = self.layer.catch(hidden, call)
        folded, dispatcher = self.folded, self.dispatcher
        weights_TK = caught.weights_TK
        x_TD = caught.hidden_TD.to(compute_dtype(caught.hidden_TD))
        if kept.routing is None:
            routing = folded.decide(caught.index_TK, weights_TK)
            kept.begun = dispatcher.begin(routing)
            kept.routing = replace(routing, weights_TK=weights_TK.detach())
            kept.routers, kept.dtype = caught.routers, caught.hidden_TD.dtype
            found.extend((n, r.with_logits(r.logits_TE.detach())) for n, r in collected)
        else:
            routing = replace(kept.routing, weights_TK=weights_TK)
        parts = dispatcher.pack(x_TD, routing, kept.begun)
        logits = [routed.logits_TE for _, routed in collected]
        return caught.residual, caught.inside, *logits, *parts

    @property
    def _has_peers(self) -> bool:
        comm = self.dispatcher.comm
        return comm.size("ep") * comm.size("etp") > 1

    def _settle(self, kept: Decision) -> Trip[Any]:
        assert kept.routing is not None
        kept.trip = self.dispatcher.settle(kept.routing, kept.begun)
        return kept.trip

    def _experts(self, trip: Trip[Any], *parts: Tensor) -> tuple[Tensor, ...]:
        return (self.folded.compute(self.dispatcher.arrive(parts, trip)),)

    def _merge(
        self, kept: Decision, residual: Tensor, inside: Tensor, rows: Tensor
    ) -> tuple[Tensor, ...]:
        assert kept.trip is not None
        out_TD = self.dispatcher.bring_home(rows, kept.trip).to(kept.dtype)
        out = self.layer.merge(residual, inside, out_TD, kept.routers)
        if out.dtype != residual.dtype:
            raise TypeError(
                f"in pieces, {type(self.layer.layer).__name__} gives {out.dtype} where it gives "
                f"{residual.dtype} whole: its block's output is cast before it is added. Legal "
                "pipeline_overlap: False, or a method `add_block` that says so.  "
                "Change `pipeline_overlap`."
            )
        return (out,)


def moe_layers(
    root: nn.Module, parts: ModelParts, *, in_tuple: bool
) -> dict[int, MoeLayer | str | None]:
    """Each layer of `parts` by its place: with its block, None for a dense one, or why not."""
    return {
        i: _moe_layer(root, parts, name, layer, in_tuple=in_tuple)
        for i, (name, layer) in enumerate(parts.layers)
    }


def _moe_layer(
    root: nn.Module, parts: ModelParts, name: str, layer: nn.Module, *, in_tuple: bool
) -> MoeLayer | str | None:
    inside = [spec for spec in parts.experts if spec.name.startswith(f"{name}.")]
    if not inside:
        return None
    if len(inside) > 1:
        return f"it has {len(inside)} containers of experts"
    spec = inside[0]
    if spec.refusal is not None:
        return f"its experts are not folded ({spec.refusal})"
    block_name = spec.name.rpartition(".")[0]
    if block_name == name:
        return "its experts lie in no block of their own"
    return MoeLayer(layer, root.get_submodule(block_name), spec.module, in_tuple)


def call_layer(layer: nn.Module, hidden: Tensor, call: LayerCall, *, in_tuple: bool) -> Tensor:
    """Call a layer as the model does, with its hooks; its hidden states."""
    rest, named, by_position = call
    out: Any = (
        layer(hidden, *rest, **named) if by_position else layer(hidden_states=hidden, **named)
    )
    result: Tensor = out[0] if in_tuple else out
    return result


class _Stop(BaseException):
    """Ends a block at its experts. Not an `Exception`: the block must not swallow it."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = given


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another forward, its hooks staying."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.forward = own


@contextmanager
def _noted(routers: Mapping[str, nn.Module], into: dict[str, Any]) -> Iterator[None]:
    """Note what routers return."""

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            into[name] = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in routers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Recorded(nn.Module):
    """Stands for a router: returns what it has returned, and calls nobody's hooks."""

    def __init__(self, router: nn.Module, out: Any) -> None:
        super().__init__()
        self.__dict__["router"], self.__dict__["out"] = router, out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["router"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["out"]


@contextmanager
def _recorded(block: nn.Module, name: str, out: Any) -> Iterator[None]:
    router = block._modules[name]
    assert router is not None
    block._modules[name] = _Recorded(router, out)
    try:
        yield
    finally:
        block._modules[name] = router
