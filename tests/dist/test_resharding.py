"""Save under one mapping, resume under any other: values equal the single-process run's."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from lightning_fold.verify.launch import run_world
from lightning_fold.verify.resharding import FORMS, Resharding, reference, run_resharding

pytestmark = pytest.mark.timeout(3600)

# Of 4 ranks: every axis alone, experts over tp and dp, both expert axes, copies of experts.
FOUR = (
    "tp1cp1dp4pp1-etp1ep1edp4",
    "tp4cp1dp1pp1-etp1ep1edp4",
    "tp1cp1dp4pp1-etp1ep4edp1",
    "tp1cp1dp4pp1-etp4ep1edp1",
    "tp2cp1dp2pp1-etp1ep4edp1",
    "tp2cp1dp2pp1-etp2ep2edp1",
    "tp2cp1dp2pp1-etp2ep1edp2",
    "tp4cp1dp1pp1-etp1ep2edp2",
    "tp1cp1dp4pp1-etp2ep2edp1",
)
EIGHT = (
    "tp2cp1dp4pp1-etp2ep2edp2",
    "tp1cp1dp8pp1-etp1ep8edp1",
    "tp4cp1dp2pp1-etp4ep1edp2",
)
ETP2, ETP1 = "tp1cp1dp2pp1-etp2ep1edp1", "tp2cp1dp1pp1-etp1ep2edp1"
CONTEXT = "tp1cp2dp2pp1-etp1ep2edp2"
TOLERANCE = {"decoder": 1e-10, "mixtral": 1e-6, "qwen3_moe": 1e-6}

Errors = dict[str, dict[str, float]]


def run_all(sources: Sequence[Resharding], targets: Sequence[Resharding], folder: Path) -> Errors:
    """Save under all sources, resume under all targets; errors by "TARGET < SOURCE FORM"."""
    folder.mkdir(exist_ok=True)
    torch.save(reference(sources[0]), folder / "reference.pt")
    # A case a pair: the groups of its Trainers end with it.
    resumed = [replace(target, sources=(s.key,)) for target in targets for s in sources]
    for world in sorted({case.folding.world for case in sources}):
        run(world, [case for case in sources if case.folding.world == world], folder)
    for world in sorted({case.folding.world for case in targets}):
        run(world, [case for case in resumed if case.folding.world == world], folder)
    return {
        f"{case.key} < {source}": errors
        for case in resumed
        for source, errors in json.loads((folder / case.key / "errors.0.json").read_text()).items()
    }


def run(world: int, cases: Sequence[Resharding], folder: Path) -> None:
    result = run_world(world, cases, folder, case_timeout=600.0, run=run_resharding)
    assert result.failure is None, f"{result.failed_case}: {result.failure}"


def assert_close(errors: Errors, tolerance: float, *, pairs: int) -> None:
    assert len(errors) == pairs * len(FORMS)
    worst = max(max(values.values()) for values in errors.values())
    print(f"{pairs} pairs in {len(FORMS)} forms, worst relative error {worst:.1e}")
    off = {
        f"{pair}: {what}": value
        for pair, values in errors.items()
        for what, value in values.items()
        if not value <= tolerance or math.isnan(value)
    }
    assert not off, json.dumps(off, indent=1)


@pytest.mark.dist(2)
def test_etp2_resumes_as_etp1_and_back_in_gate_rows_up_rows_and_both_moments(
    tmp_path: Path,
) -> None:
    both = [Resharding("decoder", ETP2), Resharding("decoder", ETP1)]
    errors = run_all(both, both, tmp_path)
    assert_close(errors, 1e-10, pairs=4)
    told = {
        f"{what} {half}"
        for what in ("weights", "next", "moments exp_avg", "moments exp_avg_sq")
        for half in ("gate", "up")
    }
    assert all(told <= values.keys() for values in errors.values())


@pytest.mark.dist(4)
def test_a_telling_few_with_context_parallel_and_foldings_of_single_layers(tmp_path: Path) -> None:
    few = [
        Resharding("decoder", FOUR[5]),
        Resharding("decoder", CONTEXT, feature="layers", shard="full"),
    ]
    assert_close(run_all(few, few, tmp_path), 1e-10, pairs=4)


@pytest.mark.dist(4)
def test_interleaved_stages_resume_as_one_and_back(tmp_path: Path) -> None:
    pairs: Sequence[tuple[Literal["adamw", "sgd"], str]] = (
        ("adamw", "decoder-tied"),
        ("sgd", "decoder"),
    )
    for optimizer, model in pairs:
        staged = Resharding(
            model,
            "tp2cp1dp1pp2-etp1ep2edp1",
            optimizer=optimizer,
            schedule="interleaved_1f1b",
            virtual_stages=2,
            num_microbatches=4,
            layout="Et|t|t|L",
        )
        both = [staged, Resharding(model, FOUR[2], optimizer=optimizer)]
        assert_close(run_all(both, both, tmp_path / model), 1e-10, pairs=4)


@pytest.mark.slow
@pytest.mark.dist(4)
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("decoder", "adamw"), ("decoder", "sgd"), ("mixtral", "adamw"), ("qwen3_moe", "sgd")],
)
def test_all_ordered_pairs_of_four_ranks(model: str, optimizer: str, tmp_path: Path) -> None:
    mappings = FOUR if model == "decoder" and optimizer == "adamw" else FOUR[3:7]
    every = [
        Resharding(model, mapping, optimizer=optimizer, shard="full" if i % 3 == 2 else "optimizer")
        for i, mapping in enumerate(mappings)
    ]
    errors = run_all(every, every, tmp_path)
    assert_close(errors, TOLERANCE[model], pairs=len(every) ** 2)


@pytest.mark.slow
@pytest.mark.dist(8)
def test_all_ordered_pairs_of_eight_ranks_and_other_worlds(tmp_path: Path) -> None:
    eight = [Resharding("decoder", mapping) for mapping in EIGHT]
    others = [Resharding("decoder", mapping) for mapping in (FOUR[5], ETP2)]
    errors = run_all([*eight, *others], [*eight, *others], tmp_path)
    assert_close(errors, 1e-10, pairs=25)
