"""Which parts of Lightning work with sharded, folded models, and the refusals of those that do not.

Each check runs at set-up and gives one error with the reason. Nothing here computes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adam, AdamW, Optimizer

# Of the fused kernels only Adam's have a DTensor strategy in torch 2.13.
FUSED_OK = (Adam, AdamW)


def check_trainer(trainer: Trainer) -> None:
    """Refuse Trainer features that would corrupt a sharded model without an error.

    Raises:
        ValueError: Weight averaging, or an example input that runs outside a step.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} keeps whole copies of the model beside it, and a "
                "folded model is sharded over ranks. Remove the callback, or average consolidated "
                "checkpoints (save_distributed_checkpoint=False) after training."
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
    optimizer: Optimizer, *, current: Mapping[str, nn.Parameter], names_before: Mapping[int, str]
) -> None:
    """Point an optimizer that was built before set-up at the parameters of the folded model.

    LightningCLI and modules that build their optimizer in `__init__` hand over parameters that
    set-up has since replaced.

    Args:
        optimizer: Changed in place.
        current: Parameters by name.
        names_before: Names by the id of the parameters that were there before set-up; they must
            still be alive.

    Raises:
        ValueError: A parameter belongs to no module of the LightningModule.
    """
    known = {id(param) for param in current.values()}
    for group in optimizer.param_groups:
        for i, param in enumerate(group["params"]):
            if id(param) in known:
                continue
            name = names_before.get(id(param))
            if name is None or name not in current:
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} "
                    "that is not in the LightningModule (any more). Build the optimizer in "
                    "configure_optimizers from self.parameters() or self.named_parameters()."
                )
            group["params"][i] = current[name]


def refuse_toggling(module: LightningModule) -> None:
    """Make `toggle_optimizer` an error: FSDP2 fixes `requires_grad` at its first gather."""

    def toggle_optimizer(optimizer: Any) -> None:
        raise ValueError(
            "toggle_optimizer has no effect on sharded parameters. Detach the part that must not "
            "receive gradients, or call zero_grad on its optimizer."
        )

    module.toggle_optimizer = toggle_optimizer  # type: ignore[method-assign]
