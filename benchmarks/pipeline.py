"""Woven over plain pipeline schedules on loopback: what `pipeline_overlap` costs and gains on CPUs.

    python benchmarks/pipeline.py [--rounds 5] [--steps 4] [--quick]

Four ranks, tp1cp1dp2pp2-etp1ep2edp1, the demo's text and nearly its model. Plain and woven run in
the same processes, in rounds that alternate, so that they meet the same machine; a round's figure
is its median step, and a ratio compares the two medians of one round. Prints the median of the
ratios with their extremes for each schedule, and a line of JSON. Ranks that share cores have no
idle time to put exchanges into: `benchmarks/cluster` shows what weaving hides, this shows what it
costs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import warnings
from dataclasses import fields
from typing import Any

from strategy_overhead import RECIPE, Run, launch

RANKS = 4
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "dualpipev": 2}
MICROBATCHES = 8


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 2 steps")
    arguments = parser.parse_args()
    rounds, steps = (2, 2) if arguments.quick else (arguments.rounds, arguments.steps)
    if "RANK" in os.environ:
        measure(rounds, steps)
        return
    launch(RANKS, ["--rounds", str(rounds), "--steps", str(steps)], __file__)


def measure(rounds: int, steps: int) -> None:
    """Time every schedule, plain and woven; rank 0 prints."""
    from lightning_fold.config import FoldedConfig

    if "pipeline_overlap" not in {field.name for field in fields(FoldedConfig)}:
        raise SystemExit("this version of lightning_fold has no `pipeline_overlap`")
    for schedule in SCHEDULES:
        plain, woven = (run_of(schedule, steps, overlap=overlap) for overlap in (False, True))
        plain.round()
        woven.round()
        ratios = []
        for index in range(rounds):
            # The order alternates too: whatever one run leaves in caches favours neither.
            order = (plain, woven) if index % 2 else (woven, plain)
            medians = {id(run): run.round() for run in order}
            ratios.append(medians[id(plain)] / medians[id(woven)])
        if os.environ["RANK"] == "0":
            report(schedule, ratios, [statistics.median(run.medians[1:]) for run in (plain, woven)])


def run_of(schedule: str, steps: int, *, overlap: bool) -> Run:
    """One schedule with its own copy of the model."""
    from lightning_fold import FoldedMoEStrategy

    strategy = FoldedMoEStrategy(
        pipeline_parallel_size=2,
        expert_parallel_size=2,
        pipeline_schedule=schedule,
        virtual_pipeline_size=SCHEDULES[schedule],
        num_microbatches=MICROBATCHES,
        pipeline_overlap=overlap,
    )
    run = Run(strategy, RANKS, steps)
    run.module = module()
    return run


def module() -> Any:
    """The demo's model with as many layers as `dualpipev` has stages, all of them MoE."""
    import torch
    import yaml

    from lightning_fold.model.decoder import DecoderConfig
    from lightning_fold.module import FoldedLitModule

    torch.manual_seed(1)
    arguments = yaml.safe_load(RECIPE.read_text())["model"]["init_args"]
    sizes = arguments.pop("config") | {"num_hidden_layers": 4, "mlp_only_layers": ()}
    return FoldedLitModule(config=DecoderConfig(**sizes), **arguments)


def report(schedule: str, ratios: list[float], seconds: list[float]) -> None:
    """Print the ratios of one schedule."""
    plain, woven = (second * 1e3 for second in seconds)
    print(
        f"{schedule}: woven is {statistics.median(ratios):.3f} times as fast as plain "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds; {woven:.1f} / "
        f"{plain:.1f} ms a step)"
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, 1 thread a rank"
    print("json:", json.dumps({"schedule": schedule, "ratios": ratios, "on": machine}), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
