"""Causal language models of transformers, built from a config alone.

Owns the check that every option is a field of the model's config: transformers keeps unknown
ones silently. Downloads nothing, and imports transformers only when a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_fold.topology.doctor import nearest


def build_causal_lm(model_type: str, options: Mapping[str, Any]) -> nn.Module:
    """Return a model with fresh weights, which depend on the torch seed alone.

    Args:
        model_type: Family as transformers names it, `qwen3_moe` or `mixtral` for example.
        options: Fields of the family's config; the others keep their defaults.

    Raises:
        ValueError: Unknown family or field.
        ImportError: transformers is not installed.
    """
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError(
            f"model_type={model_type!r} needs transformers; install lightning-fold[hf]."
        ) from error
    families = list(CONFIG_MAPPING.keys())
    if model_type not in families:
        likely = nearest(model_type, families)
        hint = f"; the nearest is {likely!r}" if likely else ""
        raise ValueError(
            f"model_type={model_type!r} is no family of transformers{hint}. Change `model_type`."
        )
    _check_fields(model_type, options, known=AutoConfig.for_model(model_type))
    config = AutoConfig.for_model(model_type, **options)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _check_fields(model_type: str, options: Mapping[str, Any], *, known: Any) -> None:
    for key in options:
        if not hasattr(known, key):
            likely = nearest(key, known.to_dict())
            hint = f"Change it to `{likely}`." if likely else "Remove it."
            raise ValueError(f"`{key}` is no field of the {model_type} config. {hint}")
