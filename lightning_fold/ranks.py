"""Who the ranks are, as Lightning asks: device, samples, reductions, barriers, broadcasts.

Samples and metrics belong to dp ranks; tp and cp peers hold the same ones, so a sum over the world
would count them tp * cp times. Agreement (early stopping, checkpoints) is over all ranks. Knows
nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor

from lightning_fold import sampling
from lightning_fold.faults import Guard
from lightning_fold.loaders import Ends, FirstBatches
from lightning_fold.telemetry import Telemetry
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.meshes import Meshes
from lightning_fold.topology.replicas import gather_random_states, restore_random_state

# Key of the generators of all ranks in a checkpoint.
RANDOM = "lightning_fold.random"


class MeshStrategy(ParallelStrategy):
    """A strategy whose ranks form meshes; the base of `FoldedMoEStrategy`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_nodes = 1
        self.telemetry = Telemetry()
        self._comm: Comm | None = None
        self._first_batches = FirstBatches()
        self._ends = Ends()
        self._saved_position: Mapping[str, Any] | None = None
        self._saved_random: Mapping[str, Any] | None = None
        self._guard = Guard()

    @property
    def meshes(self) -> Meshes:
        """The device meshes; from `setup_environment` on."""
        return self.comm.meshes

    @property
    def comm(self) -> Comm:
        """Collectives by axis name; from `setup_environment` on."""
        if self._comm is None:
            raise RuntimeError("the meshes exist only after the Trainer has set up its environment")
        return self._comm

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    is_distributed = property(lambda self: True)

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samples are divided over dp; tp and cp peers read the same ones."""
        return {"num_replicas": self.comm.size("dp"), "rank": self.comm.rank("dp")}

    def process_dataloader(self, dataloader: object) -> object:
        """Enter the data where a checkpoint left it; seed workers by dp rank, not by rank."""
        trainer = self._module.trainer
        self._first_batches.expect(trainer)
        if trainer.training:
            sampling.resume(trainer, dataloader, self._saved_position)
        elif trainer.predicting:
            sampling.check_predicted(dataloader)
        self._ends.watch(dataloader, self)
        if hasattr(dataloader, "worker_init_fn"):
            _auto_add_worker_init_fn(dataloader, self.comm.rank("dp"))
        return dataloader

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch; the first of a loader is compared with what this rank's peers read."""
        self._first_batches.compare(
            batch, trainer=self._module.trainer, index=dataloader_idx, meshes=self.meshes
        )
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_start(self) -> None:
        """Begin with the validation that was due when the checkpoint was saved."""
        sampling.run_due_validation(self._module.trainer, self._saved_position)

    def data_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the position in the training data and of random numbers.

        Collective over all ranks.
        """
        position = sampling.position_of(self._module.trainer)
        state = {RANDOM: gather_random_states(self.meshes.folding.mapping_id)}
        return state if position is None else {**state, sampling.POSITION: asdict(position)}

    def load_data_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep the position of a checkpoint until its loader is there, and its random numbers."""
        self._saved_position = checkpoint.get(sampling.POSITION)
        sampling.ask_again(self._module.trainer)
        self._saved_random = checkpoint.get(RANDOM)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Draw from here on what the run that saved the checkpoint would have drawn."""
        if self._saved_random is None:
            return
        # Not sooner: building modules draws numbers, and so does making a loader's iterator, which
        # a run that goes on from an epoch's end would have done since.
        restore_random_state(self._saved_random, self.meshes.folding.mapping_id)
        self._saved_random = None
        if batch_idx == 0:
            sampling.draw_as_iterators_do(self._module.trainer)

    def set_world_ranks(self) -> None:
        """Tell the environment and Lightning's rank-zero helpers which rank this is."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        for rank_zero in (rank_zero_only, utils_rank_zero_only):
            setattr(rank_zero, "rank", self.global_rank)  # noqa: B010

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean"
    ) -> Any:
        """Reduce over the ranks with different samples (dp): their peers hold the same value."""
        if not isinstance(tensor, Tensor) or self._comm is None:
            return tensor
        group = self.meshes.group("dp") if group is None else group
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree on a decision over all ranks of the world."""
        if self.world_size == 1:
            return decision
        flag = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized() and self.world_size > 1:
            on_gpu = dist.get_backend() == "nccl"
            dist.barrier(device_ids=[self.root_device.index] if on_gpu else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Object of rank `src`, on all ranks."""
        if not dist.is_initialized() or self.world_size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def wait_for_checkpoints(self) -> None:
        """Wait for checkpoints that are still being written. Collective."""

    def teardown(self) -> None:
        """Leave parameters where they are: they are shards, and moving them helps nobody."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._guard.close()
