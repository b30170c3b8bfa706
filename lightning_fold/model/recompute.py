"""Activation checkpointing that never routes twice.

`selective` lives inside the experts (`moe.experts`): their first product is computed again from
rows that have arrived. `full` repeats a whole decoder layer in backward. Two computations of the
same logits may differ in the last bit, which flips near ties in top-k and so changes the shapes
of what is exchanged; so every choice among floating-point numbers is kept from the first run and
handed out in the second one, for any router, whatever else it does. The rest is computed again,
collectives included, in the same order on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from fold_kernels.weight_store import active_store, deferring
from lightning_fold.model.inspect import ModelParts
from lightning_fold.moe.layer import FoldedExperts
from lightning_fold.moe.tokens import RunningTokens

Mode = Literal["none", "selective", "full"]

_aten = torch.ops.aten
# What picks, orders or compares floating-point numbers. Masks made of integers need not be kept:
# they come out equal. `nonzero` of a kept mask does too.
CHOICES = frozenset(
    {
        _aten.topk.default,
        _aten.sort.default,
        _aten.sort.stable,
        _aten.argsort.default,
        _aten.argsort.stable,
        _aten.argmax.default,
        _aten.argmin.default,
        _aten.max.dim,
        _aten.min.dim,
        _aten.kthvalue.default,
        _aten.multinomial.default,
        _aten.bucketize.Tensor,
        _aten.searchsorted.Tensor,
        *(getattr(_aten, name).Tensor for name in ("gt", "ge", "lt", "le", "eq", "ne")),
        *(getattr(_aten, name).Scalar for name in ("gt", "ge", "lt", "le", "eq", "ne")),
    }
)
# A cache that a repeated layer would write a second time, by transformers' names.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def check_recompute(parts: ModelParts, mode: Mode) -> None:
    """Refuse what cannot be recomputed, or would be twice.

    Raises:
        ValueError: Experts that are not folded; a model that checkpoints by itself.
    """
    if mode == "none":
        return
    own = [
        name
        for name, module in parts.core.named_modules(prefix=parts.core_name)
        if getattr(module, "gradient_checkpointing", False) is True
    ]
    if own:
        raise ValueError(
            f"{own[0]} has gradient checkpointing of its own switched on, and "
            f"activation_checkpointing={mode!r} would repeat its layers a second time. Legal: "
            "activation_checkpointing='none', or the model's own off (gradient_checkpointing=False "
            "in its config, `gradient_checkpointing_disable()` in transformers).  Change "
            "`activation_checkpointing`."
        )
    refused = [spec for spec in parts.experts if spec.refusal is not None]
    if mode == "selective" and refused:
        raise ValueError(
            f"{refused[0].name} computes its own experts ({refused[0].refusal}), and "
            "activation_checkpointing='selective' lives inside folded ones. Legal: 'none', 'full'."
            "  Change `activation_checkpointing`."
        )


def apply_recompute(parts: ModelParts, mode: Mode, tokens: RunningTokens) -> None:
    """Make experts or layers recompute; `check_recompute` has passed.

    After everything that replaces forwards and before FSDP2, whose hooks must stay outside: they
    would gather and reduce a second time.
    """
    if mode == "selective":
        for spec in parts.experts:
            experts = spec.module.forward
            assert isinstance(experts, FoldedExperts), spec.name
            experts.recompute = True
    if mode == "full":
        for _, layer in parts.layers:
            layer.forward = _repeated(layer, tokens)


def _repeated(layer: nn.Module, tokens: RunningTokens) -> Callable[..., Any]:
    """A forward for `layer` that keeps its arguments and choices, and runs again in backward."""
    own = layer.__dict__.get("forward")

    @functools.wraps(layer.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Found at the call: FSDP2 changes the class later.
        inner = own or functools.partial(type(layer).forward, layer)
        if not torch.is_grad_enabled() or tokens.in_pieces:
            return inner(*args, **kwargs)
        layouts, store = (tokens.attention, tokens.moe), active_store()

        def run(*args: Any, **kwargs: Any) -> Any:
            # Hooks do not run again, and other forwards may have run since. With the same store,
            # operations keep the same tensors for backward.
            with _layouts(tokens, layouts), deferring(store):
                return inner(*args, **kwargs)

        kept: Kept = []
        contexts = functools.partial(_contexts, kept)
        kwargs = _without_caches(kwargs)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return forward


def _without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = {name: None for name in _CACHES if kwargs.get(name) is not None}
    if kwargs.get("use_cache"):
        changed["use_cache"] = False  # type: ignore[assignment]
    return {**kwargs, **changed}


@contextmanager
def _layouts(tokens: RunningTokens, layouts: tuple[Any, Any]) -> Iterator[None]:
    before = tokens.attention, tokens.moe
    tokens.attention, tokens.moe = layouts
    try:
        yield
    finally:
        tokens.attention, tokens.moe = before


# torch's `create_selective_checkpoint_contexts` hands out the kept tensor itself: a router that
# divides the values of its top-k in place, as transformers' do, would divide them twice.

Kept = list[tuple[Any, Any]]


def keeping(kept: Kept) -> TorchDispatchMode:
    """Note every choice among floating-point numbers that is made inside."""
    return _Keep(kept)


def replaying(kept: Kept) -> TorchDispatchMode:
    """Hand out what was noted, in its order."""
    return _Replay(kept)


def _contexts(kept: Kept) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    return keeping(kept), replaying(kept)


def _is_choice(operation: Any, args: Any) -> bool:
    if operation not in CHOICES:
        return False
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in args)


def _copies(out: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, out)


class _Keep(TorchDispatchMode):
    """Notes the result of every choice."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operation(*args, **(kwargs or {}))
        if _is_choice(operation, args):
            self.kept.append((operation, _copies(out)))
        return out


class _Replay(TorchDispatchMode):
    """Hands out the noted results in their order; from the start at each backward."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept
        self.rest: Iterator[tuple[Any, Any]] = iter(())

    def __enter__(self) -> Any:
        self.rest = iter(self.kept)
        return super().__enter__()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not _is_choice(operation, args):
            return operation(*args, **(kwargs or {}))
        noted, out = next(self.rest, (None, None))
        if noted is not operation:
            raise RuntimeError(
                f"a recomputed layer makes other choices than its forward: {operation} where "
                f"{noted} was. What the layer does depends on something that has changed since."
            )
        return _copies(out)
