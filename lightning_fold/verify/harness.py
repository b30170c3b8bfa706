"""One case through a real Trainer, on every rank: an ordinary LightningModule and what it records.

Owns the LightningModule and the recording callback. Knows no reference and no tolerance. Every rank
saves its own routing decisions, losses and logits; rank 0 also whole gradients and weights. What a
pipeline computes by microbatches is saved by batches.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_fold.model import decoder
from lightning_fold.moe.tokens import in_backward
from lightning_fold.strategy import FoldedMoEStrategy
from lightning_fold.topology.doctor import DEGREE_FIELDS
from lightning_fold.verify import cases
from lightning_fold.verify.features import FEATURES
from lightning_fold.verify.plan import Case


class BatchTap(cases.RoutingTap):
    """Routing decisions of whole batches, whose microbatches each stage runs in its own order.

    Args:
        model: Its routers are watched.
        strategy: Tells what runs.

    Attributes:
        batch: Number of the batch that runs.
        places: By batch, place in its sequence of each token that the MoE layers saw.
    """

    def __init__(self, model: nn.Module, strategy: Callable[[], FoldedMoEStrategy]) -> None:
        super().__init__(model)
        self.strategy = strategy
        self.batch = 0
        self.places: dict[int, Tensor] = {}
        self._parts: defaultdict[int, list[tuple[int, int, Tensor]]] = defaultdict(list)

    def note(self, layer: int, index_TK: Tensor) -> None:
        """Keep one decision, with the microbatch that it is of."""
        strategy = self.strategy()
        assert strategy.tokens.moe is not None
        if in_backward():
            return
        self.places[self.batch] = strategy.tokens.moe.places_s
        self._parts[layer].append((self.batch, microbatch_of(strategy), index_TK))

    def of_batches(self) -> list[list[Tensor]]:
        """By layer, the decisions [T, K] of every batch; none for a layer of another stage."""
        found = []
        for layer in range(len(self.decisions)):
            batches: defaultdict[int, list[Tensor]] = defaultdict(list)
            for batch, _, index_TK in sorted(self._parts[layer], key=lambda part: part[:2]):
                batches[batch].append(index_TK)
            found.append([torch.cat(parts) for parts in batches.values()])
        return found


def microbatch_of(strategy: FoldedMoEStrategy) -> int:
    """Which microbatch runs; 0 without a pipeline."""
    if strategy.pipeline is None:
        return 0
    action = strategy.pipeline.executor.action
    assert action is not None, "the model runs outside of a schedule"
    assert action.microbatch_index is not None, action
    return int(action.microbatch_index)


class CaseModule(pl.LightningModule):
    """What any user writes: a model, a step, an optimizer, a loader.

    Attributes:
        tap: Routing decisions of this rank.
        logits: By batch, logits of this cp rank's places; one tensor for each microbatch.
        logit_places: By batch, places of `logits`.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.dp = case.folding.dp
        self.model = cases.build_model(case.model, decoder=decoder)
        self.tap = BatchTap(self.model, lambda: _strategy(self.trainer))
        self.logits: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.logit_places: dict[int, Tensor] = {}
        self.batch = case.batch

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of the model; in a pipeline, one microbatch's."""
        self.tap.batch = batch_idx
        out = self.model(**batch)
        self.log("loss", out.loss)
        self.logits[batch_idx].append(out.logits.detach().clone())
        tokens = _strategy(self.trainer).tokens
        assert tokens.attention is not None
        self.logit_places[batch_idx] = tokens.attention.places_s
        loss: Tensor = out.loss
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        """Sub-batches step by step, dealt by the strategy's sampler arguments.

        The sampler is explicit because Lightning's own one shuffles while fitting.
        """
        steps = range(cases.STEPS * cases.ACCUMULATE)
        ranks = range(self.dp)
        data: Any = [cases.sub_batch(i, rank, self.batch) for i in steps for rank in ranks]
        kwargs = self.trainer.distributed_sampler_kwargs
        assert kwargs is not None
        sampler: Any = DistributedSampler(data, shuffle=False, **kwargs)
        return DataLoader(data, batch_size=1, sampler=sampler, collate_fn=lambda items: items[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: Adam would hide a wrong scale."""
        return torch.optim.SGD(self.parameters(), lr=cases.LEARNING_RATE)


class Recorder(pl.Callback):
    """Whole gradients of the first step before clipping, norm of every step, loss of every batch.

    Attributes:
        grads: By name, on rank 0; empty on the others.
        losses: What the Trainer hands to callbacks, which a pipeline gives to every rank.
        norms: Norms that clipping measured.
        has_started: Whether set-up is over.
    """

    def __init__(self) -> None:
        self.grads: dict[str, Tensor] | None = None
        self.norms: list[float] = []
        self.losses: list[Tensor] = []
        self.has_started = False

    def on_train_start(self, *args: Any) -> None:
        """From here on an error is no refusal."""
        self.has_started = True

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Gather; Lightning clips after this hook."""
        if self.grads is None:
            named = {n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None}
            self.grads = _strategy(trainer).consolidate(named)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Note the loss, and the norm when a step has been made."""
        # Lightning has divided it, by a power of two.
        self.losses.append(outputs["loss"].double() * trainer.accumulate_grad_batches)
        norm = _strategy(trainer).grad_norm
        if norm is not None and trainer.global_step > len(self.norms):
            self.norms.append(float(norm))


def run_case(case: Case, folder: Path) -> None:
    """Train under the case's mapping and write `rank<r>.pt` into `folder`. Collective.

    A mapping that set-up refuses is recorded with its reason: every rank refuses alike.
    """
    be_quiet()
    module, recorder = CaseModule(case), Recorder()
    strategy = build_strategy(case)
    trainer = build_trainer(
        case,
        strategy,
        max_steps=cases.STEPS,
        accumulate_grad_batches=cases.ACCUMULATE,
        gradient_clip_val=cases.CLIP if case.clip else None,
        callbacks=[recorder],
    )
    try:
        trainer.fit(module)
    except ValueError as error:
        if recorder.has_started:
            raise
        record: dict[str, Any] = {"refusal": str(error)}
    else:
        record = _record(strategy, module, recorder)
    torch.save(record, folder / f"rank{strategy.global_rank}.pt")


def build_strategy(case: Case, *, sharded: bool = False, **options: Any) -> FoldedMoEStrategy:
    """The strategy as a user configures it; dp and edp follow from the world.

    Args:
        case: Its mapping.
        sharded: Whether checkpoints are folders.
        options: Further arguments of the strategy.
    """
    return FoldedMoEStrategy(
        context_parallel_method=case.context_parallel_method,
        data_parallel_shard=case.shard,
        save_distributed_checkpoint=sharded,
        **mapping_options(case),
        **options,
    )


def mapping_options(case: Case) -> dict[str, Any]:
    """Arguments of the strategy for a case's mapping, pipeline and feature."""
    folding = case.folding
    options: dict[str, Any] = {name: folding.size(axis) for axis, name in DEGREE_FIELDS.items()}
    if folding.pp > 1:
        options |= {
            "pipeline_schedule": case.schedule,
            "virtual_pipeline_size": case.virtual_stages,
            "num_microbatches": case.num_microbatches,
            "pipeline_layout": case.layout,
            "pipeline_overlap": case.overlap,
        }
    return options | dict(FEATURES[case.feature].strategy)


def build_trainer(case: Case, strategy: FoldedMoEStrategy, **options: Any) -> pl.Trainer:
    """A quiet Trainer on CPU in the case's precision."""
    return pl.Trainer(
        accelerator="cpu",
        devices=case.folding.world,
        strategy=strategy,
        precision="64-true" if case.precision == "64" else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _record(strategy: FoldedMoEStrategy, module: CaseModule, recorder: Recorder) -> dict[str, Any]:
    return {
        "coordinates": strategy.folding.coordinates(strategy.global_rank),
        "routing": module.tap.of_batches(),
        "losses": recorder.losses,
        "logits": [torch.cat(parts) for _, parts in sorted(module.logits.items())],
        "places": [places for _, places in sorted(module.tap.places.items())],
        "logit_places": [places for _, places in sorted(module.logit_places.items())],
        "norms": recorder.norms,
        "grads": recorder.grads,
        "weights": strategy.consolidate(dict(module.named_parameters())),
        "buffers": {n: b.detach().clone() for n, b in cases.saved_buffers(module).items()},
        "families": {name: family.value for name, family in strategy.families.items()},
    }


def _strategy(trainer: pl.Trainer) -> FoldedMoEStrategy:
    strategy = trainer.strategy
    assert isinstance(strategy, FoldedMoEStrategy)
    return strategy


def be_quiet() -> None:
    """Drop Lightning's advice about loaders: the log of a rank is shown when it fails."""
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
