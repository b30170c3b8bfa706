"""One mapping through a real Trainer on every rank: train, save, resume another one's checkpoint.

The user's module keeps its step; optimizer, clipping and data are set from outside, equal to those
of the plain loop. Every rank writes what it has seen; comparing is `checks`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_fold.params import local_tensor
from lightning_fold.strategy import FoldedMoEStrategy
from lightning_fold.verify.harness import be_quiet, build_trainer, mapping_options, microbatch_of
from lightning_fold.verify.mutations import injected
from lightning_fold.verify.plan import Case
from lightning_fold.verify.product.batches import Batches, batches_of
from lightning_fold.verify.product.plain import MOMENTUM, STEPS, Scale
from lightning_fold.verify.product.record import Tap
from lightning_fold.verify.product.subject import DEFAULT, Subject, build
from lightning_fold.verify.worker import leave_groups

CHECKPOINT = "saved.ckpt"


@dataclass(frozen=True)
class MappingCase(Case):
    """One mapping of the subject.

    Attributes:
        subject: The model.
        scale: From the plain loop.
        options: Arguments of the strategy beside its degrees.
        trains: Whether it trains and saves; otherwise it only resumes.
        resumes: Key of the case whose checkpoint it resumes; empty for none.
        sharded: Whether its checkpoint is a folder.
    """

    subject: Subject = DEFAULT
    scale: Scale | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    trains: bool = True
    resumes: str = ""
    sharded: bool = True

    @property
    def key(self) -> str:
        """Name of its folder."""
        return self.mapping if self.trains else f"{self.mapping}.resume"


def run_mapping(case: Case, folder: Path) -> None:
    """Run one mapping and write `rank<r>.pt` into `folder`. Collective over all ranks.

    A mapping that set-up refuses is recorded with its reason: every rank refuses alike.
    """
    assert isinstance(case, MappingCase), case
    be_quiet()
    with injected(case.mutation):
        record = _Run(case, folder).record()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.save(record, folder / f"rank{rank}.pt")
    leave_groups()


def strategy_for(case: MappingCase) -> FoldedMoEStrategy:
    """The strategy of a mapping; dp and edp follow from the world.

    Raises:
        ValueError: The config refuses it.
    """
    own = {"save_distributed_checkpoint": case.sharded, **mapping_options(case)}
    return FoldedMoEStrategy(**{**case.options, **own})


class SubBatches(pl.LightningDataModule):
    """One step an epoch: a sub-batch for each dp rank, dealt by the strategy's sampler arguments.

    The epoch is the step, so a checkpoint of an epoch's end is resumed by any degree of dp.
    """

    def __init__(self, batches: Batches, dp: int) -> None:
        super().__init__()
        self.batches = batches
        self.dp = dp

    def train_dataloader(self) -> DataLoader[Any]:
        """The sub-batches of the epoch that comes."""
        trainer = self.trainer
        assert trainer is not None
        step = trainer.current_epoch
        data: Any = [self.batches(step, rank, self.dp) for rank in range(self.dp)]
        kwargs: Any = trainer.distributed_sampler_kwargs
        sampler: Any = DistributedSampler(data, shuffle=False, **kwargs)
        return DataLoader(data, batch_size=1, sampler=sampler, collate_fn=lambda items: items[0])


class Recorder(pl.Callback):
    """What a rank sees of the training.

    Attributes:
        tap: Routing, logits and auxiliary losses.
        losses: By step and dp rank.
        norms: That clipping measured, by step.
        grads: Whole gradients of the first step, in this rank's view.
        has_started: Whether set-up is over.
    """

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank
        self.tap = Tap(at=(0, dp_rank))
        self.losses: dict[tuple[int, int], Tensor] = {}
        self.norms: list[float] = []
        self.grads: dict[str, Tensor] | None = None
        self.has_started = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on an error is no refusal."""
        if not self.has_started:
            strategy = _strategy(trainer)
            folded = strategy._model_or_raise()
            self.tap.microbatch = lambda: microbatch_of(strategy)
            self.tap.install(pl_module, folded.parts, folded.tokens)
        self.has_started = True

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Name the step for what is seen next."""
        self.tap.at = (trainer.current_epoch, self.dp_rank)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Gather on every rank: copies that differ tell which sum is missing. Before clipping."""
        if self.grads is None:
            canonical = _strategy(trainer)._checkpoints.canonical
            own = {
                name: canonical.to_user(name, param.grad).clone()
                for name, param in pl_module.named_parameters()
                if param.grad is not None
            }
            self.grads = _of_all_stages(_strategy(trainer), own)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Note the loss and the norm."""
        self.losses[self.tap.at] = outputs["loss"].detach().clone()
        norm = _strategy(trainer).grad_norm
        assert norm is not None
        self.norms.append(float(norm))


class _Run:
    """One case on this rank."""

    def __init__(self, case: MappingCase, folder: Path) -> None:
        self.case = case
        self.folder = folder
        built = build(case.subject)
        self.module = built.module
        assert case.scale is not None
        _set_optimizer(self.module, case.scale)
        self.data = SubBatches(batches_of(built, case.batch), case.folding.dp)
        self.strategy = strategy_for(case)

    def record(self) -> dict[str, Any]:
        """Everything that this rank has seen, or why set-up refused."""
        self.recorder = Recorder(0)
        self.trainer = build_trainer(
            self.case,
            self.strategy,
            max_epochs=STEPS,
            limit_val_batches=0,
            reload_dataloaders_every_n_epochs=1,
            callbacks=[self.recorder],
        )
        coordinates = self.case.folding.coordinates(self.strategy.global_rank)
        self.recorder.dp_rank = coordinates["dp"]
        self.record_: dict[str, Any] = {"coordinates": coordinates}
        try:
            if self.case.trains:
                self._train()
            if self.case.resumes:
                self._resume()
        except ValueError as error:
            if self.recorder.has_started:
                raise
            return {"refusal": str(error)}
        return self.record_

    def _train(self) -> None:
        self.trainer.fit(self.module, datamodule=self.data)
        self.record_ |= {
            "seen": list(self.recorder.tap.seen),
            "losses": self.recorder.losses,
            "norms": self.recorder.norms[:STEPS],
            "grads": self.recorder.grads,
            "weights": self._weights(),
            "families": _of_all_stages(
                self.strategy, {n: family.value for n, family in self.strategy.families.items()}
            ),
        }
        self.trainer.save_checkpoint(self.folder / CHECKPOINT)
        # Equal weights would hide a checkpoint that is not loaded.
        with torch.no_grad():
            for param in self.module.parameters():
                local_tensor(param.data).add_(1.0)

    def _resume(self) -> None:
        path = self.folder.parent / self.case.resumes / CHECKPOINT
        self.trainer.fit_loop.max_epochs = STEPS + 1
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=str(path))
        assert self.trainer.global_step == STEPS + 1, self.trainer.global_step
        self.record_["resumed"] = self._weights()

    def _weights(self) -> dict[str, Tensor]:
        """Whole weights, on rank 0 alone."""
        return self.strategy.consolidate(dict(self.module.named_parameters()))


def _set_optimizer(module: Any, scale: Scale) -> None:
    """Plain SGD, as in the plain loop: Adam would hide a wrong scale; the first step unclipped."""

    def configure_optimizers(module: pl.LightningModule) -> torch.optim.Optimizer:
        trained = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=scale.learning_rate, momentum=MOMENTUM)

    def configure_gradient_clipping(
        module: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        limit = scale.clip if module.current_epoch > 0 else float("inf")
        module.clip_gradients(optimizer, limit, gradient_clip_algorithm="norm")

    module.configure_optimizers = MethodType(configure_optimizers, module)
    module.configure_gradient_clipping = MethodType(configure_gradient_clipping, module)


def _of_all_stages(strategy: FoldedMoEStrategy, own: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name of all stages; of what two of them hold, the own. Collective over pp."""
    if strategy.folding.pp == 1:
        return dict(own)
    parts: list[Any] = [None] * strategy.folding.pp
    dist.all_gather_object(parts, dict(own), group=strategy.meshes.group("pp"))
    return {name: value for part in (*parts, own) for name, value in part.items()}


def _strategy(trainer: pl.Trainer) -> FoldedMoEStrategy:
    strategy = trainer.strategy
    assert isinstance(strategy, FoldedMoEStrategy)
    return strategy
