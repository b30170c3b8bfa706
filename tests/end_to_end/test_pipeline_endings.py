"""How a run ends that fails inside a pipeline's schedule: processes, two ranks, one with four."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pipeline_faults
import pytest
from _pytest.mark import ParameterSet
from test_endings import END_SECONDS, START_SECONDS, Run, started

SCRIPT = Path(pipeline_faults.__file__)


def ending(fault: str, says: str, *, slow: bool = True) -> ParameterSet:
    return pytest.param(fault, says, id=fault.replace(" ", "-"), marks=[pytest.mark.slow] * slow)


FIRST = r"rank {0} failed first{1} at step 2: PipelineError: pipeline: rank {0}, stage {0}, {2}: "
STEP = FIRST.format(1, r", in training_step \(pipeline_faults\.py:\d+\)", "{}")
LAST = STEP.format("microbatch 0, action 1F0") + r"ValueError: Faulty\.training_step "
ENDINGS = [
    ending(
        "raise in the step",
        STEP.format("microbatch 1, action 1F1") + "BrokenError: the sample is broken",
        slow=False,
    ),
    ending(
        "raise in a layer",
        FIRST.format(0, r", in break_layer \(pipeline_faults\.py:\d+\)", "microbatch 1, action 0F1")
        + "BrokenError: the layer is broken",
    ),
    ending(
        "kill the last stage",
        r"rank 1 was killed by signal 9 \(SIGKILL\) at step 2 "
        r"\(rank 0 at stage 0, microbatch \d, action 0\w+\)",
    ),
    ending("kill the first stage", r"rank 0 ended without a word"),
    ending("call twice", LAST + r"calls it more than once \(`self\.model`\)\. Under pipeline_par"),
    ending(
        "return nothing",
        FIRST.format(1, "", "microbatch 0, action 1F0")
        + r"ValueError: Faulty\.training_step returns no loss",
    ),
    ending("another shape", r"rank 1 has read a batch of other shapes than rank 0.*\(dp rank 0\)"),
]


@pytest.mark.parametrize(("fault", "says"), ENDINGS)
def test_last_line_names_rank_stage_microbatch_and_action(
    fault: str, says: str, tmp_path: Path
) -> None:
    with started([sys.executable, str(SCRIPT), fault], tmp_path / "run") as run:
        status = run.wait(START_SECONDS + END_SECONDS)
        # Where the process is killed that was started first, the other one has the last word.
        wait_for_group(run)
    assert re.search(says, run.last_line), run.log
    assert status == (-signal.SIGKILL if fault == "kill the first stage" else 1)
    assert {step for _, step in run.steps().values()} == {pipeline_faults.FAULT_STEP}


def wait_for_group(run: Run) -> None:
    deadline = time.monotonic() + END_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(run.process.pid, 0)
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "devices"), [("none", 2), ("few rows", 4)])
def test_what_is_no_fault_goes_on(fault: str, devices: int, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), fault, str(devices)]
    with started(command, tmp_path / "run") as run:
        assert run.wait(START_SECONDS + END_SECONDS) == 0, run.log
    assert run.log.count("has done 4 steps") == devices
