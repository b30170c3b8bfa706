"""Adapters: how a user's own MoE block, a Python loop of expert modules, becomes stacked weights.

A registered block keeps its router and whatever else it owns; its list of experts is replaced by
one `StackedExperts`, which the strategy folds like any other. The stacking happens when the model
is folded, after all checks, so parameters and checkpoint keys are `experts.gate_up_proj` and
`experts.down_proj` from then on, under every mapping. Not here: experts without a gate or with
biases, which are refused.
"""

# Shapes.  T tokens   K top-k   E experts   D model width   F expert width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Weights = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Adapter:
    """What is known of one class of MoE blocks; `register_experts` says what the fields mean."""

    kind: type[nn.Module]
    route: Callable[[Any, Tensor], tuple[Tensor, Tensor]]
    weights: Callable[[Any], Weights]
    experts: str
    activation: Callable[[Tensor], Tensor]
    merge: Callable[[Any, Tensor, Tensor], Tensor] | None


_ADAPTERS: dict[type[nn.Module], Adapter] = {}


def register_experts(
    kind: type[nn.Module],
    *,
    route: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
    weights: Callable[[Any], Weights],
    experts: str = "experts",
    activation: Callable[[Tensor], Tensor] = nn.functional.silu,
    merge: Callable[[Any, Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Tell the strategy how MoE blocks of a class of yours route, and where their weights are.

    To be called where the class is defined, so that every process does. The last call for a class
    wins; a subclass without an own call is served by its nearest base.

    Args:
        kind: Class of the block: maps hidden states [..., D] to the same shape.
        route: Takes the block and hidden states [T, D]; returns expert indices, int64 [T, K], and
            routing weights [T, K].
        weights: Takes one expert; returns its gate [F, D], up [F, D] and down [D, F] weights. They
            must be all its parameters.
        experts: Attribute of the block that holds the nn.ModuleList of experts.
        activation: Of the gate: an expert is down(activation(gate(x)) * up(x)).
        merge: Takes the block, hidden states [T, D] and the sum over experts [T, D]; returns what
            the block returns, a shared expert added for example. None returns the sum.

    Raises:
        TypeError: `kind` is no class of modules.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_experts needs a class of modules, not {kind!r}. Change `kind`.")
    _ADAPTERS[kind] = Adapter(kind, route, weights, experts, activation, merge)


def adapter_of(block: nn.Module) -> Adapter | None:
    """The adapter of a block that still has its list of experts; None for any other module."""
    for kind in type(block).__mro__:
        adapter = _ADAPTERS.get(kind)
        if adapter is not None:
            listed = isinstance(block._modules.get(adapter.experts), nn.ModuleList)
            return adapter if listed else None
    return None


class Sizes(NamedTuple):
    """E, F and D of a block."""

    num_experts: int
    width: int
    model_width: int


def sizes_of(adapter: Adapter, block: nn.Module) -> Sizes:
    """Sizes of a block that `refusal_of` has let pass."""
    experts: Any = block._modules[adapter.experts]
    model_width, width = adapter.weights(experts[0])[2].shape
    return Sizes(len(experts), width, model_width)


def refusal_of(adapter: Adapter, block: nn.Module) -> str | None:
    """Why the experts of a block cannot be stacked; None when they can. Changes nothing."""
    experts: Any = block._modules[adapter.experts]
    if not len(experts):
        return "its list of experts is empty"
    shapes = {tuple(tuple(w.shape) for w in adapter.weights(expert)) for expert in experts}
    if len(shapes) > 1:
        return f"its experts differ in shape ({len(shapes)} kinds)"
    gate, up, down = shapes.pop()
    if len(gate) != 2 or gate != up or down != gate[::-1]:
        return f"the adapter's weights {gate}, {up}, {down} are not [F, D], [F, D] and [D, F]"
    stored = sum(p.numel() for p in experts[0].parameters())
    stacked = 3 * gate[0] * gate[1]
    if stored != stacked:
        return f"an expert has {stored} parameters, of which the adapter stacks {stacked}"
    if any(p.is_meta for p in experts.parameters()):
        return "its experts have no values yet (meta), and stacking keeps no initialiser"
    return None


class StackedExperts(nn.Module):
    """Experts as two stacked weights, [E, 2F, D] (gate, then up) and [E, D, F]."""

    def __init__(self, experts: nn.ModuleList, adapter: Adapter) -> None:
        super().__init__()
        parts = [adapter.weights(expert) for expert in experts]
        trained = all(p.requires_grad for p in experts.parameters())
        with torch.no_grad():
            gate_up = torch.stack([torch.cat((gate, up)) for gate, up, _ in parts])
            down = torch.stack([down for _, _, down in parts])
        self.gate_up_proj = nn.Parameter(gate_up, requires_grad=trained)
        self.down_proj = nn.Parameter(down, requires_grad=trained)
        self.act_fn = adapter.activation

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum of the chosen experts, [T, D]: the readable form of what folding runs."""
        out_TD = torch.zeros_like(hidden_TD)
        for e, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            token, slot = (index_TK == e).nonzero(as_tuple=True)
            gate, up = nn.functional.linear(hidden_TD[token], gate_up).chunk(2, dim=-1)
            rows = nn.functional.linear(self.act_fn(gate) * up, down)
            out_TD = out_TD.index_add(0, token, rows * weights_TK[token, slot, None])
        return out_TD


class AdaptedForward:
    """The forward of a block whose experts are stacked: route, experts, merge."""

    def __init__(self, block: nn.Module, adapter: Adapter) -> None:
        self.block = block
        self.adapter = adapter

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., D] to the same shape."""
        hidden_TD = hidden.reshape(-1, hidden.shape[-1])
        index_TK, weights_TK = self.adapter.route(self.block, hidden_TD)
        experts: Any = self.block._modules[self.adapter.experts]
        out_TD: Tensor = experts(hidden_TD, index_TK, weights_TK)
        if self.adapter.merge is not None:
            out_TD = self.adapter.merge(self.block, hidden_TD, out_TD)
        return out_TD.reshape(hidden.shape)


def stack_block(block: Any, adapter: Adapter) -> StackedExperts:
    """Replace a block's list of experts and its forward; `refusal_of` has let it pass."""
    stacked = StackedExperts(block._modules[adapter.experts], adapter)
    setattr(block, adapter.experts, stacked)
    block.forward = AdaptedForward(block, adapter)
    return stacked
