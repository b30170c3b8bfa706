"""Time that the sentinel takes of training, on the demo's model.

    python benchmarks/sentinel_cost.py [--every 100] [--intervals 2] [--ranks 2]

Trains the demo's model under TP2 x EP2 (two ranks) and prints, for each interval between two
checks, the host time spent in the sentinel over the time of the interval. The first check, which
also pays for first calls, is told apart. The aim of issue 4: below 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from typing import Any

from strategy_overhead import build, launch, quiet_trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--intervals", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments)
        return
    options = ["--every", str(arguments.every), "--intervals", str(arguments.intervals)]
    launch(arguments.ranks, options, __file__)


def measure(arguments: argparse.Namespace) -> None:
    """Train; rank 0 prints the share of each interval."""
    from lightning_fold import FoldedMoEStrategy

    world = int(os.environ["WORLD_SIZE"])
    strategy = FoldedMoEStrategy(
        tensor_parallel_size=world, expert_parallel_size=world, sentinel_every=arguments.every
    )
    clock = interval_clock(strategy, arguments.every)
    module, data = build()
    steps = arguments.every * arguments.intervals + 1
    trainer = quiet_trainer(strategy, world, max_steps=steps, callbacks=[clock])
    trainer.fit(module, data)
    if os.environ["RANK"] == "0":
        report(clock, strategy.folding.mapping_id)


def interval_clock(strategy: Any, every: int) -> Any:
    """A callback that notes time and the sentinel's share after each check."""
    from lightning.pytorch import Callback

    class IntervalClock(Callback):
        def __init__(self) -> None:
            self.marks: list[tuple[float, float]] = []

        def on_train_start(self, *_: Any) -> None:
            self.marks.append((time.perf_counter(), 0.0))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if (trainer.global_step - 1) % every == 0:
                self.marks.append((time.perf_counter(), strategy.sentinel.seconds))

    return IntervalClock()


def report(clock: Any, mapping: str) -> None:
    """Print the shares and what they were measured on."""
    rows = []
    for (start, before), (end, after) in zip(clock.marks, clock.marks[1:], strict=False):
        rows.append({"check_s": after - before, "interval_s": end - start})
    first, *later = rows
    print(f"first check: {first['check_s'] * 1e3:.1f} ms, in a first step that builds everything")
    for row in later:
        share = row["check_s"] / row["interval_s"]
        print(
            f"interval of {row['interval_s']:.1f} s: {row['check_s'] * 1e3:.1f} ms in the "
            f"sentinel, {share:.2%} (aim below 1 %)"
        )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, 1 thread a rank"
    print("json:", json.dumps({"mapping": mapping, "rows": rows, "on": machine}))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
