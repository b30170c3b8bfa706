"""Which samples ranks read after a resume in mid-epoch, and streams that ranks read unlike.

Gloo ranks start once for each world and way to run; what each of them read is compared.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from data_project import SAMPLES, SAVED_AT_STEP

PROJECT = Path(__file__).with_name("data_project.py")
LIMIT_S = 240.0
STEPS = 6  # Of an epoch: 44 samples in steps of 8.

Reads = list[dict[str, Any]]


def start(folder: Path, scenario: str, *, world: int, **options: Any) -> list[subprocess.Popen]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(world):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        env |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": scenario}
        command = [sys.executable, str(PROJECT), scenario, str(folder), json.dumps(options)]
        with (folder / f"{scenario}.{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log))
    return processes


def run(folder: Path, scenario: str, *, world: int, some: bool = False, **options: Any) -> Any:
    """What each rank wrote; with `some`, None for those that had not ended with the first."""
    processes = start(folder, scenario, world=world, **options)
    try:
        deadline = time.monotonic() + LIMIT_S
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if any(p.poll() for p in processes) or (some and any(p.poll() == 0 for p in processes)):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    files = [folder / f"{scenario}.{rank}.json" for rank in range(world)]
    logs = [(folder / f"{scenario}.{rank}.log").read_text()[-3000:] for rank in range(world)]
    assert some or all(file.exists() for file in files), "\n".join(logs)
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def steps_of(ranks: list[Reads]) -> list[tuple[int, int, int, list[int]]]:
    """(epoch, batch, optimizer steps before it, samples of all ranks) of each step."""
    return [
        (
            reads[0]["epoch"],
            reads[0]["batch"],
            reads[0]["step"],
            sorted({sample for read in reads for sample in read["samples"]}),
        )
        for reads in zip(*ranks, strict=True)
    ]


def losses_of(ranks: list[Reads]) -> list[float]:
    return [sum(read["loss"] for read in reads) / len(reads) for reads in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def whole(root: Path) -> list[Reads]:
    """An uninterrupted run on dp=2 that saves a consolidated file on its way."""
    return run(root, "whole", world=2, sharded=False, save="file.ckpt", expert_parallel_size=2)


@pytest.fixture(scope="module")
def folder(root: Path) -> str:
    run(root, "sharded", world=2, sharded=True, save="folder.ckpt", expert_parallel_size=2)
    assert (root / "folder.ckpt").is_dir()
    return "folder.ckpt"


def check_rest(found: list[Reads], whole: list[Reads]) -> None:
    steps = steps_of(whole)
    assert steps_of(found) == steps[SAVED_AT_STEP:]
    # The same weights too: each step's loss is the uninterrupted one.
    assert losses_of(found) == pytest.approx(losses_of(whole)[SAVED_AT_STEP:], rel=1e-4)


def test_uninterrupted_run_reads_every_sample_once_an_epoch(whole: list[Reads]) -> None:
    steps = steps_of(whole)
    assert [step[:3] for step in steps] == [(i // STEPS, i % STEPS, i) for i in range(3 * STEPS)]
    for epoch in range(3):
        read = [sample for step in steps if step[0] == epoch for sample in step[3]]
        assert sorted(read) == list(range(SAMPLES))
    assert steps[0][3] != steps[STEPS][3]


def test_dp4_goes_on_from_dp2_in_mid_epoch(root: Path, whole: list[Reads]) -> None:
    options = {"sharded": False, "resume": "file.ckpt", "expert_parallel_size": 4}
    check_rest(run(root, "dp4", world=4, **options), whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("name", "world", "mapping"),
    [
        ("dp1", 1, {}),
        ("dp2tp2", 4, {"tensor_parallel_size": 2}),
        ("dp4", 4, {"expert_parallel_size": 2}),
    ],
)
def test_folder_goes_on_under_other_mappings_and_workers(
    name: str, world: int, mapping: dict[str, int], workers: int, root: Path, whole: list[Reads],
    folder: str,
) -> None:  # fmt: skip
    options = {"sharded": True, "resume": folder, "workers": workers, **mapping}
    found = run(root, f"{name}-{workers}", world=world, **options)
    check_rest(found, whole)


@pytest.mark.slow
def test_file_goes_on_with_other_workers(root: Path, whole: list[Reads]) -> None:
    options = {"sharded": False, "resume": "file.ckpt", "workers": 2, "expert_parallel_size": 2}
    check_rest(run(root, "dp2-2", world=2, **options), whole)


@pytest.mark.parametrize(
    ("stage", "loader"),
    [
        ("fit", "train_dataloader"),
        pytest.param("validate", "val_dataloader", marks=[pytest.mark.slow]),
    ],
)
def test_peers_that_read_unlike_are_stopped_at_the_first_batch(
    stage: str, loader: str, root: Path
) -> None:
    options = {"stage": stage, "differ": True, "counts": [4, 4], "tensor_parallel_size": 2}
    said = run(root, f"peers-{stage}", world=2, **options)
    for text in said:
        assert "Ranks 0, 1 are one data-parallel rank (0 of dp=1)" in text
        assert f"Change `{loader}`" in text


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_stream_that_ends_sooner_on_one_rank_is_refused(stage: str, root: Path) -> None:
    options = {"stage": stage, "differ": True, "counts": [2, 4], "expert_parallel_size": 2}
    first, _ = run(root, f"uneven-{stage}", world=2, some=True, **options)
    assert "rank 0 has no batch after 2, and rank 1 has begun batch 3" in first


@pytest.mark.slow
def test_streams_of_equal_length_are_read_to_their_end(root: Path) -> None:
    options = {"stage": "fit", "differ": True, "counts": [3, 3], "expert_parallel_size": 2}
    assert run(root, "even", world=2, **options) == ["", ""]
