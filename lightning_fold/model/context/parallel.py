"""The borders of the core under context parallelism: what goes in is split, what comes out joined.

Every cp rank reads the same whole batch and enters the core with its places of it. Labels are
shifted before they are split, so that no target is lost at a border, and the loss is divided by
the number of targets of the whole sequences: summed over cp it is the exact token mean, on every
rank. Logits without a loss are gathered, so that a loss of the user's own is exact too. Logits
beside a loss stay this rank's: all of them would cost B * S * V.
"""

# Shapes.  B sequences   S tokens of a sequence   s tokens of it on this rank   V vocabulary

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fold.model.context.attention import (
    NAME,
    ContextAttention,
    context_attention,
    context_decoder_mask,
    hold_a_place,
    register,
)
from lightning_fold.model.context.dense import rows_of_places
from lightning_fold.model.inspect import ModelParts
from lightning_fold.model.passage import StageOutput
from lightning_fold.model.structure import SLICED_OUTPUTS
from lightning_fold.model.token_layout import named_arguments
from lightning_fold.model.token_rng import has_randomness, per_rank_rng
from lightning_fold.moe.tokens import RunningTokens, TokenLayout
from lightning_fold.topology.comm import Comm, gather_replicated, sum_over
from lightning_fold.topology.sequence import zigzag_sizes

AXIS = "cp"
IGNORED = -100
# Arguments along the sequence, and the dimension of it.
ALONG = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")


