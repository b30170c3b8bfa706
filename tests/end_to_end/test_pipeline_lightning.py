"""Modules without an import of this package train under pp=2 as under ddp, hook by hook."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipeline_project
import pytest
import torch
from torch import Tensor

PROJECT = Path(pipeline_project.__file__)
MODULES = list(pipeline_project.MODULES)
CASES = [m if m == "own_loss" else pytest.param(m, marks=pytest.mark.slow) for m in MODULES]
# Hugging Face computes norms, router and its loss in fp32 whatever the dtype.
TOLERANCE = 1e-6
# What the modules themselves note, which a pipeline does for each microbatch.
STEPS = ("training_step", "validation_step", "backward")

Hook = tuple[str, dict[str, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    root = tmp_path_factory.mktemp("pipeline")
    selected = {
        i.callspec.params.get("module") for i in request.session.items if hasattr(i, "callspec")
    }
    modules = [module for module in MODULES if module in selected]
    for strategy, devices in (("ddp", "1"), ("pp", "2")):
        run = subprocess.run(
            [sys.executable, str(PROJECT), strategy, devices, str(root / strategy), *modules],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]
    return root


def said(folder: Path, strategy: str, module: str, rank: int = 0) -> dict[str, Any]:
    text = (folder / strategy / module / f"rank{rank}.json").read_text()
    result: dict[str, Any] = json.loads(text)
    return result


def logged(folder: Path, strategy: str, module: str) -> list[dict[str, float]]:
    path = folder / strategy / module / "lightning_logs" / "version_0" / "metrics.csv"
    with path.open() as file:
        return [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize("module", CASES)
def test_every_step_logs_the_same(module: str, folder: Path) -> None:
    ours, theirs = logged(folder, "pp", module), logged(folder, "ddp", module)
    assert len(ours) == len(theirs) > 10
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, rel=TOLERANCE)


@pytest.mark.parametrize("module", CASES)
def test_every_rank_ends_with_the_same_metrics_checkpoints_and_epoch(
    module: str, folder: Path
) -> None:
    reference = said(folder, "ddp", module)
    assert 0 < reference["stopped"] < 7, "early stopping did not stop the reference"
    for rank in (0, 1):
        run = said(folder, "pp", module, rank)
        assert run["metrics"] == pytest.approx(reference["metrics"], rel=TOLERANCE)
        assert run["best"] == pytest.approx(reference["best"], rel=TOLERANCE)
        for key in ("epochs", "steps", "stopped", "best_path"):
            assert run[key] == reference[key], key


@pytest.mark.parametrize("module", CASES)
def test_checkpoints_have_the_same_names_and_weights(module: str, folder: Path) -> None:
    saved = {
        strategy: sorted((folder / strategy / module / "checkpoints").iterdir())
        for strategy in ("pp", "ddp")
    }
    assert [path.name for path in saved["pp"]] == [path.name for path in saved["ddp"]]
    assert len(saved["pp"]) == 2
    for path, other in zip(saved["pp"], saved["ddp"], strict=True):
        ours, theirs = (torch.load(p, weights_only=True)["state_dict"] for p in (path, other))
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            _check_close(ours[name], value, name)


def _check_close(value: Tensor, target: Tensor, name: str) -> None:
    # AdamW turns the last digits of small gradients into whole steps.
    distance = (value - target).double().norm() / target.double().norm()
    assert distance < 1e-4, f"{name}: {distance:.1e}"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("module", CASES)
def test_hooks_come_in_the_same_order_with_the_same_metrics(
    module: str, rank: int, folder: Path
) -> None:
    plain = [(name, metrics) for name, metrics in said(folder, "ddp", module)["hooks"]]
    hooks = squeezed(said(folder, "pp", module, rank)["hooks"])
    expected = pipelined(plain, is_last=rank == 1)
    if rank == 0:
        print(table(expected))
    assert [name for name, _ in hooks] == [name for name, _ in expected]
    for (name, metrics), (_, target) in zip(hooks, expected, strict=True):
        assert metrics == pytest.approx(target, rel=TOLERANCE), name


def squeezed(hooks: list[Any]) -> list[Hook]:
    """Microbatches as one: of what comes for each of them, the first."""
    kept: list[Hook] = []
    seen: set[str] = set()
    for name, metrics in hooks:
        if name not in STEPS:
            seen.clear()
        elif name in seen:
            continue
        else:
            seen.add(name)
        kept.append((name, metrics))
    return kept


def pipelined(plain: list[Hook], *, is_last: bool) -> list[Hook]:
    """The order of plain Lightning with the two differences that docs/pipelines.md names.

    Gradients are zeroed before the step, hence before it logs. `on_before_backward` comes directly
    before `on_after_backward`: the backward is over by then, and it was inside the step, hence
    before the step's values reach the ranks. A stage that is not the last one has no loss to run
    backward from.
    """
    out: list[Hook] = []
    rest = list(plain)
    while rest:
        name, metrics = hook = rest.pop(0)
        if name != "training_step":
            out.append(hook)
            continue
        zeroing = _take(rest, lambda name: name.endswith("on_before_zero_grad"))
        before = _take(rest, lambda name: name.endswith("on_before_backward"))
        backward = _take(rest, lambda name: name == "backward")
        assert len(before) == 2
        assert len(backward) == 1
        step = [name for name, _ in zeroing] + ["training_step"] + ["backward"] * is_last
        out += [(name, metrics) for name in step] + before
    return out


def _take(hooks: list[Hook], matches: Callable[[str], bool]) -> list[Hook]:
    """Remove the leading hooks that match."""
    count = next((i for i, (name, _) in enumerate(hooks) if not matches(name)), len(hooks))
    taken, hooks[:] = hooks[:count], hooks[count:]
    return taken


def table(hooks: list[Hook]) -> str:
    """The hooks of the first epoch, with how many metrics there were."""
    rows = [f"{name:<44} {len(metrics):>3} metrics" for name, metrics in hooks]
    return "\n".join(rows[:80])
