"""What a strategy does in each of Lightning's steps, with or without a pipeline.

Owns the one division of the loss, what is checked around a step, and when gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fold import compat
from lightning_fold.model.fold import FoldedModel
from lightning_fold.params.sentinel import Sentinel
from lightning_fold.saving import SavingStrategy
from lightning_fold.steps.pipelined import PipelinedSteps


class SteppingStrategy(SavingStrategy):
    """A strategy that runs the user's steps; the base of `FoldedMoEStrategy`.

    Attributes:
        grad_norm: Norm of the gradients before the latest clipping by norm.
        sentinel: Watches over training; None where nothing does.
        pipeline: Runs steps in a pipeline; None where there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.grad_norm: Tensor | None = None
        self.sentinel: Sentinel | None = None
        self.pipeline: PipelinedSteps | None = None
        self._core_called = False
        self._extra_steps = 0
        self._syncs = True

    def _record_norm(self, norm: Tensor) -> None:
        self.grad_norm = norm

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; refuse one that bypasses the core, whose weights would be shards."""
        self._core_called = False
        folded = self._model_or_raise()
        if self.sentinel is not None:
            self.sentinel.begin(self._module.trainer.global_step)
        if self.pipeline is not None:
            batch, *rest = args
            return self.pipeline.training_step(
                batch, rest, syncs=self._syncs, sentinel=self.sentinel
            )
        try:
            out = super().training_step(*args, **kwargs)
        except RuntimeError as error:
            if self._core_called or "DTensor" not in str(error):
                raise
            raise compat.bypassed(folded.parts.core_name) from error
        if folded.sharded and not self._core_called:
            raise compat.bypassed(folded.parts.core_name)
        return out

    def on_train_start(self) -> None:
        """Take Ctrl-C as a request to save and leave, from here to the end of training."""
        super().on_train_start()
        self._guard.start()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step."""
        return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step."""
        return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; a rank with fewer batches repeats its last for its experts' sake."""
        out = self._evaluate("predict_step", *args, **kwargs)
        progress: Any = self._module.trainer.predict_loop.batch_progress
        if progress.is_last_batch:
            for _ in range(self._extra_steps):
                self._evaluate("predict_step", *args, **kwargs)
        return out

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.pipeline is None:
            return getattr(super(), name)(*args, **kwargs)
        return self.pipeline.evaluation_step(name, args[0], args[1:])

    def on_predict_start(self) -> None:
        """Count by how many batches the busiest dp rank exceeds this one. Collective."""
        own: Any = sum(self._module.trainer.predict_loop.max_batches)
        counts: list[Any] = [None] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(counts, own)
        known = [count for count in counts if isinstance(count, int)]
        self._extra_steps = max(known) - own if len(known) == len(counts) and known else 0

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Divide the loss by dp, the only division, and run the user's backward.

        The mean over dp ranks of each rank's mean is then a sum of gradients (DESIGN section 5.4).
        """
        if self.sentinel is not None:
            self.sentinel.before_backward()
        loss = super().backward(closure_loss / self.comm.size("dp"), optimizer, *args, **kwargs)
        if self.sentinel is not None and self._syncs:
            self.sentinel.finish()
        return loss

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, and begin to count the next global batch, also where a scaler skipped the step."""
        out = super().optimizer_step(optimizer, *args, **kwargs)
        if (balance := self._model_or_raise().balance) is not None:
            balance.close_batch(optimizer)
        return out

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients local while accumulating; only full shards free parameters meanwhile."""
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, enabled: bool) -> None:
        self._syncs = enabled
        for root in self._model_or_raise().roots:
            root.set_requires_gradient_sync(enabled)
            root.set_reshard_after_backward(enabled or self.config.data_parallel_shard == "full")

    def _note_core_call(self, module: nn.Module, args: Any) -> None:
        self._core_called = True

    def _reshard_without_grad(self, module: nn.Module, args: Any, output: Any) -> None:
        # A pipeline gathers once for all microbatches.
        if not torch.is_grad_enabled() and self.pipeline is None:
            self._reshard()

    def on_validation_end(self) -> None:
        """Return to shards, whatever the user's step did."""
        self._reshard()

    on_test_end = on_predict_end = on_validation_end

    def _model_or_raise(self) -> FoldedModel:
        if self._folded is None:
            raise RuntimeError(
                "the model is folded in `setup`; this needs a Trainer that has started"
            )
        return self._folded
