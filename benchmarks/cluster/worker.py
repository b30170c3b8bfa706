"""One rank of the emulated cluster: trains each case under Lightning and tells what it saw.

`launch` starts it, and tells it the world as torchrun would.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, Dataset

from benchmarks.cluster import cases, emulate, measure
from benchmarks.cluster.launch import Placement
from benchmarks.cluster.no_exchange import without_exchanges
from benchmarks.cluster.proportions import Proportions
from lightning_fold import FoldedMoEStrategy
from lightning_fold.callbacks.timeline import PipelineTimeline
from lightning_fold.model.decoder import DecoderConfig
from lightning_fold.module import FoldedLitModule
from lightning_fold.pipeline.simulate import Costs, simulate

WARM_UP = 1


def run_cases(folder: Path, placement: str, names: Sequence[str]) -> dict[str, Any]:
    """Run cases one after the other; what each has found out, by name."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    listed = {case.name: case for case in cases.cases_of(placement)}
    dist.init_process_group("gloo")
    results: dict[str, Any] = {"links": link_speeds(cases.PLACEMENTS[placement])}
    for name in names:
        results[name] = run(listed[name], folder)
        print(f"{name}: {results[name]['seconds']}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return results


def run(case: cases.Case, folder: Path) -> dict[str, Any]:
    """Train one case; collective over all ranks.

    Returns:
        Seconds of each measured step, exchanges of these, what was slept in the last one, and of
        a pipeline its timelines.
    """
    sleeper, exchanges = emulate.Sleeper(counts_rest=case.has_stages), list[measure.Exchange]()
    costs = Proportions().costs(cases.SLOWDOWN)
    module = build(case)
    emulate.slow_attention(module, sleeper, costs.attend)
    clock = StepClock(sleeper)
    timeline = PipelineTimeline(WARM_UP + case.steps - 1, folder / case.name)
    strategy = FoldedMoEStrategy(**case.strategy)
    trainer = Trainer(
        accelerator="cpu",
        devices=cases.PER_NODE,
        num_nodes=cases.WORLD // cases.PER_NODE,
        strategy=strategy,
        max_steps=WARM_UP + case.steps,
        callbacks=[clock, *([timeline] if case.has_stages else [])],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with ExitStack() as stack:
        stack.enter_context(emulate.slow_experts(sleeper, costs.experts, cases.WIDTH))
        stack.enter_context(emulate.waits_told(sleeper))
        stack.enter_context(nullcontext() if case.exchanges else without_exchanges())
        if case.exchanges:
            is_woven = stack.enter_context(measure.pairs_noted())
            stack.enter_context(measure.watched(exchanges, is_woven=is_woven))
        trainer.fit(module, DataLoader(Tokens(case), batch_size=case.rows))
    steps = clock.steps[WARM_UP:]
    return {
        "mapping": strategy.folding.mapping_id,
        "seconds": [end - start for start, end in steps],
        "cpu_s": sum(clock.cpu_s[WARM_UP:]) / case.steps,
        "last": steps[-1],
        "exchanges": [x for step in steps for x in measure.within(exchanges, step)],
        "slept": [asdict(piece) for piece in sleeper.slept if piece.start_s >= steps[-1][0]],
        "timelines": timelines_of(case, strategy, timeline),
    }


def link_speeds(placement: Placement) -> dict[str, float]:
    """Megabytes a second from one rank to another, inside a node and across; on rank 0.

    Collective over all ranks. Both ways are of Gloo on the wire's address, which the kernel takes
    over loopback where it is the sender's own.
    """
    first = [rank for rank, node in enumerate(placement.table) if node == 0]
    speeds = {}
    for name, pair in {"inside": first[:2], "across": [0, placement.table.index(1)]}.items():
        dist.barrier()
        if dist.get_rank() in pair:
            speeds[name] = _speed(pair[0] if dist.get_rank() == pair[1] else pair[1])
    dist.barrier()
    return speeds


def _speed(peer: int) -> float:
    own = torch.zeros(64_000)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        ops = dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, own.clone(), peer)
        for work in dist.batch_isend_irecv(list(ops)):
            work.wait()
        times.append(time.perf_counter() - start)
    # The first one connects.
    return own.nbytes / statistics.median(times[1:]) / 1e6


def timelines_of(
    case: cases.Case, strategy: FoldedMoEStrategy, timeline: PipelineTimeline
) -> dict[str, Any]:
    """Makespan and bubble of the last step: executed, and simulated with what actions took.

    `slept` is simulated with what was slept alone. Empty on ranks that have no timelines.
    """
    if not timeline.timelines or strategy.pipeline is None or strategy.pipeline.plan is None:
        return {}
    plan, measured = strategy.pipeline.plan, timeline.timelines["measured"]
    proportions = Proportions()
    costs = proportions.costs(cases.SLOWDOWN)
    rates = proportions.rates(cases.SLOWDOWN, hidden=cases.HIDDEN, per_node=cases.PER_NODE)
    tokens = case.rows * case.length / plan.num_microbatches
    hop = tokens * cases.HIDDEN * 4 * 8e-6 / rates.link
    layer = tokens * (costs.attend + cases.TOP_K * costs.experts)
    slot = layer * case.layers / plan.num_stages
    found = {
        "measured": measured,
        "predicted": simulate(plan, Costs.measured(measured, hop=hop)),
        "slept": simulate(plan, Costs(slot, slot, slot, hop)),
    }
    figures = {
        name: {"makespan": one.makespan, "bubble": one.bubble} for name, one in found.items()
    }
    return {"slot_s": slot, **figures}


def build(case: cases.Case) -> FoldedLitModule:
    """The built-in decoder, small."""
    torch.manual_seed(1)
    config = DecoderConfig(
        hidden_size=cases.HIDDEN,
        num_hidden_layers=case.layers,
        num_attention_heads=cases.HEADS,
        num_key_value_heads=cases.HEADS,
        num_experts=cases.EXPERTS,
        num_experts_per_tok=cases.TOP_K,
        moe_intermediate_size=cases.WIDTH,
    )
    return FoldedLitModule(config=config)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, enough for all steps; the same on every rank."""

    def __init__(self, case: cases.Case) -> None:
        rows = case.rows * case.folding.dp * (WARM_UP + case.steps)
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(0, 256, (rows, case.length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class StepClock(Callback):
    """Start and end of every training step, and what it took of a core."""

    def __init__(self, sleeper: emulate.Sleeper) -> None:
        self.sleeper = sleeper
        self.steps: list[list[float]] = []
        self.cpu_s: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Start, on all ranks together."""
        trainer.strategy.barrier()
        self.sleeper.start()
        self.steps.append([time.perf_counter()])
        self.cpu_s.append(-time.process_time())

    def on_train_batch_end(self, *_: Any) -> None:
        """End."""
        self.steps[-1].append(time.perf_counter())
        self.cpu_s[-1] += time.process_time()