class ContextParallel:
    """Applies context parallelism to one model; every rank of cp calls it alike.

    Args:
        comm: Collectives.
        tokens: Hold the layout of the forward that runs.
        method: See `FoldedConfig.context_parallel_method`.
    """

    def __init__(self, comm: Comm, tokens: RunningTokens, method: str) -> None:
        self.comm = comm
        self.tokens = tokens
        self.method = method
        self.is_hugging_face = False

    def apply(self, parts: ModelParts) -> None:
        """Replace attention and hook the core; `check_context` has passed.

        After tensor parallelism and after `TokenWatch`: hooks run in order of their installation.
        """
        for name, layer in parts.layers:
            attention: Any = layer._modules["self_attn"]
            built_in = callable(getattr(attention, "attend", None))
            attention.context_attention = ContextAttention(
                f"{name}.self_attn", self.method, self.comm, self.tokens, sees_itself=built_in
            )
            if built_in:
                attention.attend = context_attention
            hold_a_place(attention)
        self._switch_masks(parts.core)
        if has_randomness(parts.core):
            parts.core.forward = per_rank_rng(parts.core, self.comm.rank(AXIS))
        parts.core.register_forward_pre_hook(self._enter, with_kwargs=True)
        parts.core.register_forward_hook(self._leave, with_kwargs=True)

    def _switch_masks(self, core: nn.Module) -> None:
        for module in core.modules():
            owner: Any = module
            if callable(getattr(owner, "mask", None)) and hasattr(owner, "layers"):
                owner.mask = context_decoder_mask
            set_attention = getattr(owner, "set_attn_implementation", None)
            if set_attention is not None:
                register()
                set_attention(NAME)
                self.is_hugging_face = True

    # Into the core.

    def _enter(self, core: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        arguments = dict(named_arguments(core, args, kwargs))
        layout = self.tokens.attention
        if layout is None:
            raise _refuse(
                f"{type(core).__name__} is called without `input_ids` or `inputs_embeds` [B, S, "
                "...], and its sequences are to be split"
            )
        _check_arguments(arguments, layout)
        _check_cache(core, arguments)
        if arguments.get("labels") is not None:
            _check_loss(core)
        return (), self._local(core, arguments, layout)

    def _local(
        self, core: nn.Module, arguments: dict[str, Any], layout: TokenLayout
    ) -> dict[str, Any]:
        own: dict[str, Any] = arguments | self._targets(arguments)
        own["position_ids"] = arguments.get("position_ids")
        if own["position_ids"] is None:
            own["position_ids"] = torch.arange(layout.length, device=layout.places_s.device)[None]
        if self.is_hugging_face and own.get("attention_mask") is None:
            # Without one, transformers takes a zigzag of positions for a packed sequence.
            own["attention_mask"] = own["position_ids"].new_ones(
                layout.num_sequences, layout.length
            )
        if "use_cache" in inspect.signature(core.forward).parameters:
            own["use_cache"] = False
        split = {k: v.index_select(1, layout.places_s) for k, v in own.items() if _is_along(k, v)}
        _check_taken(core, split)
        return own | split

    def _targets(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The shifted labels of whole sequences, and how many targets they are."""
        labels, shifted = (arguments.get(name) for name in ("labels", "shift_labels"))
        if labels is None:
            return {}
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        items = arguments.get("num_items_in_batch")
        items = (shifted != IGNORED).sum() if items is None else items
        # Models compute a loss where there are labels, and take the shifted ones for it.
        return {"labels": shifted, "shift_labels": shifted, "num_items_in_batch": items}

    # Out of the core.

    def _leave(self, core: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        # What a pipeline stage hands on stays this rank's part.
        return None if isinstance(out, StageOutput) else self._joined(core, kwargs, out)

    def _joined(self, core: nn.Module, kwargs: Any, out: Any) -> Any:
        layout = self.tokens.attention
        assert layout is not None, "set at the core's entry"
        has_loss = kwargs.get("labels") is not None
        if isinstance(out, Tensor):
            return self._joined_tensor(out, layout, has_loss=has_loss)
        loss = _field(out, "loss")
        if has_loss and isinstance(loss, Tensor):
            return _replaced(out, "loss", sum_over(loss, self.comm, AXIS))
        if has_loss:
            raise _refuse(
                f"{type(core).__name__} was given labels and returns a {type(out).__name__} "
                "without `loss`; return a ModelOutput or a named tuple (return_dict=True)"
            )
        fields = [f for f in ("logits", "last_hidden_state") if isinstance(_field(out, f), Tensor)]
        own = (layout.num_sequences, layout.places_s.shape[0])
        for name in fields:
            shape = _field(out, name).shape
            if len(shape) != 3 or shape[:2] != own:
                raise _refuse(
                    f"`{name}` of {type(core).__name__} has shape {list(shape)}, not one row for "
                    f"each of this rank's tokens {list(own)}; a model that pools a sequence, such "
                    "as a sequence classifier, needs all of it on one rank"
                )
        if not fields:
            raise _refuse(
                f"{type(core).__name__} returns a {type(out).__name__} without `logits` or "
                "`last_hidden_state`, and nothing tells what of it lies along the sequence"
            )
        for name in fields:
            out = _replaced(out, name, self._gathered(_field(out, name), layout))
        return out

    def _joined_tensor(self, out: Tensor, layout: TokenLayout, *, has_loss: bool) -> Tensor:
        if has_loss and out.dim() == 0:
            return sum_over(out, self.comm, AXIS)
        if out.dim() > 1 and out.shape[:2] == (layout.num_sequences, layout.places_s.shape[0]):
            return self._gathered(out, layout)
        raise _refuse(
            f"the core returns a tensor {list(out.shape)}, which is neither a loss of labels nor "
            "along the sequence"
        )

    def _gathered(self, x: Tensor, layout: TokenLayout) -> Tensor:
        cp = self.comm.size(AXIS)
        sizes = zigzag_sizes(layout.length, cp=cp)
        rows = gather_replicated(x.movedim(1, 0).contiguous(), self.comm, sizes, AXIS)
        return rows.index_select(0, rows_of_places(layout.length, cp, x.device)).movedim(0, 1)


def _is_along(name: str, value: Any) -> bool:
    return name in ALONG and isinstance(value, Tensor)


def _check_arguments(arguments: Mapping[str, Any], layout: TokenLayout) -> None:
    """Refuse what has no meaning for a part of a sequence."""
    whole = (layout.num_sequences, layout.length)
    for name in ("past_key_values", "use_cache", "logits_to_keep", *SLICED_OUTPUTS):
        value = arguments.get(name)
        if isinstance(value, Tensor) or value or (name == "past_key_values" and value is not None):
            raise _refuse(f"`{name}` is given, and every rank sees a part of each sequence only")
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        if name in ALONG:
            fits = value.shape[:2] == whole or (name == "position_ids" and _is_shared(value, whole))
            if not fits or (value.dim() != 2 and name != "inputs_embeds"):
                raise _refuse(
                    f"`{name}` has shape {list(value.shape)}, and sequences are {list(whole)}"
                )
        elif layout.length in value.shape:
            raise _refuse(
                f"`{name}` {list(value.shape)} may lie along the sequence of {layout.length} "
                "tokens, and nothing tells how to split it"
            )


def _check_cache(core: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse positions whose meaning hangs on a cache.

    transformers looks for documents of packed rows in positions without a mask, but with a cache,
    which its configs ask for by default, it does not.
    """
    told = [arguments.get(name) is not None for name in ("position_ids", "attention_mask")]
    caches = getattr(getattr(core, "config", None), "use_cache", None)
    if told != [True, False] or arguments.get("use_cache") is False or not caches:
        return
    if core.training and any(getattr(m, "gradient_checkpointing", False) for m in core.modules()):
        return
    raise _refuse(
        "`position_ids` without `attention_mask` tell the documents of packed rows, and with "
        "config.use_cache=True transformers does not look for them. Pass use_cache=False, or a mask"
    )


def _check_loss(core: nn.Module) -> None:
    """Refuse labels of a model whose loss is not known to be the mean over next tokens."""
    loss = getattr(core, "loss_function", None)
    named = inspect.signature(core.forward).parameters
    if loss is None and {"shift_labels", "num_items_in_batch"} <= set(named):
        return
    name = getattr(loss, "__name__", type(loss).__name__)
    if name != "ForCausalLMLoss":
        told = f"its loss_function is {name}" if loss is not None else "its forward has neither"
        raise _refuse(
            f"{type(core).__name__} is called with `labels`, and its loss over a part of each "
            f"sequence is exact for transformers' ForCausalLMLoss only, or where the forward "
            f"itself takes `shift_labels` and `num_items_in_batch` ({told}). Call it without "
            "`labels` and compute the loss from its logits, which are then whole"
        )


def _is_shared(positions: Tensor, whole: tuple[int, int]) -> bool:
    return positions.shape == (1, whole[1])


def _check_taken(core: nn.Module, split: Mapping[str, Any]) -> None:
    for name in split:
        if not _takes(core, name):
            raise _refuse(
                f"{type(core).__name__}.forward takes no `{name}`, which tells it what it has of "
                "each sequence; add the argument and pass it on"
            )


def _takes(core: nn.Module, name: str) -> bool:
    parameters = inspect.signature(core.forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _field(out: Any, name: str) -> Any:
    return out.get(name) if isinstance(out, dict) else getattr(out, name, None)


def _replaced(out: Any, name: str, value: Tensor) -> Any:
    if hasattr(out, "_replace"):
        return out._replace(**{name: value})
    if isinstance(out, dict):
        out[name] = value
        return out
    setattr(out, name, value)
    return out


def _refuse(reason: str) -> ValueError:
    return ValueError(
        f"Under context_parallel_size > 1: {reason}. Change the call, or "
        "`context_parallel_size` to 1."
    )
