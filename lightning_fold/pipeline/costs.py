"""What the parts of a decoder weigh in a cut into stages: FLOPs of the forward per token.

Invariant: products only, 2 operations per weight that a token is multiplied with, so a layer of E
experts counts top_k / E of their weights; `callbacks.flops` counts with the same pieces. Left out:
the attention core where it is not given, softmax and other arithmetic without weights, the loss,
recomputation, and all communication. The backward is about twice the forward in every part, so
it moves no border.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lightning_fold.model.inspect import ExpertsSpec, ModelParts

Attention = Literal["causal", "full"]

FLOPS_PER_WEIGHT = 2
# QK^T and PV are 2*s*q each per token and layer; a causal mask leaves half of it.
_PER_SCORE = {"causal": 2, "full": 4}
_TOP_K_NAMES = ("top_k", "num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class LayerCosts:
    """FLOPs of the forward per token, or any other unit, as long as it is one.

    Attributes:
        embedding: Of the token embedding.
        layers: Of each decoder layer, in order of the forward.
        head: Of final norm and LM head.
    """

    embedding: float
    layers: tuple[float, ...]
    head: float

    def __post_init__(self) -> None:
        for cost in (self.embedding, *self.layers, self.head):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"{cost} is no cost; legal: finite, at least 0.  Change {self}.")


def layer_weights(
    *,
    hidden_size: int,
    query_size: int,
    key_value_size: int,
    mlp_width: int,
    mlp_matrices: int = 3,
) -> int:
    """Count the matrix weights that one token is multiplied with in a decoder layer.

    Args:
        hidden_size: Width of the residual stream.
        query_size: Attention heads times head width.
        key_value_size: Key/value heads times head width.
        mlp_width: Inner width of the MLP; of a MoE layer top_k times that of an expert, plus that
            of the shared experts.
        mlp_matrices: 3 for gated MLPs (gate, up, down), 2 for plain ones.
    """
    return hidden_size * (2 * query_size + 2 * key_value_size + mlp_matrices * mlp_width)


def core_flops(*, query_size: int, sequence_length: int, attention: Attention = "causal") -> int:
    """Count the forward of one layer's attention core per token.

    Args:
        query_size: Attention heads times head width.
        sequence_length: Tokens that one token may attend to, before any causal mask.
        attention: "causal" counts half of the score matrix, as Megatron-LM does since 2026;
            "full" counts all of it, as arXiv 2504.14960 and most older figures do.

    Raises:
        ValueError: If `attention` is neither.
    """
    if attention not in _PER_SCORE:
        raise ValueError(
            f"attention={attention!r} is no FLOPs convention.\n"
            "Legal values: 'causal', 'full'.  Change `attention`."
        )
    return _PER_SCORE[attention] * sequence_length * query_size


def layer_costs(
    weights: Sequence[float], *, head_weights: int, hidden_size: int, core: float = 0.0
) -> LayerCosts:
    """Weigh a decoder by plain numbers.

    The embedding computes nothing, but its row is read in the forward and added to in the
    backward; it weighs as much as a product with that one row, which decides ties and no more.

    Args:
        weights: What a token is multiplied with in each layer, as from `layer_weights`.
        head_weights: Weights of the LM head: hidden size times vocabulary.
        hidden_size: Length of a row of the embedding.
        core: FLOPs of a layer's attention core, from `core_flops`.
    """
    return LayerCosts(
        embedding=FLOPS_PER_WEIGHT * hidden_size,
        layers=tuple(FLOPS_PER_WEIGHT * count + core for count in weights),
        head=FLOPS_PER_WEIGHT * head_weights,
    )


def costs_of(parts: ModelParts, *, top_k: int | None = None, core: float = 0.0) -> LayerCosts:
    """Weigh a whole model by its parameters, whatever its layers are made of.

    Every parameter counts as a weight, norms and biases too, which are few. What lies outside
    the layers and is no embedding counts to the head; a head tied to the embedding counts in full.

    Args:
        parts: Of the model as the user built it: not cut, not folded. On meta is enough.
        top_k: Experts per token; by default read from each layer's router, else from the config.
        core: FLOPs of a layer's attention core, from `core_flops`. Without it long sequences
            make layers too light against the head.

    Raises:
        ValueError: The experts per token can be read nowhere.
    """
    inside = {id(module) for _, layer in parts.layers for module in layer.modules()}
    outside = [module for module in parts.core.modules() if id(module) not in inside]
    rows = [module.embedding_dim for module in outside if isinstance(module, nn.Embedding)]
    # By module: `parameters()` would leave out a head that is tied.
    head = sum(_own_size(module) for module in outside if not isinstance(module, nn.Embedding))
    weights = [_active_size(parts, name, layer, top_k) for name, layer in parts.layers]
    return layer_costs(weights, head_weights=head, hidden_size=sum(rows), core=core)


def _own_size(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters(recurse=False))


def _active_size(parts: ModelParts, name: str, layer: nn.Module, top_k: int | None) -> float:
    size: float = sum(param.numel() for param in layer.parameters())
    for experts in parts.experts:
        if experts.name.startswith(f"{name}.") and experts.num_experts:
            used = top_k if top_k is not None else _read_top_k(parts, experts)
            stored = sum(param.numel() for param in experts.module.parameters())
            size -= stored * max(experts.num_experts - used, 0) / experts.num_experts
    return size


def _read_top_k(parts: ModelParts, experts: ExpertsSpec) -> int:
    for place in _places_of_top_k(parts, experts):
        for name in _TOP_K_NAMES:
            value = getattr(place, name, None)
            if type(value) is int and value > 0:
                return value
    raise ValueError(
        f"{experts.name}: how many of its {experts.num_experts} experts a token uses stands "
        f"neither at its router nor in the config ({', '.join(_TOP_K_NAMES)}), so its layer cannot "
        "be weighed for an even cut. Legal: any layout that is written out, such as 'Et*2|t*2,L'."
        "  Change `pipeline_layout`."
    )


def _places_of_top_k(parts: ModelParts, experts: ExpertsSpec) -> Iterator[Any]:
    """The routers of a MoE block, the block, and the config."""
    block = experts.name.rpartition(".")[0]
    names = [name for name in parts.routers if name.rpartition(".")[0] == block]
    for name in (*names, block):
        yield parts.core.get_submodule(name.removeprefix(parts.core_name).removeprefix("."))
    config = getattr(parts.core, "config", None)
    yield getattr(config, "text_config", None) or config
