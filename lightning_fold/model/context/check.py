"""What context parallelism accepts of a model, and why it refuses another. Changes nothing.

Attention is the only place where tokens of a sequence meet, and it goes through a function that
can be replaced: then a rank may hold any part of the sequence. Whatever else mixes tokens, or
masks by more than order, window, padding and documents, is refused with its name.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from lightning_fold.model.inspect import ModelParts
from lightning_fold.model.structure import MLP, acts_on_tokens, is_plain
from lightning_fold.topology import doctor
from lightning_fold.topology.folding import Folding

LAYER_TYPES = ("full_attention", "sliding_attention", "attention")


def check_context(parts: ModelParts, folding: Folding, method: str) -> None:
    """Make sure that cp ranks can share the sequences of this model.

    Args:
        parts: Of the model.
        folding: The mapping.
        method: See `FoldedConfig.context_parallel_method`.

    Raises:
        ValueError: Something in the model is not known to work under context parallelism.
    """
    for config in _configs(parts.core):
        _check_config(f"{parts.core_name}.config", config)
    for name, layer in parts.layers:
        _check_layer(name, layer, parts)
        _check_attention(f"{name}.self_attn", layer._modules["self_attn"], method)
        _check_heads(f"{name}.self_attn", layer._modules["self_attn"], folding, method)
    _check_outside(parts)
    _check_interface(parts)


def _refuse(name: str, reason: str) -> NoReturn:
    raise ValueError(
        f"{name} cannot run under context_parallel_size > 1: {reason}. "
        "Change `context_parallel_size` to 1."
    )


def _configs(core: nn.Module) -> list[Any]:
    found = {id(c): c for m in core.modules() if (c := getattr(m, "config", None)) is not None}
    return list(found.values())


def _check_config(name: str, config: Any) -> None:
    if getattr(config, "attention_chunk_size", None):
        _refuse(f"{name}.attention_chunk_size", "attention in chunks is masked by the model alone")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            _refuse(f"{name}.layer_types", f"{kind!r} is not causal attention over all places")
    if getattr(config, "is_causal", True) is False:
        _refuse(f"{name}.is_causal", "attention to later tokens is not served")
    for field in ("output_hidden_states", "output_attentions"):
        if getattr(config, field, False):
            _refuse(f"{name}.{field}", "layers see a part of every sequence, and so would it")


def _check_layer(name: str, layer: nn.Module, parts: ModelParts) -> None:
    if "self_attn" not in layer._modules:
        _refuse(name, "it has no `self_attn`; other mixers over the sequence need all of it")
    for child_name, child in layer.named_children():
        if child_name == "self_attn" or not list(child.parameters()):
            continue
        dense = all(is_plain(child._modules.get(key), nn.Linear) for key in MLP)
        if not dense and not acts_on_tokens(f"{name}.{child_name}", child, parts):
            _refuse(
                f"{name}.{child_name}",
                f"{type(child).__name__} is neither attention nor MLP, MoE block or norm, and may "
                "mix the tokens of a sequence",
            )


def _check_attention(name: str, attention: Any, method: str) -> None:
    for child, _ in attention.named_modules():
        if "indexer" in child:
            _refuse(f"{name}.{child}", "it chooses keys by itself, from all tokens of the sequence")
    for param in attention._parameters:
        _refuse(f"{name}.{param}", "attention sinks and other parameters of scores are not known")
    for child, module in attention.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase):
            _refuse(f"{name}.{child}", f"{type(module).__name__} mixes neighbouring tokens")
    dropout = getattr(attention, "attention_dropout", 0.0)
    if method == "ring" and isinstance(dropout, float) and dropout > 0:
        raise ValueError(
            f"{name}: attention_dropout={dropout} cannot be served by "
            "context_parallel_method='ring', whose backward would need the masks again. Legal: "
            "'all_gather', 'ulysses', or attention_dropout=0.  Change `context_parallel_method`."
        )


def _check_heads(name: str, attention: Any, folding: Folding, method: str) -> None:
    if method != "ulysses":
        return
    heads = getattr(attention, "num_heads", None)
    head_dim = getattr(attention, "head_dim", None)
    if heads is None and isinstance(head_dim, int) and hasattr(attention, "o_proj"):
        heads = attention.o_proj.in_features // head_dim
    if not isinstance(heads, int):
        _refuse(name, "it tells neither `num_heads` nor `head_dim`, which 'ulysses' needs")
    doctor.check_context_heads(name, heads=heads, folding=folding)


def _check_outside(parts: ModelParts) -> None:
    inside = {id(module) for _, layer in parts.layers for module in layer.modules()}
    for name, module in parts.core.named_modules(prefix=parts.core_name):
        params = list(module._parameters.values())
        if id(module) in inside or not any(p is not None for p in params):
            continue
        vectors = all(p is None or p.dim() == 1 for p in params)
        if not (vectors or isinstance(module, nn.Embedding | nn.Linear)):
            _refuse(
                name,
                f"{type(module).__name__} lies outside the decoder layers and may mix the tokens "
                "of a sequence",
            )


def _check_interface(parts: ModelParts) -> None:
    """Attention must go through a function that can be replaced."""
    served = {
        id(module)
        for owner in parts.core.modules()
        if getattr(type(owner), "_supports_attention_backend", False)
        for module in owner.modules()
    }
    for name, layer in parts.layers:
        attention = layer._modules["self_attn"]
        if id(attention) not in served and not callable(getattr(attention, "attend", None)):
            _refuse(
                f"{name}.self_attn",
                f"{type(attention).__name__} neither calls Hugging Face's attention interface nor "
                "has an `attend` to replace",
            )
