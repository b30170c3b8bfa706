"""Kill a random rank at random moments of a training run, saves included, and resume each time.

    python tests/end_to_end/kill_and_resume.py --kills 30

Two ranks train a tiny decoder on real text in fp64, saving every other step with rotation. Each
kill is SIGKILL, after a random number of steps or in the middle of a save; the other rank has to
end by itself; every checkpoint under a final name is loaded whole; then the run is resumed from
`last`. At the end losses and weights are compared, bit for bit, with a run that was never killed.
Prints one line of JSON; its exit status is 1 if anything was lost that should not have been.
"""

from __future__ import annotations

import argparse
import contextlib
import email
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fold import FoldedMoEStrategy
from lightning_fold.checkpoint.convert import convert
from lightning_fold.data import TextDataModule
from lightning_fold.model.decoder import Decoder, DecoderConfig

WORLD = 2
EVERY = 2
# Steps after the last kill, and the steps of a run that nobody stops in time.
TAIL, ENDLESS = 4, 1_000_000
START_S, END_S = 120.0, 30.0
# An epoch of some twenty steps, so that kills fall into several.
TEXTS = [str(Path(email.__file__).with_name(name)) for name in ("[a-h]*.py", "q*.py")]


@dataclass
class Report:
    """What the kills did.

    Attributes:
        kills: Ranks killed.
        in_saves: Kills that hit a rank inside a save.
        steps_lost: Steps made again after each kill.
        too_many_lost: Kills after which a whole checkpoint was not resumed from.
        checkpoints_loaded: Checkpoints loaded from disk after kills.
        corrupt: Those that could not be loaded.
        survivors_ended_s: Seconds that the other rank took to end.
        differing_losses: Losses, by rank and step, that an uninterrupted run does not have.
        steps: Length of the run.
    """

    kills: int = 0
    in_saves: int = 0
    steps_lost: list[int] = field(default_factory=list)
    too_many_lost: int = 0
    checkpoints_loaded: int = 0
    corrupt: list[str] = field(default_factory=list)
    survivors_ended_s: list[float] = field(default_factory=list)
    differing_losses: int = 0
    weights_equal: bool = False
    steps: int = 0
    seconds: float = 0.0

    def is_good(self) -> bool:
        whole = not self.too_many_lost and not self.corrupt and not self.differing_losses
        return whole and self.weights_equal

    def line(self) -> str:
        facts = vars(self) | {
            "steps_lost": sum(self.steps_lost),
            "most_steps_lost": max(self.steps_lost, default=0),
            "survivors_ended_s": round(max(self.survivors_ended_s, default=0.0), 1),
            "seconds": round(self.seconds, 1),
        }
        return json.dumps(facts)


