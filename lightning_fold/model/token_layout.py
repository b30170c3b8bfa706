"""Tell the layers which tokens they see: hooks on the core and on its decoder layers.

The core's hook reads the batch off the call, as Hugging Face models name it (`input_ids` or
`inputs_embeds`, `attention_mask`, `position_ids`). Layers of one forward share the position
embeddings, so a layer that backward repeats finds the layout of its own forward by them. A core
that names its batch otherwise runs without a layout; what needs one refuses to run.
"""

# Shapes.  B sequences   S tokens of a sequence   s tokens of it on this rank

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_fold.model.inspect import ModelParts
from lightning_fold.moe.tokens import PeerTokens, RunningTokens, TokenLayout, in_backward
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.sequence import balanced_sizes, zigzag_chunks

Layouts = tuple[TokenLayout | None, TokenLayout | None]


class TokenWatch:
    """Keeps `tokens` at the layout of the layer that runs.

    Args:
        tokens: What layers read.
        comm: Tells the degrees and this rank's place.
        asks_peers: Whether layouts say what the other ranks hold, which static shapes need. Costs
            one host synchronisation a forward, at the core's entry, however many layers follow.
    """

    def __init__(self, tokens: RunningTokens, comm: Comm, *, asks_peers: bool = False) -> None:
        self.tokens = tokens
        self.comm = comm
        self.asks_peers = asks_peers
        self._latest: Layouts = (None, None)
        self._by_positions: Any = WeakTensorKeyDictionary()

    def install(self, parts: ModelParts) -> None:
        """Hook the core and its layers. Before anything else does: later hooks see the layout."""
        parts.core.register_forward_pre_hook(self._enter_core, with_kwargs=True)
        for _, layer in parts.layers:
            layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True)

    def layouts_of(self, core: nn.Module, args: Any, kwargs: Any) -> Layouts:
        """What attention and the rest of a layer would see in a call of `core`. Local."""
        layout = layout_of(named_arguments(core, args, kwargs), self.comm)
        return layout, self._tp_part(layout)

    @property
    def latest(self) -> Layouts:
        """What the core was last entered with."""
        return self._latest

    @contextmanager
    def seeing(self, layouts: Layouts) -> Iterator[None]:
        """Let layers that are called inside see the tokens of one forward of several."""
        before = self._latest, self.tokens.attention, self.tokens.moe
        self._latest = layouts
        self.tokens.attention, self.tokens.moe = layouts
        try:
            yield
        finally:
            self._latest, self.tokens.attention, self.tokens.moe = before

    def _enter_core(self, core: nn.Module, args: Any, kwargs: Any) -> None:
        layout, part = self.layouts_of(core, args, kwargs)
        if self.asks_peers and part is not None:
            part = replace(part, peers=ask_peers(part, self.comm))
        self._latest = (layout, part)
        self.tokens.attention, self.tokens.moe = self._latest

    def _tp_part(self, layout: TokenLayout | None) -> TokenLayout | None:
        tp, rank = self.comm.size("tp"), self.comm.rank("tp")
        if layout is None or tp == 1:
            return layout
        sizes = balanced_sizes(layout.places_s.shape[0], tp)
        return layout.part(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def _enter_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        positions = kwargs.get("position_embeddings")
        key = positions[0] if isinstance(positions, tuple) else positions
        layouts = self._latest
        if isinstance(key, Tensor) and in_backward():
            layouts = self._by_positions.get(key, self._latest)
        elif isinstance(key, Tensor):
            self._by_positions[key] = self._latest
        self.tokens.attention, self.tokens.moe = layouts


def ask_peers(layout: TokenLayout, comm: Comm) -> tuple[PeerTokens, ...]:
    """What every rank of the stage holds. Collective over the stage; one host synchronisation."""
    own = PeerTokens(layout.num_tokens, layout.num_sequences, layout.length)
    numbers = layout.places_s.new_tensor([own])
    told = comm.all_gather_rows(numbers, [1] * comm.size("stage"), axis="stage").reshape(-1)
    flat = comm.to_host(told, why="tokens of the peers, once a forward")
    width = len(own)
    return tuple(PeerTokens(*flat[i : i + width]) for i in range(0, len(flat), width))


def named_arguments(core: nn.Module, args: Any, kwargs: Any) -> Mapping[str, Any]:
    """Arguments of a call of `core` by the names of its forward; empty if they do not fit."""
    try:
        bound = inspect.signature(core.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return {}
    more: Mapping[str, Any] = bound.pop("kwargs", {})
    return {**bound, **more}


def layout_of(arguments: Mapping[str, Any], comm: Comm) -> TokenLayout | None:
    """The layout of a forward with these arguments on this cp rank; None if they do not tell it."""
    batch = arguments.get("input_ids")
    batch = arguments.get("inputs_embeds") if batch is None else batch
    if not isinstance(batch, Tensor) or batch.dim() < 2:
        return None
    sequences, length = batch.shape[:2]
    chunks = zigzag_chunks(length, cp=comm.size("cp"), rank=comm.rank("cp"))
    runs = [torch.arange(chunk.start, chunk.stop, device=batch.device) for chunk in chunks]
    mask = arguments.get("attention_mask")
    fits = isinstance(mask, Tensor) and mask.shape == (sequences, length)
    return TokenLayout(
        num_sequences=sequences,
        length=length,
        places_s=torch.cat(runs),
        valid_BS=mask.bool() if isinstance(mask, Tensor) and fits else None,
        documents_BS=documents_of(arguments.get("position_ids"), (sequences, length), mask),
    )


def documents_of(position_ids: Any, shape: tuple[int, int], mask: Any) -> Tensor | None:
    """Number of the document of every token of a packed batch, int64 [B, S].

    As in Hugging Face: without a mask, a position that does not follow the one before it begins a
    document. Returns None where no positions are given or a mask is.
    """
    if not isinstance(position_ids, Tensor) or mask is not None or position_ids.dim() != 2:
        return None
    steps = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1)
    return (steps != 1).long().cumsum(1).expand(shape)
