"""Run a block's shared experts while its routed ones' tokens are on the wire.

The block stays the user's code: it calls its experts and, somewhere, its shared experts. Where the
latter come second and get the very tensor that was seen before (the block's input or the experts'),
they can be computed early and the block's call handed the result. The first forward of a block
shows which tensor that is; a block that calls them first, or on something else, is left alone.
Results never change: the early result is used for the identical tensor only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_fold.moe.tokens import RunningTokens, in_backward

Source = Literal["unknown", "block", "experts", "none"]


class _Call:
    """One running forward of the block.

    Attributes:
        block: Input of the block.
        source: What its shared experts are run on early.
        experts: Input of the experts, once they have been called.
        early: Input and output of the early run.
    """

    def __init__(self, block: Tensor | None, source: Source) -> None:
        self.block, self.source = block, source
        self.experts: Tensor | None = None
        self.early: tuple[Tensor, Tensor] | None = None


class SharedBeside:
    """The shared experts of one block, computed beside the dispatch where the block allows it.

    Args:
        block: Calls both.
        shared: The shared experts; their forward is wrapped.
        tokens: Tells forwards apart: one that backward repeats does as it did the first time,
            because activation checkpointing expects the same tensors in the same order.
    """

    def __init__(self, block: nn.Module, shared: nn.Module, tokens: RunningTokens) -> None:
        self.tokens = tokens
        self.source: Source = "unknown"
        self.early_runs_used = 0
        self._sources: Any = WeakTensorKeyDictionary()
        self._call: _Call | None = None
        self._own = shared.__dict__.get("forward")
        self._shared = shared
        shared.forward = self._forward
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(self._leave, always_call=True)

    def run(self, hidden_TD: Tensor) -> None:
        """The experts have been called with `hidden_TD`, and their rows are on the wire."""
        call = self._call
        if call is None:
            return
        call.experts = hidden_TD
        x = {"block": call.block, "experts": hidden_TD}.get(call.source)
        if x is not None:
            call.early = x, self._compute(x)

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        self._call = _Call(x, self._source_of_forward())

    def _source_of_forward(self) -> Source:
        layout = self.tokens.moe
        if layout is None:
            # Nothing tells a repeated forward from another.
            return "none"
        if not in_backward():
            self._sources[layout.places_s] = self.source
        source: Source = self._sources.get(layout.places_s, "none")
        return source

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if call is None or len(args) != 1 or kwargs:
            return self._compute(*args, **kwargs)
        if call.early is not None and call.early[0] is args[0]:
            self.early_runs_used += 1
            out = call.early[1]
            call.early = None
            return out
        if not in_backward():
            self._learn(call, args[0])
        return self._compute(*args)

    def _learn(self, call: _Call, x: Any) -> None:
        """Note what the shared experts get; once it was not what was expected, never again."""
        seen: dict[Source, Tensor | None] = {"block": call.block, "experts": call.experts}
        known = [name for name, tensor in seen.items() if tensor is x]
        is_first = self.source == "unknown" and call.experts is not None
        self.source = known[0] if is_first and known else "none"

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        # Found at the call: whatever changes the class later is seen.
        forward: Callable[..., Any] = self._own or type(self._shared).forward.__get__(self._shared)
        return forward(*args, **kwargs)

    def _leave(self, block: nn.Module, args: Any, out: Any) -> None:
        self._call = None
