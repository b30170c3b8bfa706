"""Optimizer states of pipeline stages as one: their groups, indices, values and moments.

The groups of all stages together are those that one process would have: parameters in the whole
model's order where each stage lists its own in that order, else stage after stage. Moments travel
as weights do (`stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fold.checkpoint.optimizer_state import named_state
from lightning_fold.checkpoint.stages import Held, Stages

_LISTS = ("params", "param_names")


@dataclass(frozen=True)
class MergedGroups:
    """Parameter groups of all stages.

    Attributes:
        names: Of the parameters of every group.
        in_order: Whether a single process numbers them so.
    """

    names: list[list[str]]
    in_order: bool


def merge_groups(
    stages: Sequence[Sequence[Sequence[str]]], order: Mapping[str, int]
) -> MergedGroups:
    """One optimizer's groups of all stages as one.

    Args:
        stages: Names of the parameters of every group, as each stage has them.
        order: Place of every parameter in the whole model.

    Raises:
        ValueError: The stages have different groups; equal on all ranks, as the input is.
    """
    counts = [len(groups) for groups in stages]
    if len(set(counts)) > 1:
        told = ", ".join(f"stage {stage}: {count}" for stage, count in enumerate(counts))
        raise ValueError(
            f"the optimizer has another number of parameter groups on every stage ({told}), and "
            "group i of a checkpoint holds group i of all of them. Build the same groups on every "
            "stage, empty ones too, in configure_optimizers."
        )
    names, in_order = [], True
    for parts in zip(*stages, strict=True):
        every = list(dict.fromkeys(chain.from_iterable(parts)))
        agrees = all(_is_sorted(part, order) for part in parts)
        names.append(sorted(every, key=lambda name: order[name]) if agrees else every)
        in_order = in_order and agrees
    _check_once(names)
    return MergedGroups(names, in_order)


def merge_rests(rests: Sequence[Mapping[str, Any]], order: Mapping[str, int]) -> dict[str, Any]:
    """`NamedState.rest` of one optimizer on all stages as one.

    Args:
        rests: As each stage has it.
        order: Place of every parameter in the whole model.

    Raises:
        ValueError: The stages have different groups, or the same with different options.
    """
    groups = [[group["params"] for group in rest["param_groups"]] for rest in rests]
    merged = merge_groups(groups, order)
    param_groups = []
    for i, names in enumerate(merged.names):
        each = [rest["param_groups"][i] for rest in rests]
        _check_options(i, each)
        param_groups.append({**each[0], **_merged_lists(each, names)})
    values = {name: v for rest in reversed(rests) for name, v in rest["values"].items()}
    return {"param_groups": param_groups, "values": values}


def collect_state(
    stages: Stages,
    module: nn.Module,
    optimizer: Optimizer,
    held: Callable[[str, Tensor], Held],
) -> dict[str, Any]:
    """State of all stages as one process would have written it, on rank 0. Collective.

    Args:
        stages: This rank's place.
        module: The LightningModule.
        optimizer: This stage's.
        held: How a moment of a parameter becomes whole.

    Returns:
        Whole moments by parameter index; on the other ranks without states.

    Raises:
        ValueError: The stages have different groups, or the same with different options.
    """
    told = stages.gather(lambda: named_state(module, optimizer).rest, what="saving the optimizer")
    rest = merge_rests(told, order_of(stages.whole.parameters))
    own = {
        f"{name}.{key}": held(name, value)
        for name, values in named_state(module, optimizer).tensors.items()
        if stages.writes(name)
        for key, value in values.items()
    }
    moments = stages.collect(own, order=lambda names: list(dict.fromkeys(chain(*names))))
    return {**optimizer.state_dict(), **_numbered(rest, moments)}


def order_of(parameters: Sequence[str]) -> dict[str, int]:
    """Place of every parameter in the whole model."""
    return {name: i for i, name in enumerate(parameters)}


def _numbered(rest: Mapping[str, Any], moments: Mapping[str, Any]) -> dict[str, Any]:
    """A state by name as one by index; `moments` by name and key."""
    names = [name for group in rest["param_groups"] for name in group["params"]]
    index = {name: i for i, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {index[n]: dict(v) for n, v in rest["values"].items()}
    for path, value in moments.items():
        name, _, key = path.rpartition(".")
        state[index[name]][key] = value
    groups = [
        {**group, "params": [index[name] for name in group["params"]]}
        for group in rest["param_groups"]
    ]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _is_sorted(names: Sequence[str], order: Mapping[str, int]) -> bool:
    # A name that set-up has added has no place.
    places = [order.get(name, -1) for name in names]
    return -1 not in places and places == sorted(places)


def _check_once(names: Sequence[Sequence[str]]) -> None:
    seen: dict[str, int] = {}
    for i, group in enumerate(names):
        for name in group:
            if seen.setdefault(name, i) != i:
                raise ValueError(
                    f"{name} lies on several stages, in parameter group {seen[name]} of one and "
                    f"in group {i} of another. Put it into the same group on every stage, in "
                    "configure_optimizers."
                )


def _check_options(i: int, groups: Sequence[Mapping[str, Any]]) -> None:
    for stage, group in enumerate(groups[1:], start=1):
        for key in sorted({*groups[0], *group} - set(_LISTS)):
            first, other = groups[0].get(key), group.get(key)
            if not _equal(first, other):
                raise ValueError(
                    f"parameter group {i} has {key}={first} on stage 0 and {key}={other} on stage "
                    f"{stage}, and a checkpoint holds one value for all of them. Set the same on "
                    "every stage, in configure_optimizers."
                )


def _equal(first: Any, other: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return torch.equal(first.cpu(), other.cpu())
    return bool(first == other)


def _merged_lists(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """What a group says of its parameters one by one: their names, and the user's for them."""
    merged: dict[str, Any] = {"params": list(names)}
    if all("param_names" in group for group in groups):
        users = {
            name: user
            for group in groups
            for name, user in zip(group["params"], group["param_names"], strict=True)
        }
        merged["param_names"] = [users[name] for name in names]
    return merged
