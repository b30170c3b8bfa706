"""Names and shapes of a checkpoint belong to the user's model, not to the mapping.

Owns the way between live tensors (shards; first expert projections as [E, 2, F, D]) and the
user's (whole; [E, 2F, D]), for weights, gradients and optimizer moments alike. Where pipeline
stages divide the model, what is written is the whole model's and what is read is this stage's.
Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fold.checkpoint.optimizer_state import names_of, without_names
from lightning_fold.checkpoint.owned import part_of, stored_index
from lightning_fold.checkpoint.stage_groups import collect_state
from lightning_fold.checkpoint.stages import Held, Stages
from lightning_fold.checkpoint.survey import Survey, survey
from lightning_fold.checkpoint.tensor_entry import TensorEntry, read_entry
from lightning_fold.checkpoint.whole import TensorMeta
from lightning_fold.params import local_tensor, with_local


class Shaped(Protocol):
    """A tensor, or what is known of one."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""


class Canonical:
    """Converts between live and user's tensors.

    Args:
        module: The LightningModule; of a model that was cut, what this rank's stage holds.
        halved: Names of live [E, 2, F, D] parameters, which the user knows as [E, 2F, D].
        is_writer: Whether this rank keeps gathered tensors; rank 0 of the world, with stages.
        stages: This rank's place among pipeline stages; None where the model is not cut.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        halved: Collection[str],
        is_writer: bool,
        stages: Stages | None = None,
    ) -> None:
        self.module = module
        self.halved = frozenset(halved)
        self.is_writer = is_writer
        self.stages = stages
        if stages is not None:
            stages.check(module)

    def consolidate(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Whole tensors in the user's shapes, on CPU on the writing rank; `{}` on the others.

        Collective over all ranks; one tensor at a time is whole.

        Args:
            named: Live tensors by parameter or buffer name; other values pass through. With
                stages, those of this one; the result holds those of all.
        """
        if self.stages is not None:
            own = {n: self._held(n, v) for n, v in named.items() if self.stages.writes(n)}
            return self.stages.collect(own, order=self.stages.whole.in_order)
        whole = {}
        for name, value in named.items():
            tensor = self.to_user(name, value) if isinstance(value, Tensor) else value
            if self.is_writer:
                whole[name] = tensor.cpu().clone() if isinstance(tensor, Tensor) else tensor
        return whole

    def to_user(self, name: str, live: Tensor) -> Tensor:
        """One whole tensor in the user's shape. Collective where `live` is sharded."""
        whole = live.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        return whole.flatten(1, 2) if name in self.halved and whole.dim() == 4 else whole

    def _held(self, name: str, value: Any) -> Any:
        """A live value as stages exchange it."""
        if not isinstance(value, Tensor):
            return value
        shape = tuple(value.shape)
        if name in self.halved and len(shape) == 4:
            shape = (shape[0], shape[1] * shape[2], shape[3])
        return Held(TensorMeta(shape, value.dtype), lambda: self.to_user(name, value))

    def to_live(self, name: str, user: Tensor | TensorEntry, live: Tensor) -> Tensor:
        """This rank's part of a whole tensor, sharded and typed like `live`, a copy. Sends nothing.

        Args:
            name: Of the parameter or buffer.
            user: In the user's shape: a tensor, or a stored one, of which only the part is read.
            live: Says how it is sharded.

        Raises:
            ValueError: The shapes differ.
        """
        if self.live_shape(name, user) != tuple(live.shape):
            raise ValueError(
                f"{name}: the checkpoint holds shape {tuple(user.shape)}, the model has "
                f"{tuple(live.shape)}. Another model wrote it. Change `ckpt_path`."
            )
        index = stored_index(live, user.shape, halved=name in self.halved)
        part = read_entry(user, index) if isinstance(user, TensorEntry) else part_of(user, index)
        if isinstance(user, Tensor):
            part = part.clone(memory_format=torch.contiguous_format)
        local = local_tensor(live)
        return with_local(live, part.reshape(local.shape).to(local.device, local.dtype))

    def survey(self, optimizers: Sequence[Optimizer]) -> Survey:
        """What model and optimizers hold on all stages. Collective over pp where there are any."""
        return survey(self.module, optimizers, halved=self.halved, stages=self.stages)

    def live_shape(
        self, name: str, user: Tensor | TensorEntry, *, halved: Collection[str] | None = None
    ) -> tuple[int, ...]:
        """Global shape of the live tensor that one of the user's becomes.

        Args:
            name: Of the parameter or buffer.
            user: In the user's shape.
            halved: Names of all stages' [E, 2, F, D] parameters; None is this rank's.
        """
        shape = tuple(user.shape)
        names = self.halved if halved is None else halved
        if name in names and len(shape) == 3 and shape[1] % 2 == 0:
            return shape[0], 2, shape[1] // 2, shape[2]
        return shape

    def check(
        self,
        source: Path | str,
        saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        live: Mapping[str, Shaped],
        strict: bool,
    ) -> None:
        """Make sure that a checkpoint fits the model, before anything is read.

        Args:
            source: Named in messages.
            saved: Live shape and dtype of its tensors.
            live: Tensors of the model, those of all stages.
            strict: Whether names must match.

        Raises:
            ValueError: Names, shapes or dtypes differ.
        """
        missing, unknown = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
        if strict and (missing or unknown):
            raise ValueError(
                f"{source} does not fit the model: {len(missing)} names are missing "
                f"({', '.join(missing[:3])}) and {len(unknown)} are unknown "
                f"({', '.join(unknown[:3])}). Another model wrote it. Change `ckpt_path`."
            )
        for name in sorted(live.keys() & saved.keys()):
            shape, dtype = saved[name]
            if shape != tuple(live[name].shape):
                raise ValueError(
                    f"{source} does not fit the model: {name} has shape {shape} there and "
                    f"{tuple(live[name].shape)} here. Another model wrote it. Change `ckpt_path`."
                )
            if dtype != live[name].dtype:
                raise ValueError(
                    f"{source} holds {name} as {dtype}, the model has {live[name].dtype}; resuming "
                    "would round it or train in another precision. Change the Trainer's "
                    "`precision`, or read the weights alone by `init_from`."
                )

    def load_model(
        self, state: Mapping[str, Tensor | TensorEntry], *, live: Mapping[str, Tensor]
    ) -> None:
        """Fill `live` from whole tensors under the user's names, after `check`. Local."""
        with torch.no_grad():
            for name, target in live.items():
                if name in state:
                    target.copy_(self.to_live(name, state[name], target))

    def set_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Hand modules what their `get_extra_state` gave; those of other stages are passed over."""
        own = self.module.state_dict().keys() if self.stages is not None else extra.keys()
        for name, value in extra.items():
            if name not in own:
                continue
            owner = name.removesuffix("_extra_state").rstrip(".")
            self.module.get_submodule(owner).set_extra_state(value)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State as a single process would have written it: whole moments, keyed by parameter index.

        Collective over all ranks.

        Raises:
            ValueError: The stages' groups cannot be one; on every rank.
        """
        if self.stages is not None:
            return collect_state(self.stages, self.module, optimizer, self._held)

        def convert(name: str, param: nn.Parameter, value: Tensor) -> Any:
            whole = self.to_user(name, value)
            return whole.cpu().clone() if self.is_writer else None

        return self._map_optimizer(optimizer, optimizer.state_dict(), convert)

    def load_optimizer(
        self,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        *,
        names: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Fill `optimizer` from a state that a single process would have written. Local.

        Args:
            optimizer: Changed in place.
            state: Whole moments by parameter index.
            names: Parameters of the saved groups by name, those of all stages; None where the
                file does not say, whose indices then count as this optimizer's own.

        Raises:
            ValueError: It has state for more parameters than it lists.
        """
        if names is not None:
            state = _reindexed(state, names_of(self.module, optimizer), names)

        def convert(name: str, param: nn.Parameter, value: Tensor | TensorEntry) -> Any:
            if value.shape:
                return self.to_live(name, value, param)
            # A step count belongs to no shard.
            return read_entry(value) if isinstance(value, TensorEntry) else value.clone()

        optimizer.load_state_dict(self._map_optimizer(optimizer, state, convert))

    def _map_optimizer(
        self,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        convert: Callable[[str, nn.Parameter, Any], Any],
    ) -> dict[str, Any]:
        names = {param: name for name, param in self.module.named_parameters()}
        flat = [param for group in optimizer.param_groups for param in group["params"]]
        if state["state"] and max(state["state"]) >= len(flat):
            raise ValueError(
                f"the checkpoint's optimizer has state for parameter {max(state['state'])}, this "
                f"one has {len(flat)} parameters. Build the same parameter groups."
            )
        mapped = {
            index: {
                key: convert(names[flat[index]], flat[index], value)
                if isinstance(value, Tensor | TensorEntry)
                else value
                for key, value in values.items()
            }
            for index, values in state["state"].items()
        }
        return {**state, "state": mapped}


def _reindexed(
    state: Mapping[str, Any], live: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """`state` with the indices of an optimizer whose groups list the names in another order."""
    index = {name: i for i, name in enumerate(name for group in live for name in group)}
    flat = [name for group in saved for name in group]
    if state["state"] and max(state["state"]) >= len(flat):
        raise ValueError(
            f"the checkpoint's optimizer has state for parameter {max(state['state'])} and lists "
            f"{len(flat)} parameters. It is damaged."
        )
    groups = [
        {**without_names(group), "params": [index[name] for name in names]}
        for group, names in zip(state["param_groups"], live, strict=True)
    ]
    # What lies on other stages is theirs to load.
    moments = {index[flat[i]]: v for i, v in state["state"].items() if flat[i] in index}
    return {**state, "state": moments, "param_groups": groups}
