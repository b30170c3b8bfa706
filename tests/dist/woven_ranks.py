"""What the ranks of `test_woven` run: a small decoder for some steps, woven or not, watched.

A case's `model` says what is odd about the run: `plain`; `late`, where ranks dawdle at random;
`starved`, where all tokens choose experts of one ep rank; `dropout`; `many` and `many-late`, which
are long.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rank_records import write_record
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_fold.model.decoder import Decoder, DecoderConfig
from lightning_fold.strategy import FoldedMoEStrategy
from lightning_fold.telemetry import Flight
from lightning_fold.topology.comm import Comm, Pending
from lightning_fold.verify.harness import build_strategy, build_trainer
from lightning_fold.verify.plan import Case

LENGTH, VOCABULARY = 12, 64
MANY_ROWS, MANY_STEPS = 100, 34


class Watch:
    """Launches and landings of rows on this rank, in order, and the action that each is of."""

    def __init__(self, strategy: FoldedMoEStrategy, *, dawdles: bool) -> None:
        self.strategy = strategy
        self.launches: list[list[Any]] = []
        self.flights: list[list[Any]] = []
        self.most_passes = 0
        self._flying: list[tuple[Any, ...]] = []
        self._start, self._wait = Comm._all_to_all, Pending.wait
        self._late = random.Random(strategy.global_rank) if dawdles else None

    def install(self) -> None:
        """Wrap what launches and waits, in this process."""
        watch = self

        def start(comm: Comm, *args: Any, axis: str, tells: bool = False, **kwargs: Any) -> Pending:
            watch._dawdle()
            if not tells:
                watch.launches.append([axis, *watch._now()])
            pending = watch._start(comm, *args, axis=axis, tells=tells, **kwargs)
            if not tells:
                pending.of = watch._now()  # type: ignore[attr-defined]
                watch._flying.append(pending.of)  # type: ignore[attr-defined]
                watch.most_passes = max(watch.most_passes, len(set(watch._flying)))
            return pending

        def wait(pending: Pending) -> Tensor:
            watch._dawdle()
            out = watch._wait(pending)
            if hasattr(pending, "of"):
                watch._flying.remove(pending.of)
            return out

        Comm._all_to_all, Pending.wait = start, wait  # type: ignore[method-assign,assignment]
        self.strategy.telemetry.subscribe(Flight, self._landed)

    def remove(self) -> None:
        """Unwrap."""
        Comm._all_to_all, Pending.wait = self._start, self._wait  # type: ignore[method-assign]

    def _dawdle(self) -> None:
        if self._late is not None and self._late.random() < 0.2:
            time.sleep(self._late.random() * 8e-3)

    def _landed(self, flight: Flight) -> None:
        stage, m, _ = self._now()
        ready = time.perf_counter() - flight.waited_s
        self.flights.append([stage, m, flight.issued_s, ready])

    def _now(self) -> tuple[Any, ...]:
        action = self.strategy.pipeline.executor.action  # type: ignore[union-attr]
        kind = "F" if action.computation_type.value == "F" else "B"
        return action.stage_index, action.microbatch_index, kind


class Subject(pl.LightningModule):
    """An ordinary module."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.dp = case.folding.dp
        self.rows, self.steps = case.num_microbatches or 1, steps_of(case)
        torch.manual_seed(11)
        self.model = Decoder(
            DecoderConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=4,
                intermediate_size=24,
                moe_intermediate_size=12,
                num_experts=8,
                num_experts_per_tok=2,
                shared_expert_intermediate_size=8,
                hidden_dropout=0.2 if case.model == "dropout" else 0.0,
                initializer_range=0.2,
            )
        )
        if case.model == "starved":
            for layer in self.model.model.layers:
                if hasattr(layer.mlp, "gate"):
                    # Equal logits: the first experts win every tie.
                    torch.nn.init.zeros_(layer.mlp.gate.weight)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's loss."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        """A batch a step for each dp rank, of a row for each microbatch."""
        generator = torch.Generator().manual_seed(5)
        size = (self.steps * self.dp, self.rows, LENGTH)
        ids = torch.randint(VOCABULARY, size, generator=generator)
        data: Any = [{"input_ids": rows, "labels": rows} for rows in ids]
        kwargs = self.trainer.distributed_sampler_kwargs
        sampler: Any = DistributedSampler(data, shuffle=False, **(kwargs or {}))
        return DataLoader(data, batch_size=1, sampler=sampler, collate_fn=lambda items: items[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def steps_of(case: Case) -> int:
    """Optimizer steps of a run."""
    return MANY_STEPS if case.model.startswith("many") else 2


class Stamped(pl.Callback):
    """Switches the executor's stamps on, and counts the time from where the flights do."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From the first step on."""
        trainer.strategy.pipeline.executor.stamps.on = True  # type: ignore[attr-defined]


def run_woven(case: Case, folder: Path) -> None:
    """Train and record. Collective."""
    strategy = build_strategy(case, sentinel_every=1)
    trainer = build_trainer(case, strategy, max_steps=steps_of(case), callbacks=[Stamped()])
    module = Subject(case)
    watch = Watch(strategy, dawdles="late" in case.model)
    watch.install()
    try:
        trainer.fit(module)
    finally:
        watch.remove()
    pipeline = strategy.pipeline
    assert pipeline is not None
    stamps = pipeline.executor.stamps
    weights = strategy.consolidate(dict(module.named_parameters()))
    record = {
        "coordinates": strategy.folding.coordinates(strategy.global_rank),
        "woven": [] if pipeline.weaving is None else sorted(pipeline.weaving.stages),
        "reasons": {} if pipeline.weaving is None else dict(pipeline.weaving.reasons),
        "launches": [] if case.model.startswith("many") else watch.launches,
        "num_launches": len(watch.launches),
        "most_passes": watch.most_passes,
        "computed": [
            [a.stage_index, a.microbatch_index, start + stamps.origin_s, end + stamps.origin_s]
            for a, start, end in stamps.readings()
        ],
        "flights": [] if case.model.startswith("many") else watch.flights,
        "weights": {name: weight.flatten().tolist() for name, weight in weights.items()},
        "peak_live": pipeline.executor.peak_live,
    }
    write_record(folder, record)
