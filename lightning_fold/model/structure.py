"""The decoder that tensor parallelism knows how to shard, and why it refuses another.

Structure, not class: `embed_tokens`, `layers`, `norm` and an optional `lm_head` beside them; in
every layer a `self_attn` with q, k, v and o projections, and a MoE block or a gated MLP. Built-in
decoder, Mixtral and Qwen3-MoE have it, and most Hugging Face families. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from lightning_fold.model.inspect import ModelParts
from lightning_fold.topology import doctor
from lightning_fold.topology.folding import Folding

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SLICED_OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer.

    Attributes:
        name: Qualified name.
        module: The layer.
        self_attn: Its attention.
        dense_mlp: Its gated MLP; None in a MoE layer.
    """

    name: str
    module: Any
    self_attn: Any
    dense_mlp: Any


@dataclass(frozen=True)
class DecoderParts:
    """The pieces that tensor parallelism shards, and the core that the user's step calls.

    A pipeline stage has some of them alone; `starts` tells whether layer 0 is among its layers.
    """

    core: nn.Module
    base: nn.Module
    embed_tokens: nn.Embedding | None
    layers: tuple[LayerParts, ...]
    norm: nn.Module | None
    lm_head: nn.Linear | None
    starts: bool = True


def check_decoder(parts: ModelParts, folding: Folding) -> DecoderParts:
    """Find the decoder and make sure that all of it can be sharded over tp.

    Raises:
        ValueError: Something in the model is not known to work under tensor parallelism.
    """
    owner_name, owner, base = _find_base(parts)
    layers = tuple(_layer(name, module, parts) for name, module in parts.layers)
    for layer in layers:
        _check_attention(f"{layer.name}.self_attn", layer.self_attn, folding)
        if layer.dense_mlp is not None:
            _check_width(f"{layer.name}.mlp", layer.dense_mlp, folding)
    head = owner._modules.get("lm_head")
    if head is not None and not is_plain(head, nn.Linear):
        raise _refuse(f"{owner_name}.lm_head", f"it is a {type(head).__name__}, not nn.Linear")
    if not is_plain(base.embed_tokens, nn.Embedding):
        reason = f"{type(base.embed_tokens).__name__} computes more than nn.Embedding"
        raise _refuse(f"{parts.core_name}: embed_tokens", reason)
    decoder = DecoderParts(
        parts.core, base, base.embed_tokens, layers, base.norm, cast("Any", head)
    )
    _check_nothing_outside(parts, decoder)
    _check_outputs(parts.core)
    return decoder


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether `module` computes exactly what `kind` does: its forward gets replaced."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def _refuse(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name} cannot run under tensor_parallel_size > 1: {reason}. "
        f"Change `tensor_parallel_size` to 1; expert parallelism works without it."
    )


def _find_base(parts: ModelParts) -> tuple[str, nn.Module, Any]:
    """The module that holds embed_tokens, layers and norm, and its owner, which holds lm_head."""
    for name, owner in parts.core.named_modules(prefix=parts.core_name):
        for child in (owner, *owner.children()):
            if isinstance(getattr(child, "embed_tokens", None), nn.Embedding) and all(
                isinstance(child._modules.get(key), nn.Module) for key in ("layers", "norm")
            ):
                return name, owner, child
    raise _refuse(
        parts.core_name, "no submodule holds `embed_tokens` (nn.Embedding), `layers` and `norm`"
    )


def _layer(name: str, module: nn.Module, parts: ModelParts) -> LayerParts:
    attention = module._modules.get("self_attn")
    if attention is None:
        raise _refuse(name, "it has no `self_attn`; mixers over the sequence are not known")
    dense = None
    for child_name, child in module.named_children():
        if child is attention or not list(child.parameters()):
            continue
        if all(is_plain(child._modules.get(key), nn.Linear) for key in MLP):
            dense = child
        elif not acts_on_tokens(f"{name}.{child_name}", child, parts):
            raise _refuse(f"{name}.{child_name}", f"{type(child).__name__} is neither MLP nor norm")
    return LayerParts(name, module, attention, dense)


def acts_on_tokens(name: str, child: nn.Module, parts: ModelParts) -> bool:
    """A MoE block or a norm: it treats each token by itself, so any slice will do."""
    holds_experts = any(spec.name.startswith(f"{name}.") for spec in parts.experts)
    named = name in (*parts.routers, *parts.shared, *(spec.name for spec in parts.experts))
    norm = all(param.dim() == 1 for param in child.parameters()) and not list(child.children())
    return holds_experts or named or norm


def _check_attention(name: str, attention: Any, folding: Folding) -> None:
    for key in PROJECTIONS:
        if not is_plain(attention._modules.get(key), nn.Linear):
            raise _refuse(f"{name}.{key}", "it is missing or not nn.Linear")
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int) or not hasattr(attention, "num_key_value_groups"):
        raise _refuse(name, "it does not tell `head_dim` and `num_key_value_groups`")
    q, k, o = attention.q_proj, attention.k_proj, attention.o_proj
    if q.out_features != o.in_features:
        shapes = f"q_proj gives {q.out_features} features, o_proj takes {o.in_features}"
        raise _refuse(name, f"{shapes}, so q_proj holds more than query heads")
    for child, module in attention.named_children():
        if child not in PROJECTIONS:
            _check_head_norm(f"{name}.{child}", module, head_dim)
    if attention._parameters:
        raise _refuse(name, f"parameters {', '.join(attention._parameters)} are not known")
    heads, kv_heads = q.out_features // head_dim, k.out_features // head_dim
    doctor.check_heads(name, heads=heads, kv_heads=kv_heads, folding=folding)


def _check_head_norm(name: str, module: nn.Module, head_dim: int) -> None:
    for key, param in module.named_parameters():
        if param.numel() != head_dim:
            raise _refuse(
                f"{name}.{key}",
                f"it has {param.numel()} elements and head_dim is {head_dim}: a norm over all "
                "heads needs the heads of every tp rank",
            )


def _check_width(name: str, mlp: Any, folding: Folding) -> None:
    width = mlp.gate_proj.out_features
    if width % folding.tp:
        raise ValueError(
            f"{name}: width {width} cannot be split over tp={folding.tp}; legal tp: divisors of "
            f"{width}. Change `tensor_parallel_size`."
        )


def _check_nothing_outside(parts: ModelParts, decoder: DecoderParts) -> None:
    known = {id(p) for module in _known(decoder) for p in module.parameters()}
    outside = [name for name, p in parts.core.named_parameters() if id(p) not in known]
    if outside:
        raise _refuse(
            f"{parts.core_name}.{outside[0]}",
            "it lies outside embed_tokens, layers, norm and lm_head, where tp ranks hold copies of "
            "every token and its gradient would be counted tp times",
        )


def _known(decoder: DecoderParts) -> Iterator[nn.Module]:
    ends = (decoder.embed_tokens, decoder.norm, decoder.lm_head)
    yield from (module for module in ends if module is not None)
    yield from (layer.module for layer in decoder.layers)


def _check_outputs(core: nn.Module) -> None:
    config = getattr(core, "config", None)
    # What the config says of router logits is `routing`'s: it takes over the loss made of them.
    for field in SLICED_OUTPUTS[1:]:
        if getattr(config, field, False):
            raise _refuse(
                f"config.{field}", "layers see a slice of every sequence, and so would it"
            )
