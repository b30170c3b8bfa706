"""Where the weights of a folded model come from: its construction, its initialisers, or a file.

Owns the order: everything is checked before a value is made or read, and a tensor that a file
gives is not drawn first. Not here: how a value is drawn (`materialise`) or read (`checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lightning_fold.checkpoint.initial import find_initial, load_initial
from lightning_fold.checkpoint.stages import Stages
from lightning_fold.model.fold import FoldedModel
from lightning_fold.model.materialise import Draw, Skeleton, materialise


@dataclass(frozen=True)
class WeightSource:
    """Where from, and on which device they end.

    Attributes:
        on_meta: Whether the model has no values and gets them once it is sharded.
        path: File that gives the values; None keeps or draws them.
        seed: Seed of what is drawn, equal on all ranks.
        device: This rank's.
    """

    on_meta: bool
    path: str | None
    seed: int
    device: torch.device


def starts_on_meta(module: nn.Module, *, meta_init: bool, path: str | None) -> bool:
    """Whether `module` gets its values once it is sharded.

    That is so with `meta_init`, and for a model on meta whose values a file gives.

    Raises:
        ValueError: Parameters have no values, and nothing was asked to give them any.
    """
    if meta_init:
        return True
    unset = [name for name, param in module.named_parameters() if param.is_meta]
    if unset and path is None:
        raise ValueError(
            f"{len(unset)} parameters are on meta ({', '.join(unset[:3])}) and nothing gives them "
            "values. Set `meta_init=True` to initialise them or `init_from` to read them, or "
            "build the model with its weights."
        )
    return bool(unset)


def fold_with_weights(
    module: nn.Module,
    fold: Callable[[], FoldedModel],
    *,
    source: WeightSource,
    stages: Callable[[], Stages | None] = lambda: None,
) -> FoldedModel:
    """Fold `module` and give every shard its values. Collective where `fold` is, and over pp.

    Args:
        module: The LightningModule, in its final dtypes.
        fold: Folds it, on meta if `source.on_meta`.
        source: Where the values come from.
        stages: This rank's place among the stages that folding has cut the model into.

    Raises:
        ValueError: The model does not fit the mapping, the file does not fit the model, or
            nothing initialises a parameter.
    """
    skeleton = Skeleton(module) if source.on_meta else None
    folded = fold()
    halved, path = folded.halved, source.path
    match = partial(
        find_initial,
        core=folded.parts.core_name,
        halved=halved,
        added=folded.added,
        stages=stages(),
    )
    weights = None if path is None else match(path, module)
    if skeleton is not None:
        given = weights.covered if weights else frozenset()
        draw = Draw(source.seed, stacks=_stacks(folded), halved=halved, given=given)
        materialise(module, skeleton, draw=draw, device=source.device)
    if weights is not None:
        load_initial(weights, module, halved=halved)
    return folded


def _stacks(folded: FoldedModel) -> dict[str, int]:
    """Number of experts of every parameter that stacks them along its first dimension."""
    return {
        f"{spec.name}.{key}": spec.num_experts
        for spec in folded.parts.experts
        for key, param in spec.module.named_parameters(recurse=False)
        if param.dim() > 1 and param.shape[0] == spec.num_experts
    }
