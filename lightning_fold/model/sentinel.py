"""Let the sentinel see a folded model: hooks on its core, its layers and its experts.

Hooks do nothing but one comparison outside of a check. A layer that backward repeats is not seen
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_fold.model.fold import FoldedModel
from lightning_fold.moe.tokens import in_backward
from lightning_fold.params.sentinel import Sentinel, Watched
from lightning_fold.topology.comm import Comm


def install_sentinel(folded: FoldedModel, *, comm: Comm, every: int) -> Sentinel:
    """Make the sentinel of a model that is folded and sharded.

    Args:
        folded: What set-up has made of it.
        comm: Collectives.
        every: Steps from one check to the next.
    """
    watched = folded.watched
    sentinel = Sentinel(watched, comm=comm, every=every)
    parts = folded.parts
    layers = [f"{name}." for name, _ in parts.layers]
    for prefix, (_, layer) in zip(layers, parts.layers, strict=True):
        _note_parameters(layer, sentinel, [w for w in watched if w.name.startswith(prefix)])
    inside = [w for w in watched if w.name.startswith(f"{parts.core_name}.")]
    rest = [w for w in inside if not w.name.startswith(tuple(layers))]
    _note_parameters(parts.core, sentinel, rest)
    parts.core.register_forward_pre_hook(partial(_note_batch, sentinel, folded))
    for spec in parts.experts:
        spec.module.register_forward_pre_hook(partial(_note_tokens, sentinel, spec.name))
    return sentinel


def _note_parameters(unit: nn.Module, sentinel: Sentinel, used: Sequence[Watched]) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if _is_seen(sentinel):
            sentinel.saw_parameters(used)

    # First: FSDP2's own hook may free the gathered parameters.
    unit.register_forward_hook(hook, prepend=True)


def _note_batch(sentinel: Sentinel, folded: FoldedModel, module: nn.Module, args: Any) -> None:
    layout, passage = folded.tokens.attention, folded.passage
    if passage is not None and passage.stage != passage.first:
        return  # A rank with several pipeline stages calls its core once for each.
    if _is_seen(sentinel) and layout is not None:
        sentinel.saw_batch(layout.num_sequences * layout.length)


def _note_tokens(sentinel: Sentinel, name: str, module: nn.Module, args: Any) -> None:
    if _is_seen(sentinel) and args:
        sentinel.saw_layer(name, args[0].shape[0])


def _is_seen(sentinel: Sentinel) -> bool:
    return sentinel.watching and torch.is_grad_enabled() and not in_backward()
