"""Make a model small enough to be verified, and keep what makes it different from others.

Owns which fields of a config get which size. Kept are the kinds of layers and their order, shared
experts, biases, tied embeddings, grouped heads and the number of experts per token as far as eight
experts go. Pure for the fields; rebuilding is done by the model's own class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from torch import nn

Changes = dict[str, tuple[Any, Any]]

HEADS, EXPERTS, MOST_LAYERS = 8, 8, 4
_AT_MOST = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
_RANDOM = ("dropout", "jitter")
# Far from 0.02: attention and router must be far from uniform, or their errors would not show.
_STD = 0.15


def shrunk_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that verification changes, with their new values. Pure.

    Args:
        fields: All of the config, under Hugging Face's names.
    """
    wanted: dict[str, Any] = {}
    for name, most in _AT_MOST.items():
        if _is_int(fields.get(name)):
            wanted[name] = min(fields[name], most)
    wanted |= _heads(fields) | _experts(fields) | _layers(fields)
    for name, value in fields.items():
        if isinstance(value, float) and any(word in name for word in _RANDOM):
            wanted[name] = 0.0
    if isinstance(fields.get("initializer_range"), float):
        wanted["initializer_range"] = _STD
    pad = fields.get("pad_token_id")
    if _is_int(pad) and pad >= wanted.get("vocab_size", math.inf):
        wanted["pad_token_id"] = None
    return {name: value for name, value in wanted.items() if value != fields[name]}


def shrink_cores(module: nn.Module) -> Changes:
    """Rebuild every model under `module` whose config is known, small; what was changed.

    A parent's attribute is replaced, so `module` itself must not be such a model.
    """
    changes: Changes = {}
    for name, child in module.named_children():
        small = shrunk_model(child)
        if small is not None:
            setattr(module, name, small[0])
            changes |= small[1]
    return changes


def shrunk_model(model: nn.Module) -> tuple[nn.Module, Changes] | None:
    """A small model of the same class, from its config; None where the class has none."""
    config: Any = getattr(model, "config", None)
    build: Any = type(model)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        before = dataclasses.asdict(config)
        after = shrunk_fields(before)
        small = build(dataclasses.replace(config, **after))
    elif is_hugging_face(model):
        before = config.to_dict()
        after = shrunk_fields(before)
        small = build(type(config).from_dict({**before, **after}))
    else:
        return None
    return small, {name: (before[name], value) for name, value in after.items()}


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model's class comes from transformers, told without importing it."""
    bases = (base.__module__.partition(".")[0] for base in type(model).__mro__)
    return "transformers" in bases and hasattr(model, "config")


def silence(module: nn.Module) -> Changes:
    """Turn off dropout and jitter: two mappings cannot draw the same numbers. In place."""
    changes: Changes = {}
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            random = key == "p" if isinstance(child, nn.Dropout) else _is_random(key)
            if random and isinstance(value, float) and value > 0:
                setattr(child, key, 0.0)
                changes[f"{name}.{key}"] = (value, 0.0)
    return changes


def describe(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """One line: every number that was changed."""
    parts = [f"{name} {_short(old)} -> {_short(new)}" for name, (old, new) in changes.items()]
    return f"shrunk: {', '.join(parts)}" if parts else ""


def _heads(fields: Mapping[str, Any]) -> dict[str, Any]:
    heads, kv = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if not _is_int(heads):
        return {}
    fits = [n for n in (8, 4, 2, 1) if n <= heads]
    small = heads if heads <= HEADS and fields.get("hidden_size", 0) <= 32 else fits[0]
    if not _is_int(kv):
        return {"num_attention_heads": small}
    if kv in (1, heads):
        return {"num_attention_heads": small, "num_key_value_heads": 1 if kv == 1 else small}
    # Two at least: one key/value head alone would be multi-query attention.
    grouped = max(2, small * kv // heads)
    kv_small = max((n for n in range(1, grouped + 1) if small % n == 0), default=1)
    return {"num_attention_heads": small, "num_key_value_heads": kv_small}


def _experts(fields: Mapping[str, Any]) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    for name in _EXPERTS:
        if _is_int(fields.get(name)):
            wanted[name] = min(fields[name], EXPERTS)
    experts = min(wanted.values(), default=EXPERTS)
    for name in _PER_TOKEN:
        value = fields.get(name)
        if _is_int(value):
            # Half of the experts at most, or the choice would not be one.
            wanted[name] = value if value < experts else max(1, experts // 2)
    groups, chosen = fields.get("n_group"), fields.get("topk_group")
    if _is_int(groups) and _is_int(chosen) and groups > 1:
        wanted["n_group"] = min(groups, experts // 2)
        wanted["topk_group"] = max(1, min(chosen, wanted["n_group"] // 2))
        room = wanted["topk_group"] * experts // wanted["n_group"]
        wanted |= {n: min(v, room) for n, v in wanted.items() if n in _PER_TOKEN}
    return wanted


def _layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The shortest start of the model that has a layer of every kind, two to four of them."""
    depth = fields.get("num_hidden_layers")
    if not _is_int(depth):
        return {}
    lists = {n: v for n, v in fields.items() if isinstance(v, list | tuple) and len(v) == depth}
    lists.pop("mlp_only_layers", None)
    kinds = list(_kinds(fields, depth, list(lists.values())))
    legal = [n for n in range(2, MOST_LAYERS) if set(kinds[:n]) == set(kinds)]
    keep = min(depth, legal[0] if legal else MOST_LAYERS)
    wanted: dict[str, Any] = {"num_hidden_layers": keep}
    wanted |= {name: value[:keep] for name, value in lists.items()}
    dense = fields.get("mlp_only_layers")
    if dense:
        kept = [layer for layer in dense if layer < keep] or [keep - 1]
        wanted["mlp_only_layers"] = type(dense)(kept)
    return wanted


def _kinds(fields: Mapping[str, Any], depth: int, lists: Sequence[Any]) -> Iterator[Any]:
    dense_first = min(fields.get("first_k_dense_replace") or 0, 1)
    step = fields.get("decoder_sparse_step") or 1
    dense_only = fields.get("mlp_only_layers") or ()
    for layer in range(depth):
        dense = layer in dense_only or layer < dense_first or (layer + 1) % step != 0
        yield (dense, *(str(values[layer]) for values in lists))


def _is_int(value: Any) -> TypeGuard[int]:
    return type(value) is int


def _is_random(key: str) -> bool:
    return any(word in key for word in _RANDOM)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:20]}...]"
