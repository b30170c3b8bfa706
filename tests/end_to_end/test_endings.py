"""How a run ends whose rank fails, is killed, hangs or is told to leave: processes, two ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faulty_project
import pytest
import yaml
from _pytest.mark import ParameterSet

SCRIPT = Path(faulty_project.__file__)
KILLS = SCRIPT.with_name("kill_and_resume.py")
# Steps between checkpoints there.
EVERY = 2
# Far below the time-outs of half an hour that end a run whose peers nobody tells of a failure.
START_SECONDS, END_SECONDS = 120, 120
PREFIX = "lightning-fold: error: "


@dataclass(frozen=True)
class Run:
    """A started program, the leader of a process group."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    @property
    def last_line(self) -> str:
        return [line for line in self.log.splitlines() if line.strip()][-1]

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running\n{self.log}")

    def steps(self) -> dict[int, tuple[int, int]]:
        """Process and last step begun, by rank."""
        path = self.folder / "steps.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [tuple(map(int, line.split())) for line in lines if line.count(" ") == 2]
        return {rank: (pid, step) for pid, rank, step in rows}

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while min((reached for _, reached in self.steps().values()), default=-1) < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"no step {step}\n{self.log}")
            time.sleep(0.1)


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[Run]:
    """Run a program in a group of its own, and see that nothing of the group is left."""
    folder.mkdir(exist_ok=True)
    (folder / "steps.txt").unlink(missing_ok=True)
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    run = Run(process, folder)
    try:
        yield run
        assert not outlives(process.pid), "a process is left"
    finally:
        outlives(process.pid)
        process.wait()


