"""Random numbers where ranks that share the default generator own different tokens.

Outside the layers tp peers hold replicas of a token and must draw the same mask; so do cp peers
outside of the core. Inside, each owns other tokens and draws from a generator seeded by the
default one and its tp or cp rank. The seed comes out of the default generator, so checkpointing,
which restores that, restores the masks of a recomputed layer too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# An odd multiplier keeps the seeds of different ranks apart modulo 2**63.
_STRIDE = 0x9E3779B97F4A7C15


def per_rank_rng(layer: nn.Module, rank: int) -> Callable[..., Any]:
    """A forward for `layer`, or the core, in which ranks draw different random numbers."""
    own = layer.__dict__.get("forward")
    signature = inspect.signature(layer.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        seed = int(torch.randint(2**62, ()))
        # Found at the call: FSDP2 changes the class later, and transformers' checkpointing acts
        # only in the forward of the class that the layer has then.
        inner = own or functools.partial(type(layer).forward, layer)
        with torch.random.fork_rng(devices=_devices()):
            torch.manual_seed((seed + rank * _STRIDE) % 2**63)
            return inner(*args, **kwargs)

    # Hooks bind the arguments of a call by the names of the forward that it is for.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def has_randomness(module: nn.Module) -> bool:
    """Whether any dropout or jitter of the model is on."""
    return any(
        isinstance(value, float) and value > 0 and _is_rate(name)
        for owner in [*module.modules(), getattr(module, "config", None)]
        for name, value in _attributes(owner).items()
    )


def _is_rate(name: str) -> bool:
    return name == "p" or "dropout" in name or "jitter" in name


def _attributes(owner: Any) -> dict[str, Any]:
    return getattr(owner, "__dict__", {})


def _devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []
