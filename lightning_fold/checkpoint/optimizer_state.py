"""Optimizer states by parameter name: the form of a sharded folder, and the way back.

Tensors go into the folder, sharded as their parameters are; everything else, parameter groups
among it, is primitive and goes into its meta. Nothing here steps an optimizer: torch's own state
dict API starts one that has not stepped by a step with zero gradients, which Adam counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fold.checkpoint.tensor_entry import TensorEntry
from lightning_fold.params import local_tensor, with_local


@dataclass(frozen=True)
class NamedState:
    """State of one optimizer.

    Attributes:
        tensors: Live or stored tensors by parameter name and key of the optimizer.
        rest: Primitives: `param_groups` with names for parameters, and `values`, the entries of
            the state that are no tensors.
    """

    tensors: dict[str, dict[str, Any]]
    rest: dict[str, Any]


def names_of(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters of every group, in the order of the optimizer's indices.

    Raises:
        ValueError: A parameter belongs to no submodule.
    """
    known = {id(param): name for name, param in module.named_parameters()}
    groups = [
        [known.get(id(param), "") for param in group["params"]] for group in optimizer.param_groups
    ]
    if any(not name for group in groups for name in group):
        raise ValueError(
            f"{type(optimizer).__name__} holds a parameter that is not in "
            f"{type(module).__name__}, so a checkpoint has no name for it. Build the optimizer "
            "from self.parameters() or self.named_parameters()."
        )
    return groups


def named_state(module: nn.Module, optimizer: Optimizer) -> NamedState:
    """State of `optimizer` by name, on its live shards. Local."""
    return by_name(optimizer.state_dict(), names_of(module, optimizer))


def by_name(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> NamedState:
    """A state that numbers its parameters, by name.

    Args:
        state: As `Optimizer.state_dict` gives it; its tensors may be stored ones.
        names: Of the parameters of every group.
    """
    groups = list(zip(state["param_groups"], names, strict=True))
    name_of = {i: n for group, own in groups for i, n in zip(group["params"], own, strict=True)}
    named = {name_of[index]: values for index, values in state["state"].items()}

    def entries(*, tensors: bool) -> dict[str, dict[str, Any]]:
        kinds = (Tensor, TensorEntry)
        return {
            name: {key: v for key, v in values.items() if isinstance(v, kinds) == tensors}
            for name, values in named.items()
        }

    return NamedState(
        tensors=entries(tensors=True),
        rest={
            "param_groups": [{**group, "params": list(own)} for group, own in groups],
            "values": entries(tensors=False),
        },
    )


def empty_state(
    module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Tensor]]:
    """Tensors for a saved state to be read into, sharded as their parameters are. Local.

    Args:
        module: The LightningModule.
        optimizer: Its parameters say how a tensor of their shape is sharded.
        saved: DCP's storage metadata (`size`, `properties`) by parameter name and key.

    Raises:
        ValueError: A tensor has neither its parameter's shape nor is a scalar.
    """
    params = dict(module.named_parameters())
    return {
        name: {key: _empty(f"{name}.{key}", params[name], stored) for key, stored in keys.items()}
        for group in names_of(module, optimizer)
        for name in group
        if (keys := saved.get(name))
    }


def fill(
    module: nn.Module,
    optimizer: Optimizer,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    rest: Mapping[str, Any],
) -> None:
    """Load a state by name into `optimizer`, after `check_groups`. Local.

    Args:
        module: The LightningModule.
        optimizer: Changed in place.
        tensors: Of its parameters.
        rest: As it was saved; may speak of parameters of other pipeline stages too.
    """
    groups = names_of(module, optimizer)
    index = {name: i for i, name in enumerate(name for group in groups for name in group)}
    values = rest["values"]
    state = {
        index[name]: {**values.get(name, {}), **tensors.get(name, {})}
        for name in index
        if name in values or name in tensors
    }
    # The optimizer's own order within a group; names have made it irrelevant.
    ordered, start = [], 0
    for group, names in zip(rest["param_groups"], groups, strict=True):
        own = list(range(start, start + len(names)))
        ordered.append({**without_names(group), "params": own})
        start += len(names)
    optimizer.load_state_dict({"state": state, "param_groups": ordered})


def without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group without the user's names of its parameters, for an optimizer to keep its own.

    They follow the order of the optimizer that was saved, which may be another, and of all stages.
    """
    return {key: value for key, value in group.items() if key != "param_names"}


def check_groups(live: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> None:
    """Refuse parameter groups that were built otherwise when the checkpoint was written.

    Raises:
        ValueError: Names the first difference.
    """
    if len(live) != len(saved):
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one has "
            f"{len(live)}. Build the same groups in configure_optimizers."
        )
    for i, (ours, theirs) in enumerate(zip(live, saved, strict=True)):
        extra, missing = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
        if extra or missing:
            raise ValueError(
                f"parameter group {i} differs from the checkpoint's: {len(missing)} parameters "
                f"are not in it ({', '.join(missing[:3])}), {len(extra)} are new "
                f"({', '.join(extra[:3])}). Build the same groups in configure_optimizers."
            )


def _empty(name: str, param: Tensor, stored: Any) -> Tensor:
    dtype: torch.dtype = stored.properties.dtype
    if not stored.size:
        # A step count: on the host, as torch's optimizers create it.
        return torch.zeros((), dtype=dtype)
    if stored.size != param.shape:
        raise ValueError(
            f"{name}: the checkpoint's optimizer holds shape {tuple(stored.size)}, its parameter "
            f"has {tuple(param.shape)}, and no other shape can be sharded. It was written by "
            "another model or optimizer."
        )
    return with_local(param, torch.empty_like(local_tensor(param), dtype=dtype))