def outlives(group: int) -> bool:
    """Tell whether a process of the group still runs, and kill it."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    return True


def script(*arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *arguments]


def command_line(fault: str, folder: Path) -> list[str]:
    config = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {
                "class_path": "lightning_fold.FoldedMoEStrategy",
                "init_args": {"expert_parallel_size": 2, "collective_timeout_s": 6},
            },
            "max_steps": 6,
            "limit_val_batches": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        },
        "model": {"class_path": "faulty_project.FaultyModule", "init_args": {"fault": fault}},
        "data": {
            "class_path": "lightning_fold.data.TextDataModule",
            "init_args": {"seq_len": 31, "batch_size": 2, "paths": faulty_project.TEXTS},
        },
    }
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    program = str(Path(sys.executable).with_name("lightning-fold"))
    return [program, "fit", "--config", "config.yaml"]


RAISED = r"rank {} failed first, in fail \(faulty_project\.py:\d+\) at step 3: BrokenError: the sam"
KILLED = r"rank 1 was killed by signal 9 \(SIGKILL\) at step 3"
HUNG = (
    r"rank 0 waited 6 s in all_\w+ over \S+ \(ranks 0 1\), called from training_step .* at step 3; "
    r"rank 1 is in fail \(faulty_project"
)
ALIKE = r"^\[rank[01]\]: \S*BrokenError: the sample is broken$"


def ending(fault: str, says: str, *, cli: bool = False, slow: bool = True) -> ParameterSet:
    name = f"{'cli' if cli else 'script'}-{fault}"
    return pytest.param(cli, fault, says, id=name, marks=[pytest.mark.slow] * slow)


ENDINGS = [
    # An ordinary script, whose rank 0 is the process that the user started.
    ending("raise@1", RAISED.format(1), slow=False),
    ending("raise@0", RAISED.format(0)),
    ending("raise@0,1", ALIKE),
    ending("kill@1", KILLED),
    ending("kill@0", "rank 0 ended without a word"),
    ending("hang@1", HUNG),
    # The command line, which hands a rank's words to the first process.
    ending("raise@1", f"^{PREFIX}{RAISED.format(1)}", cli=True),
    ending("raise@0", f"^{PREFIX}{RAISED.format(0)}", cli=True),
    ending("kill@1", f"^{PREFIX}{KILLED}", cli=True),
    ending("hang@1", f"^{PREFIX}{HUNG}", cli=True),
]


@pytest.mark.parametrize(("cli", "fault", "says"), ENDINGS)
def test_last_line_names_the_rank_that_failed_first(
    cli: bool, fault: str, says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = command_line(fault, folder) if cli else script(fault)
    with started(command, folder) as run:
        status = run.wait(START_SECONDS + END_SECONDS)
    assert re.search(says, run.last_line), run.log
    assert status == (-signal.SIGKILL if fault == "kill@0" else 1)


def interrupted(run: Run, *signals: tuple[int, signal.Signals], status: int) -> int:
    """Send signals to processes (groups, where negative); return the step that was saved."""
    for target, signum in signals:
        os.kill(target, signum)
        time.sleep(0.2)
    assert run.wait(END_SECONDS) == status, run.log
    told = re.findall(r"^lightning-fold: (\w+): saved (\S+) at step (\d+); resume", run.log, re.M)
    assert len(told) == 1, run.log
    assert run.last_line.startswith("lightning-fold: ")
    assert Path(told[0][1]).exists()
    assert "Traceback" not in run.log
    return int(told[0][2])


@pytest.mark.slow
def test_a_signal_saves_once_and_the_run_resumes_there(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoints" / "interrupted.ckpt")
    with started(script("train"), tmp_path) as run:
        run.wait_for_step(5)
        saved = interrupted(run, (run.process.pid, signal.SIGTERM), status=143)
    assert saved >= 5
    with started(script("train", checkpoint), tmp_path) as run:
        run.wait_for_step(saved + 3)
        first = int((tmp_path / "steps.txt").read_text().split()[2])
        again = interrupted(run, (-run.process.pid, signal.SIGINT), status=130)
    assert first == saved
    assert again >= saved + 3


@pytest.mark.slow
def test_a_signal_to_another_rank_counts_and_two_signals_save_once(tmp_path: Path) -> None:
    with started(script("train"), tmp_path) as run:
        run.wait_for_step(5)
        rank_1 = run.steps()[1][0]
        signals = [(rank_1, signal.SIGTERM), (rank_1, signal.SIGTERM), (rank_1, signal.SIGINT)]
        assert interrupted(run, *signals, status=143) >= 5


def test_a_signal_to_the_whole_group_spares_the_loaders_workers(tmp_path: Path) -> None:
    with started(script("train"), tmp_path) as run:
        run.wait_for_step(5)
        assert interrupted(run, (-run.process.pid, signal.SIGTERM), status=143) >= 5


@pytest.mark.slow
def test_a_single_rank_saves_as_well(tmp_path: Path) -> None:
    with started(script("train", "", "1"), tmp_path) as run:
        run.wait_for_step(5)
        assert interrupted(run, (run.process.pid, signal.SIGTERM), status=143) >= 5


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    with started(script("hang@1"), tmp_path) as run:
        run.wait_for_step(faulty_project.FAULT_STEP)
        time.sleep(1)
        for _ in range(2):
            os.killpg(run.process.pid, signal.SIGINT)
            time.sleep(0.3)
        # The collective that hangs would end the run with another status.
        assert run.wait(END_SECONDS) == 130


def kill_and_resume(kills: int) -> dict[str, Any]:
    command = [sys.executable, str(KILLS), "--kills", str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def check_kills(report: dict[str, Any], *, kills: int) -> None:
    assert report["kills"] == kills
    # A save that is cut short leaves the checkpoint before it.
    assert report["most_steps_lost"] <= 2 * EVERY
    assert report["too_many_lost"] == 0
    assert report["corrupt"] == []
    assert report["checkpoints_loaded"] > 0
    assert report["differing_losses"] == 0
    assert report["weights_equal"]


def test_a_killed_run_goes_on_as_if_it_had_not_been() -> None:
    check_kills(kill_and_resume(2), kills=2)


@pytest.mark.slow
def test_thirty_kills_lose_no_checkpoint_and_no_step_that_was_saved() -> None:
    report = kill_and_resume(30)
    check_kills(report, kills=30)
    assert report["in_saves"] >= 10
