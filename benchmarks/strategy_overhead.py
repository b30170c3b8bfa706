"""Step time of FoldedMoEStrategy over Lightning's own strategies, on the demo's model.

    python benchmarks/strategy_overhead.py [--rounds 9] [--steps 8] [--ranks 1 2]

One rank: FoldedMoEStrategy() over SingleDeviceStrategy. Two ranks: FoldedMoEStrategy() (ep = 1)
over DDPStrategy. Both run in the same processes, in rounds that alternate, so that they meet the
same machine; a round's figure is its median step, and a ratio compares the two medians of one
round. Prints the median of the ratios with their quartiles and extremes, and a line of JSON. The
aims of issue 2: at most 1.05 and 1.10.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
RECIPE = REPOSITORY / "recipes" / "demo.tp2cp1dp2pp1-etp1ep4edp1.yaml"


def main() -> None:
    """Start one measurement per number of ranks and print its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments.rounds, arguments.steps)
        return
    for ranks in arguments.ranks:
        launch(ranks, ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)])


def launch(ranks: int, options: list[str], script: str = __file__) -> None:
    """Run a script on `ranks` processes, one thread each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "benchmark",
        "OMP_NUM_THREADS": 1,
    }
    processes = []
    for rank in range(ranks):
        environment = os.environ | {k: str(v) for k, v in shared.items()}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, script, *options]
        processes.append(subprocess.Popen(command, env=environment))
    if any(process.wait() for process in processes):
        raise SystemExit("a rank failed")


def measure(rounds: int, steps: int) -> None:
    """Time both strategies in alternating rounds; rank 0 prints."""
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from lightning_fold import FoldedMoEStrategy

    world = int(os.environ["WORLD_SIZE"])
    peer = DDPStrategy() if world > 1 else SingleDeviceStrategy()
    names = (type(peer).__name__, "FoldedMoEStrategy")
    runs = [Run(peer, world, steps), Run(FoldedMoEStrategy(), world, steps)]
    for run in runs:
        run.round()
    ratios = []
    for index in range(rounds):
        # The order alternates too: whatever one run leaves in caches favours neither.
        order = runs if index % 2 else runs[::-1]
        medians = {id(run): run.round() for run in order}
        ratios.append(medians[id(runs[1])] / medians[id(runs[0])])
    if os.environ["RANK"] == "0":
        report(names, world, ratios, runs)


class Run:
    """One strategy with its own copy of the model."""

    def __init__(self, strategy: Any, world: int, steps: int) -> None:
        self.strategy, self.world, self.steps = strategy, world, steps
        self.module, self.data = build()
        self.trainer: Any = None
        self.medians: list[float] = []

    def round(self) -> float:
        """Train for some steps and return the median seconds of one."""
        clock = step_clock()
        if self.trainer is None:
            self.trainer = quiet_trainer(self.strategy, self.world, max_steps=0)
        self.trainer.callbacks = [clock]
        self.trainer.fit_loop.epoch_loop.max_steps += self.steps + 2
        self.trainer.fit(self.module, self.data)
        # The first two steps of a fit pay for its set-up.
        self.medians.append(statistics.median(clock.seconds[2:]))
        return self.medians[-1]


def quiet_trainer(strategy: Any, world: int, **options: Any) -> Any:
    """A Trainer on CPU that does nothing but train."""
    from lightning.pytorch import Trainer

    return Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def step_clock() -> Any:
    """A callback that times whole training steps."""
    from lightning.pytorch import Callback

    class StepClock(Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.start = 0.0

        def on_train_batch_start(self, *_: Any) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    return StepClock()


def build() -> tuple[Any, Any]:
    """The demo's module and data, from its recipe."""
    import torch
    import yaml

    from lightning_fold.data import TextDataModule
    from lightning_fold.model.decoder import DecoderConfig
    from lightning_fold.module import FoldedLitModule

    torch.manual_seed(1)
    recipe = yaml.safe_load(RECIPE.read_text())
    arguments = recipe["model"]["init_args"]
    config = DecoderConfig(**arguments.pop("config"))
    data = TextDataModule(**recipe["data"]["init_args"])
    return FoldedLitModule(config=config, **arguments), data


def report(names: tuple[str, str], world: int, ratios: list[float], runs: list[Run]) -> None:
    """Print the ratios and what they were measured on."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    seconds = [statistics.median(run.medians[1:]) for run in runs]
    print(
        f"{world} rank(s): {names[1]} / {names[0]} = {middle:.3f} "
        f"(quartiles {low:.3f} {high:.3f}, extremes {min(ratios):.3f} {max(ratios):.3f}, "
        f"{len(ratios)} rounds; {seconds[1] * 1e3:.1f} / {seconds[0] * 1e3:.1f} ms a step)"
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, 1 thread a rank"
    print("json:", json.dumps({"ranks": world, "ratio": middle, "ratios": ratios, "on": machine}))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
