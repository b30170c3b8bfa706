"""Automatic optimization under a pipeline, whose schedule runs forward and backward in one.

Lightning zeroes gradients between the step and its backward, which would erase what the schedule
has accumulated: here they are zeroed before the step, and nothing runs backward after it. All else
(accumulation windows, progress, `optimizer_step`) stays Lightning's.

    Lightning:  training_step, zero_grad hooks, on_before_backward, backward, on_after_backward
    pipeline:   zero_grad hooks, training_step = (schedule, on_before_backward, on_after_backward)
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class PipelineClosure(Closure):
    """Zeroes gradients, then runs the step, which leaves the gradients behind."""

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run one batch of an accumulation window."""
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        return self._step_fn()


class PipelinedAutomaticOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization with `PipelineClosure`."""

    def _make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> Closure:
        return PipelineClosure(
            step_fn=self._make_step_fn(kwargs),
            zero_grad_fn=self._make_zero_grad_fn(batch_idx, optimizer),
        )


def install_closure(trainer: Trainer) -> None:
    """Let `trainer` optimize through `PipelineClosure`.

    To be called in the strategy's `setup`, before a checkpoint's loops are restored: the progress
    object, which Lightning fills then, is kept. Called again, it changes nothing.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    if isinstance(epoch_loop.automatic_optimization, PipelinedAutomaticOptimization):
        return
    pipelined = PipelinedAutomaticOptimization(trainer)
    pipelined.optim_progress = epoch_loop.automatic_optimization.optim_progress
    epoch_loop.automatic_optimization = pipelined


def fire_backward_hooks(trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
    """Call `on_before_backward` and `on_after_backward` of callbacks and module.

    Through the precision plugin, as Lightning's own backward does. All ranks call it, after the
    schedule.

    Args:
        trainer: The Trainer of the step.
        module: Its module.
        loss: What the strategy's `training_step` returns. The hooks get what they get without a
            pipeline: the loss over `accumulate_grad_batches`, times the scale of an fp16 scaler.
    """
    plugin = trainer.precision_plugin
    closure_loss = plugin.pre_backward(loss.detach() / trainer.accumulate_grad_batches, module)
    plugin.post_backward(closure_loss, module)


def check_module(module: LightningModule) -> None:
    """Refuse modules and Trainers whose steps a schedule cannot run.

    Raises:
        ValueError: Manual optimization, a step that takes `dataloader_iter`, or the search for a
            batch size.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name}.automatic_optimization is False: its training_step calls backward itself, and "
            "with pipeline_parallel_size > 1 the schedule runs backward between the microbatches. "
            "Return the loss from training_step, or change `pipeline_parallel_size` to 1."
        )
    for step in _STEPS:
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise ValueError(
                f"{name}.{step} takes `dataloader_iter`, and with pipeline_parallel_size > 1 the "
                f"batch must be known before the step, to be cut into microbatches. Write "
                f"`{step}(self, batch, batch_idx)`, or change `pipeline_parallel_size` to 1."
            )
    trainer = module._trainer
    callbacks: list[Any] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        raise ValueError(
            "BatchSizeFinder (Tuner.scale_batch_size) looks for a batch size by running out of "
            "memory on one rank, and with pipeline_parallel_size > 1 the other stages would wait "
            "for that rank. Remove it, and set the batch size and `microbatch_size` by hand."
        )
