"""Names and shapes of a checkpoint belong to the user's model, not to the mapping.

Owns the way between live tensors (shards; first expert projections as [E, 2, F, D]) and the
user's (whole; [E, 2F, D]), for weights, gradients and optimizer moments alike. Knows nothing of
files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer


class Canonical:
    """Converts between live and user's tensors.

    Args:
        module: The LightningModule.
        halved: Names of live [E, 2, F, D] parameters, which the user knows as [E, 2F, D].
        is_writer: Whether this rank keeps gathered tensors.
    """

    def __init__(self, module: nn.Module, *, halved: Collection[str], is_writer: bool) -> None:
        self.module = module
        self.halved = frozenset(halved)
        self.is_writer = is_writer

    def consolidate(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Whole tensors in the user's shapes, on CPU on the writing rank; `{}` on the others.

        Collective over all ranks; one tensor at a time is whole.

        Args:
            named: Live tensors by parameter or buffer name; other values pass through.
        """
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

    def to_live(self, name: str, user: Tensor, live: Tensor) -> Tensor:
        """This rank's part of a whole tensor, sharded and typed like `live`. Sends nothing."""
        if name in self.halved and user.dim() == 3:
            user = user.unflatten(1, (2, -1))
        if user.shape != live.shape:
            raise ValueError(
                f"{name}: the checkpoint holds shape {tuple(user.shape)}, the model has "
                f"{tuple(live.shape)}. It was written by another model."
            )
        user = user.to(live.device, live.dtype)
        if not isinstance(live, DTensor):
            return user
        mesh = live.device_mesh
        everywhere = DTensor.from_local(user, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return everywhere.redistribute(mesh, live.placements)

    def load_model(self, state: Mapping[str, Tensor], *, strict: bool) -> None:
        """Fill the module from whole tensors under the user's names.

        Raises:
            ValueError: Names or shapes do not match.
        """
        live = self.module.state_dict()
        missing, unexpected = sorted(live.keys() - state.keys()), sorted(state.keys() - live.keys())
        if strict and (missing or unexpected):
            raise ValueError(
                f"the checkpoint does not fit the model: {len(missing)} names are missing "
                f"({', '.join(missing[:3])}) and {len(unexpected)} are unknown "
                f"({', '.join(unexpected[:3])})"
            )
        parts = {
            name: self.to_live(name, state[name], target)
            for name, target in live.items()
            if name in state
        }
        with torch.no_grad():
            for name, part in parts.items():
                live[name].copy_(part)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State as a single process would have written it: whole moments, keyed by parameter index.

        Collective over all ranks.
        """

        def convert(name: str, param: nn.Parameter, value: Tensor) -> Any:
            whole = self.to_user(name, value)
            return whole.cpu().clone() if self.is_writer else None

        return self._map_optimizer(optimizer, optimizer.state_dict(), convert)

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Fill `optimizer` from a state that a single process would have written. Local."""

        def convert(name: str, param: nn.Parameter, value: Tensor) -> Any:
            # A scalar, the step count, belongs to no shard.
            return self.to_live(name, value, param) if value.dim() else value

        optimizer.load_state_dict(self._map_optimizer(optimizer, state, convert))

    def _map_optimizer(
        self,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        convert: Callable[[str, nn.Parameter, Tensor], Any],
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
                if isinstance(value, Tensor)
                else value
                for key, value in values.items()
            }
            for index, values in state["state"].items()
        }
        return {**state, "state": mapped}
