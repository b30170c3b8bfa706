"""How a strategy's checkpoints are saved, restored and removed, as Lightning asks for it.

Delegates to `checkpoint.CheckpointStore`, which knows no Lightning. Every method but the removal is
collective over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch.optim import Optimizer

from lightning_fold import compat
from lightning_fold.checkpoint import (
    OWN,
    Canonical,
    CheckpointStore,
    Peers,
    Stages,
    WholeModel,
    named_state,
)
from lightning_fold.config import FoldedConfig
from lightning_fold.model.fold import FoldedModel
from lightning_fold.params import reshard
from lightning_fold.ranks import MeshStrategy


class SavingStrategy(MeshStrategy):
    """A strategy whose checkpoints belong to the model; the base of `FoldedMoEStrategy`."""

    config: FoldedConfig

    def __init__(self) -> None:
        super().__init__()
        self._folded: FoldedModel | None = None
        self._store: CheckpointStore | None = None

    def _open_store(
        self, module: LightningModule, folded: FoldedModel, whole: WholeModel | None = None
    ) -> CheckpointStore:
        stages = self._stages_of(whole)
        background = None
        if self.config.async_save:
            # A group of their own: a thread's collectives never mix with training's.
            apart = dist.new_group(backend="gloo") if self.world_size > 1 else None
            background = Peers(apart)
        return CheckpointStore(
            Canonical(module, halved=folded.halved, is_writer=self.is_global_zero, stages=stages),
            mapping=self.meshes.folding.mapping_id,
            peers=Peers(dist.group.WORLD),
            background_peers=background,
        )

    def _stages_of(self, whole: WholeModel | None) -> Stages | None:
        """This rank's place among the stages that `whole` was cut into."""
        if whole is None:
            return None
        return Stages(whole, self.meshes.group("pp"), self.root_device)

    def consolidate(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Whole tensors in the user's shapes on rank 0, `{}` elsewhere. Collective."""
        return self._checkpoints.canonical.consolidate(named)

    def _reshard(self) -> None:
        reshard(self._folded.sharded if self._folded else ())

    restore_checkpoint_after_setup = property(lambda self: True)
    lightning_restore_optimizer = property(lambda self: False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Live shards, or whole tensors on rank 0 for a consolidated file. Collective."""
        state: dict[str, Any] = self._module.state_dict()
        return state if self.config.save_distributed_checkpoint else self.consolidate(state)

    def optimizer_state(self, optimizer: Optimizer | LightningOptimizer) -> Any:
        """State of one optimizer, in the same form as the module's. Collective."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self.config.save_distributed_checkpoint:
            return named_state(self._module, inner)
        return self._checkpoints.canonical.optimizer_state(inner)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a sharded folder or a consolidated file. Collective over all ranks.

        Under its final name it appears whole or not at all. With `async_save` the call returns
        while a thread writes; `on_train_end`, the next save and the next load wait for it.
        """
        target = str(self.broadcast(filepath))
        checkpoint.update(self.data_state())
        if not self.config.save_distributed_checkpoint:
            states = checkpoint.get("optimizer_states", [])
            checkpoint[OWN] = self._checkpoints.own_entries(self.optimizers if states else [])
        if compat.wants_own_io(self.checkpoint_io, target, storage_options):
            if self.config.save_distributed_checkpoint:
                raise ValueError(compat.explain_own_io(target))
            super().save_checkpoint(checkpoint, target, storage_options)
            return
        save = (
            self._checkpoints.save_folder
            if self.config.save_distributed_checkpoint
            else self._checkpoints.save_file
        )
        if replaced := save(Path(target), checkpoint):
            rank_zero_warn(f"{target}: stored as text, being no primitive: {', '.join(replaced)}")

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill module and optimizers from either form, whatever mapping wrote it. Collective."""
        path = str(self.broadcast(checkpoint_path))
        self._reshard()
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        optimizers = list(self.optimizers) if fitting else []
        strict = self._module.strict_loading
        if compat.wants_own_io(self.checkpoint_io, path, None) and not Path(path).is_dir():
            whole = super().load_checkpoint(path, weights_only=True)
            return self._checkpoints.load_whole(path, whole, optimizers, strict=strict)
        return self._checkpoints.load(Path(path), optimizers, strict=strict)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Only the position in the data: `load_checkpoint` has filled the module."""
        self.load_data_state(checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has filled the optimizers."""

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint on rank 0, once no newer one is still being written."""
        if compat.wants_own_io(self.checkpoint_io, str(filepath), None):
            super().remove_checkpoint(filepath)
        else:
            self._checkpoints.remove(Path(filepath))

    def on_train_end(self) -> None:
        """Wait for a checkpoint that is still being written; leave if a signal came. Collective."""
        self.wait_for_checkpoints()
        self._guard.finish()

    def wait_for_checkpoints(self) -> None:
        """Wait for a checkpoint that is still being written. Collective."""
        self._checkpoints.finish()

    @property
    def _checkpoints(self) -> CheckpointStore:
        assert self._store is not None, "checkpoints need a model that is set up"
        return self._store
