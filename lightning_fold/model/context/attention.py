"""The attention function that models call under context parallelism, and how they come to it.

Hugging Face models look their attention and their mask up by a name in the config; the built-in
decoder has both as attributes. Either way the function finds what it needs on the attention
module, and the layout of the forward that runs at the moment of the call, so that a layer that
backward repeats attends as it did. Nothing here changes a model whose cp is 1.
"""

# Shapes.  B sequences   s tokens on this rank   H query heads   C head width

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fold.model.context.dense import gathered_attention, ulysses_attention
from lightning_fold.model.context.ring import ring_attention
from lightning_fold.model.context.rule import AttentionRule
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.topology.comm import Comm

NAME = "lightning_fold_context"
"""Of the attention function and of the mask function in Hugging Face's registries."""

METHODS = {
    "all_gather": gathered_attention,
    "ulysses": ulysses_attention,
    "ring": ring_attention,
}
# What else attention functions of Hugging Face are given; none of the methods honours them.
_NOT_HONOURED = ("s_aux", "softcap", "position_bias", "indices", "block_indices", "cache")


@dataclass(frozen=True)
class ContextAttention:
    """What an attention module carries.

    Attributes:
        name: Of the module.
        method: Key of `METHODS`.
        comm: Collectives.
        tokens: Hold the layout of the forward that runs.
        sees_itself: See `AttentionRule`.
    """

    name: str
    method: str
    comm: Comm
    tokens: RunningTokens
    sees_itself: bool

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        dropout: float,
        window: int | None,
    ) -> Tensor:
        """[B, H, s, C] of this rank's places. Collective over cp."""
        layout = self.tokens.attention
        assert layout is not None, "the core's hook refuses calls that do not tell their batch"
        rule = AttentionRule(layout, scaling, dropout, window, self.sees_itself)
        # A rank without a place holds a made-up one inside the module, see `hold_a_place`.
        own = layout.places_s.shape[0]
        query, key, value = (x[:, :, :own] for x in (query, key, value))
        out = METHODS[self.method](query, key, value, comm=self.comm, rule=rule)
        return out if own else nn.functional.pad(out, (0, 0, 0, 1))


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function as Hugging Face models call it; returns [B, s, H, C]. Collective."""
    context: ContextAttention | None = module.__dict__.get("context_attention")
    if context is None:
        raise ValueError(
            f"{type(module).__name__} is no `self_attn` of a decoder layer, and context "
            "parallelism serves no other attention. Change `context_parallel_size` to 1."
        )
    for name in _NOT_HONOURED:
        if more.get(name) is not None:
            raise _cannot_honour(context.name, f"it passes `{name}` to its attention function")
    out = context.attend(
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        window=_window(context.name, attention_mask, sliding_window),
    )
    return out.transpose(1, 2).contiguous(), None


def context_mask(
    *, local_size: int | None = None, allow_is_causal_skip: bool = True, **more: Any
) -> Tensor:
    """A mask function as Hugging Face models call it: the window alone, [1, 1, 1, 1] on the CPU.

    What may be seen follows from the layout. Causal or sliding, only the mask tells: some models
    do not tell their attention function. On the CPU, so that reading it waits for no device.
    """
    if more.get("use_vmap") or not allow_is_causal_skip:
        raise _cannot_honour("the model", "it masks by more than order, window and padding")
    return torch.tensor([[[[local_size or 0]]]], device="cpu")


def context_decoder_mask(attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
    """The built-in decoder's mask: none, the layout tells."""


def register() -> None:
    """Make both functions known to transformers under `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, context_attention)
    AttentionMaskInterface.register(NAME, context_mask)


def hold_a_place(attention: nn.Module) -> None:
    """Let an attention module run on a rank that holds no place: it sees a made-up one.

    Models `view` their heads with a size left open, which torch cannot infer from no elements.
    The made-up place lives between this module's entry and exit: no router sees it, its weights
    get zero gradients, and no rank leaves a collective out.
    """
    attention.register_forward_pre_hook(_enter_without_place, with_kwargs=True)
    attention.register_forward_hook(_leave_without_place, with_kwargs=True)


def _hidden(args: Any, kwargs: Any) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _enter_without_place(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    hidden = _hidden(args, kwargs)
    if hidden.shape[1]:
        return None
    hidden = nn.functional.pad(hidden, (0, 0, 0, 1))
    angles = kwargs.get("position_embeddings")
    if isinstance(angles, tuple):
        angles = tuple(nn.functional.pad(angle, (0, 0, 0, 1)) for angle in angles)
        kwargs = kwargs | {"position_embeddings": angles}
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def _leave_without_place(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    context: ContextAttention = module.__dict__["context_attention"]
    layout = context.tokens.attention
    if layout is None or layout.places_s.shape[0]:
        return None
    first, *rest = out if isinstance(out, tuple) else (out,)
    return (first[:, :0], *rest) if isinstance(out, tuple) else first[:, :0]


def _window(name: str, mask: Tensor | None, told: int | None) -> int | None:
    if mask is None:
        return told
    if mask.shape != (1, 1, 1, 1) or mask.device.type != "cpu":
        raise _cannot_honour(name, f"it has a mask {list(mask.shape)} of its own")
    return int(mask) or None


def _cannot_honour(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name} cannot run under context_parallel_size > 1: {reason}. "
        "Change `context_parallel_size` to 1."
    )
