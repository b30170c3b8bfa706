"""What the model and its optimizers hold on all pipeline stages together.

A checkpoint is compared with this, so that a name of another stage is not unknown and what does
not fit is refused by all ranks alike. Without stages it is what this rank holds, and nothing is
sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fold.checkpoint.optimizer_state import names_of
from lightning_fold.checkpoint.stage_groups import (
    MergedGroups,
    merge_groups,
    merge_rests,
    order_of,
)
from lightning_fold.checkpoint.stages import Stages
from lightning_fold.checkpoint.whole import TensorMeta

Item = TypeVar("Item")


@dataclass(frozen=True)
class Survey:
    """Names, live shapes and groups.

    Attributes:
        tensors: Live tensors of `state_dict()` by name.
        extra: Names of what modules add by `get_extra_state`.
        halved: Names of live [E, 2, F, D] parameters.
        groups: Parameter groups of every optimizer.
    """

    tensors: Mapping[str, TensorMeta]
    extra: frozenset[str]
    halved: frozenset[str]
    groups: tuple[MergedGroups, ...]


def survey(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    halved: Collection[str],
    stages: Stages | None,
) -> Survey:
    """Ask every stage. Collective over pp where there are stages.

    Args:
        module: The LightningModule.
        optimizers: Whose groups are told.
        halved: Names of this rank's live [E, 2, F, D] parameters.
        stages: This rank's place; None where the model is not cut.

    Raises:
        ValueError: An optimizer has parameters without a name, or other groups on every stage.
    """
    if stages is None:
        return _own(module, optimizers, halved)
    each = stages.gather(
        lambda: _own(module, optimizers, halved), what="asking the stages for their names"
    )
    order = order_of(stages.whole.parameters)
    groups = [
        merge_groups([one.names for one in own], order)
        for own in by_optimizer([told.groups for told in each])
    ]
    return Survey(
        tensors={name: meta for told in reversed(each) for name, meta in told.tensors.items()},
        extra=frozenset().union(*(told.extra for told in each)),
        halved=frozenset().union(*(told.halved for told in each)),
        groups=tuple(groups),
    )


def merged_meta(stages: Stages, own: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A sharded folder's own entries for all stages. Collective over pp.

    Args:
        stages: This rank's place.
        own: This stage's `halved`, `optimizers` (`NamedState.rest`) and `extra_state`, and others.
        names: This stage's `state_dict()`, whose merged order is added as `order`.

    Raises:
        ValueError: The stages' optimizers have different groups or options.
    """
    each = stages.gather(lambda: (dict(own), list(names)), what="saving the stages' entries")
    order = order_of(stages.whole.parameters)
    rests = by_optimizer([told["optimizers"] for told, _ in each])
    extra = {n: value for told, _ in reversed(each) for n, value in told["extra_state"].items()}
    in_order = stages.whole.in_order([held for _, held in each])
    return {
        **own,
        "halved": sorted({name for told, _ in each for name in told["halved"]}),
        "optimizers": [merge_rests(rest, order) for rest in rests],
        "extra_state": {name: extra[name] for name in in_order if name in extra},
        "order": in_order,
    }


def by_optimizer(stages: Sequence[Sequence[Item]]) -> list[list[Item]]:
    """What every stage says of each optimizer.

    Raises:
        ValueError: They have different numbers of optimizers.
    """
    counts = [len(own) for own in stages]
    if len(set(counts)) > 1:
        told = ", ".join(f"stage {stage}: {count}" for stage, count in enumerate(counts))
        raise ValueError(
            f"the stages have different numbers of optimizers ({told}). Return the same optimizers "
            "on every stage from configure_optimizers, with empty groups where nothing is theirs."
        )
    return [list(own) for own in zip(*stages, strict=True)]


def _own(module: nn.Module, optimizers: Sequence[Optimizer], halved: Collection[str]) -> Survey:
    state = module.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return Survey(
        tensors={n: TensorMeta(tuple(value.shape), value.dtype) for n, value in tensors.items()},
        extra=frozenset(state.keys() - tensors.keys()),
        halved=frozenset(halved),
        groups=tuple(
            MergedGroups(names_of(module, optimizer), in_order=True) for optimizer in optimizers
        ),
    )