class Learner(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder(
            DecoderConfig(
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                intermediate_size=16,
                num_experts=4,
                moe_intermediate_size=8,
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.loss = float(loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Diary(Callback):
    """Writes one line an event, which outlives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, event: str, step: int, **facts: Any) -> None:
        with self.path.open("a") as lines:
            lines.write(json.dumps({"event": event, "step": step} | facts) + "\n")

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.note("start", trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        self.note("trained", trainer.global_step, loss=module.loss.hex())


class Saving(ModelCheckpoint):
    """Notes where saves begin and end."""

    def __init__(self, diary: Diary, folder: Path) -> None:
        super().__init__(
            folder,
            filename="{step}",
            monitor="step",
            mode="max",
            save_top_k=2,
            save_last=True,
            every_n_train_steps=EVERY,
            save_on_train_epoch_end=False,
        )
        self.diary = diary

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.diary.note("saves", trainer.global_step)
        super()._save_checkpoint(trainer, filepath)
        self.diary.note("saved", trainer.global_step)


def train(folder: Path, diary: Path, *, rank: int, port: int, steps: int) -> None:
    """One rank, from the newest checkpoint in `folder`; never returns."""
    log = (folder / f"rank{rank}.log").open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = sys.stderr = log
    os.environ.update(
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    status = 1
    try:
        fit(folder, Diary(diary), rank=rank, steps=steps)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        log.flush()
        os._exit(status)


def fit(folder: Path, diary: Diary, *, rank: int, steps: int) -> None:
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    module = Learner()
    strategy = FoldedMoEStrategy(expert_parallel_size=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        precision="64-true",
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        callbacks=[diary, Saving(diary, folder / "checkpoints")],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TextDataModule(TEXTS, seq_len=63, batch_size=32)
    trainer.fit(module, data, ckpt_path="last")
    weights = strategy.consolidate(dict(module.named_parameters()))
    if rank == 0:
        torch.save(weights, folder / "weights.pt")


class Incarnation:
    """Two ranks from one start to one end."""

    def __init__(self, folder: Path, number: int, *, steps: int) -> None:
        folder.mkdir(exist_ok=True)
        self.diaries = [folder / f"diary{number}-rank{rank}" for rank in range(WORLD)]
        self.folder = folder
        context = multiprocessing.get_context("fork")
        port = free_port()
        self.ranks = [
            context.Process(
                target=train,
                args=(folder, self.diaries[rank]),
                kwargs={"rank": rank, "port": port, "steps": steps},
            )
            for rank in range(WORLD)
        ]
        for process in self.ranks:
            process.start()

    def events(self, rank: int) -> list[dict[str, Any]]:
        path = self.diaries[rank]
        # A killed rank may leave half a line.
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def last(self, event: str, rank: int) -> int:
        return max((e["step"] for e in self.events(rank) if e["event"] == event), default=-1)

    def is_saving(self, rank: int) -> bool:
        return [e["event"] for e in self.events(rank)][-1:] == ["saves"]

    def wait_for(self, condition: Any) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > deadline or any(p.exitcode is not None for p in self.ranks):
                self.fail("the run stands still")
            time.sleep(0.001)

    def kill(self, rank: int) -> float:
        """Kill a rank; return the seconds until the other has ended."""
        os.kill(self.ranks[rank].pid or 0, signal.SIGKILL)
        begun = time.monotonic()
        self.join(END_S)
        return time.monotonic() - begun

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                self.fail("a rank does not end")

    def fail(self, reason: str) -> None:
        logs = [(self.folder / f"rank{r}.log").read_text()[-3000:] for r in range(WORLD)]
        self.end()
        raise RuntimeError("\n".join([reason, *logs]))

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()


def kill_often(folder: Path, *, kills: int, seed: int) -> Report:
    """Train, kill and resume; then train to the end, and compare with a run of one piece."""
    begun, report, dice = time.monotonic(), Report(), random.Random(seed)
    runs: list[Incarnation] = []
    for number in range(kills):
        runs.append(Incarnation(folder / "killed", number, steps=ENDLESS))
        kill_once(runs, report, dice)
        load_all(folder / "killed" / "checkpoints", report)
    reached = max(run.last("trained", rank) for run in runs for rank in range(WORLD))
    report.steps = reached + TAIL
    runs.append(Incarnation(folder / "killed", kills, steps=report.steps))
    runs[-1].join(START_S)
    note_losses(runs, report)
    compare(runs, folder, report)
    report.seconds = time.monotonic() - begun
    return report


def kill_once(runs: list[Incarnation], report: Report, dice: random.Random) -> None:
    run, victim = runs[-1], dice.randrange(WORLD)
    run.wait_for(lambda: run.last("start", victim) >= 0)
    goal = run.last("start", victim) + dice.randint(1, 2 * EVERY + 1)
    if dice.random() < 0.6:
        # Within a save: its parts take from one to some tens of milliseconds.
        run.wait_for(lambda: run.last("saves", victim) >= goal and run.is_saving(victim))
    else:
        run.wait_for(lambda: run.last("trained", victim) >= goal)
    time.sleep(dice.uniform(0.0, 0.05))
    report.survivors_ended_s.append(run.kill(victim))
    report.kills += 1
    report.in_saves += run.is_saving(victim)


def note_losses(runs: list[Incarnation], report: Report) -> None:
    """Compare where each run began with what the one before had trained and saved."""
    for before, after in itertools.pairwise(runs):
        resumed = max(0, after.last("start", 0))
        trained = max(before.last("trained", rank) for rank in range(WORLD))
        # A save is over once every rank has left it.
        began = max(0, before.last("start", 0))
        saved = max(began, min(before.last("saved", rank) for rank in range(WORLD)))
        report.steps_lost.append(max(0, trained - resumed))
        report.too_many_lost += resumed < saved


def load_all(checkpoints: Path, report: Report) -> None:
    """Load every checkpoint that lies under a final name, all of its bytes."""
    for path in sorted(checkpoints.glob("*.ckpt")):
        whole = checkpoints / ".loaded"
        try:
            convert(path, whole)
            state = torch.load(whole, weights_only=True)
            assert state["global_step"] > 0
            assert state["optimizer_states"]
            report.checkpoints_loaded += 1
        except Exception as error:
            report.corrupt.append(f"{path.name}: {error}")
        finally:
            whole.unlink(missing_ok=True)


def compare(runs: list[Incarnation], folder: Path, report: Report) -> None:
    straight = Incarnation(folder / "straight", 0, steps=report.steps)
    straight.join(START_S)
    for rank in range(WORLD):
        expected = losses(straight, rank)
        assert len(expected) == report.steps
        for run in runs:
            found = losses(run, rank)
            report.differing_losses += sum(expected[step] != found[step] for step in found)
    both = [torch.load(folder / name / "weights.pt") for name in ("killed", "straight")]
    report.weights_equal = all(torch.equal(both[0][n], both[1][n]) for n in both[1])


def losses(run: Incarnation, rank: int) -> dict[int, str]:
    return {e["step"]: e["loss"] for e in run.events(rank) if e["event"] == "trained"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="kill-and-resume-"))
    try:
        report = kill_often(folder, kills=options.kills, seed=options.seed)
    finally:
        for child in multiprocessing.active_children():
            child.kill()
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    print(report.line())
    return 0 if report.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())
