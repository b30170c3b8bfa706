"""Which parts of Lightning work with sharded, folded models, and the refusals of those that do not.

Each check runs at set-up and gives one error with the reason. Nothing here computes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adam, AdamW, Optimizer
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

# Of the fused kernels only Adam's have a DTensor strategy in torch 2.13.
FUSED_OK = (Adam, AdamW)


def check_trainer(trainer: Trainer, *, async_save: bool = False) -> None:
    """Refuse Trainer features that would corrupt a sharded model without an error.

    Raises:
        ValueError: Weight averaging, a logger that runs the model on one rank, or a link to
            checkpoints that are written behind training.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        link = isinstance(callback, ModelCheckpoint) and callback.save_last == "link"
        if async_save and link:
            raise ValueError(
                "async_save=True writes a checkpoint behind training, and save_last='link' would "
                "point last.ckpt to one that is not whole yet. Legal with async_save: True, False. "
                " Change `save_last`."
            )
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} keeps whole copies of the model beside it, and a "
                "folded model is sharded over ranks. Remove the callback, or average consolidated "
                "checkpoints (save_distributed_checkpoint=False) after training."
            )
    for logger in trainer.loggers:
        if trainer.world_size > 1 and getattr(logger, "_log_graph", False):
            raise ValueError(
                f"{type(logger).__name__}(log_graph=True) runs the model on rank 0 alone, which "
                "would wait for the other ranks for ever. Leave `log_graph` out."
            )


def check_relaunch(num_processes: int, main_file: str | None) -> None:
    """Refuse to start child processes of a program that has no file to run again.

    Raises:
        RuntimeError: The program came from `python -c`, standard input or a notebook.
    """
    if num_processes > 1 and not main_file and sys.argv[0] in ("", "-c", "-"):
        raise RuntimeError(
            f"{num_processes} processes are needed, and a program from `python -c`, standard input "
            "or a notebook cannot be started again by its children. Put it into a file, or run "
            f"`torchrun --nproc-per-node {num_processes} FILE`."
        )


def wants_own_io(checkpoint_io: CheckpointIO, path: str, storage_options: Any | None) -> bool:
    """Whether a checkpoint goes through a plugin of the user's, or to remote storage."""
    plugin = type(checkpoint_io) is not TorchCheckpointIO
    return plugin or "://" in path or storage_options is not None


def explain_own_io(path: str) -> str:
    """The message where a sharded folder cannot be written through them."""
    return (
        f"a sharded checkpoint is written by all ranks into a folder of a shared file system, and "
        f"{path} asks for remote storage, `storage_options` or a checkpoint plugin. Mount the "
        "storage, or set save_distributed_checkpoint=False, which writes one file."
    )


def bypassed(core_name: str) -> RuntimeError:
    """The error of a training step that computes with shards."""
    return RuntimeError(
        f"training_step did not call `self.{core_name}(...)`, which holds the MoE blocks. "
        f"Its parameters are gathered when it is called; call it, not a submodule of it."
    )


def sync_metrics_over(module: nn.Module, peers: ProcessGroup) -> None:
    """Let the torchmetrics of `module` sync over `peers`: a world-wide sum counts tp, cp copies.

    A metric that has a group or a function of its own keeps it.
    """

    # A function and not `process_group`: a group on the metric could not be copied with it.
    def gather(value: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
        gathered: list[Tensor] = gather_all_tensors(value, group or peers)
        return gathered

    for metric in module.modules():
        if isinstance(metric, Metric) and not metric.process_group and not metric.dist_sync_fn:
            metric.dist_sync_fn = gather


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers that cannot step on sharded parameters.

    Raises:
        ValueError: LBFGS, or a fused kernel without a DTensor form.
    """
    sharded = any(
        isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]
    )
    if not sharded:
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            f"{name} flattens all parameters into one vector; use an optimizer that does not."
        )
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and not isinstance(optimizer, FUSED_OK):
        raise ValueError(
            f"{name}(fused=True) has no kernel for sharded parameters (DTensor) in torch; legal: "
            f"fused Adam and AdamW, or {name}(foreach=True). Change the optimizer's `fused`."
        )


def rebind_stale_parameters(
    optimizer: Optimizer,
    *,
    current: Mapping[str, nn.Parameter],
    names_before: Mapping[int, str],
    elsewhere: Collection[str] = (),
) -> None:
    """Point an optimizer that was built before set-up at the parameters of the folded model.

    LightningCLI and modules that build their optimizer in `__init__` hand over parameters that
    set-up has since replaced.

    Args:
        optimizer: Changed in place.
        current: Parameters by name.
        names_before: Names by the id of the parameters that were there before set-up; they must
            still be alive.
        elsewhere: Names of parameters of all pipeline stages; those of others are left out.

    Raises:
        ValueError: A parameter belongs to no module of the LightningModule.
    """
    known = {id(param) for param in current.values()}
    for group in optimizer.param_groups:
        kept = []
        for param in group["params"]:
            name = names_before.get(id(param))
            if id(param) in known:
                kept.append(param)
            elif name is not None and name in current:
                kept.append(current[name])
            elif name not in elsewhere:
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} "
                    "that is not in the LightningModule (any more). Build the optimizer in "
                    "configure_optimizers from self.parameters() or self.named_parameters()."
                )
        group["params"] = kept
