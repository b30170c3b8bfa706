"""What checkpoints hold, and that training resumes from them as if it had not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.compare import worst
from contract.launch import Run

TOLERANCE = 1e-9


@pytest.mark.parametrize(
    "scenario",
    [
        "resume-sharded_grouped@ep2",
        "resume-sharded_adamw@tp2ep2",
        "resume-whole_two_optimizers@tp2ep2",
        "resume-whole_grouped@ep2",
        "resume-sharded_grouped@pp2",
        pytest.param("resume-whole_grouped@pp2", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(scenario: str, two: Run, plain: Run) -> None:
    _check_resume(two, plain, scenario)


@pytest.mark.slow
def test_a_resumed_pipeline_of_four_ranks_equals_an_uninterrupted_run(
    four: Run, plain: Run
) -> None:
    _check_resume(four, plain, "resume-sharded_narrow@pp2tp2")


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_resume_with_widths_that_no_data_axis_divides(form: str, four: Run, plain: Run) -> None:
    _check_resume(four, plain, f"resume-{form}_narrow@tp2ep2")


def _check_resume(run: Run, plain: Run, scenario: str) -> None:
    line = scenario.partition("_")[2].partition("@")[0]
    result, reference = run(scenario), plain(f"uninterrupted-{line}@plain")
    assert result["steps"] == reference["steps"]
    distance, name = worst(result["after"], reference["after"])
    assert distance < TOLERANCE, name


WRITERS = [
    ("adamw", "tp2ep2"),
    ("grouped", "ep2"),
    ("adamw", "pp2"),
    pytest.param("grouped", "pp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("line", "mapping"), WRITERS)
def test_consolidated_file_is_the_single_device_file(
    line: str, mapping: str, two: Run, plain: Run
) -> None:
    two(f"written-{line}@{mapping}"), plain(f"written-{line}@plain")
    ours = _read(two.folder / f"files/written-{line}@{mapping}")
    theirs = _read(plain.folder / f"files/written-{line}@plain")
    assert {key for key in ours if not key.startswith("lightning_fold")} == theirs.keys()
    assert _layout(ours["state_dict"]) == _layout(theirs["state_dict"])
    assert _layout(ours["optimizer_states"]) == _layout(theirs["optimizer_states"])
    assert worst(ours["state_dict"], theirs["state_dict"])[0] < TOLERANCE
    for mine, other in zip(ours["optimizer_states"], theirs["optimizer_states"], strict=True):
        for index, state in other["state"].items():
            tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
            assert worst({k: mine["state"][index][k] for k in tensors}, tensors)[0] < 1e-8


@pytest.mark.parametrize(("line", "mapping"), WRITERS)
def test_plain_lightning_resumes_a_consolidated_file(line: str, mapping: str, plain: Run) -> None:
    result = plain(f"adopted-2_{line}_{mapping}@plain")
    reference = plain(f"uninterrupted-{line}@plain")
    assert result["steps"] == reference["steps"]
    assert worst(result["after"], reference["after"])[0] < TOLERANCE


def test_a_ddp_checkpoint_resumes_under_a_mapping(two: Run, four: Run, plain: Run) -> None:
    for run, scenario in (
        (two, "adopted-2_adamw_ddp@tp2ep2"),
        (four, "adopted-2_grouped_ddp@tp4ep4"),
        (two, "adopted-2_adamw_ddp@pp2"),
        (four, "adopted-2_adamw_pp2@pp2ep2"),
    ):
        result, line = run(scenario), scenario.split("_")[1]
        reference = plain(f"uninterrupted-{line}@plain")
        assert result["steps"] == reference["steps"]
        assert worst(result["after"], reference["after"])[0] < TOLERANCE


@pytest.mark.parametrize(
    "option",
    ["behind@ep2", "behind_whole@ep2", pytest.param("behind@pp2", marks=pytest.mark.slow)],
)
def test_saves_behind_training_rotate_and_resume(option: str, two: Run) -> None:
    result = two(f"rotated-{option}")
    assert len(result["files"]) == 1
    assert result["steps"] > 2
    first = next(i for i, count in enumerate(result["whole"]) if count)
    assert all(result["whole"][first:]), "at some moment no whole checkpoint was there"
    assert worst(result["resumed"], result["after"])[0] == 0


@pytest.mark.parametrize(
    "scenario",
    ["sharded@tp2ep2", "whole@tp2ep2", pytest.param("sharded@pp2", marks=pytest.mark.slow)],
)
def test_a_resumed_run_draws_the_same_dropout(scenario: str, two: Run) -> None:
    result = two(f"dropped-{scenario}")
    assert worst(result["resumed"], result["uninterrupted"])[0] == 0


def test_saving_before_the_first_step_changes_nothing(two: Run, one: Run, plain: Run) -> None:
    _check_early(two, "early-sharded@ep2", plain("fit-adamw_fused@plain2"))
    _check_early(one, "early-sharded@plain", plain("fit-adamw_fused@plain"))


@pytest.mark.slow
def test_saving_a_pipeline_before_the_first_step_changes_nothing(two: Run, plain: Run) -> None:
    _check_early(two, "early-sharded@pp2", plain("fit-adamw_fused@plain"))


def _check_early(run: Run, scenario: str, reference: dict[str, Any]) -> None:
    for moment in ("after", "resumed"):
        assert worst(run(scenario)[moment], reference["after"])[0] < TOLERANCE


@pytest.mark.parametrize(
    "scenario",
    ["sharded@ep2", "whole@ep2", pytest.param("whole@pp2", marks=pytest.mark.slow)],
)
def test_save_weights_only_rotates_loads_and_cannot_resume(scenario: str, two: Run) -> None:
    run = two(f"weights_only-{scenario}")
    assert len(run["files"]) == 1
    assert run["loaded"] == pytest.approx(run["best"], rel=1e-6)
    assert run["error"].startswith("ValueError")
    assert "save_weights_only=True" in run["error"]


def test_hyperparameters_that_are_no_primitives_are_named(two: Run) -> None:
    (message,) = two("weights_only-sharded@ep2")["warned"]
    assert "hyper_parameters.path" in message
    assert "rate" not in message


def _read(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "epoch.ckpt", weights_only=True)
    return loaded


def _layout(value: Any) -> Any:
    """Keys in order, shapes and dtypes; values of primitives."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, dict):
        return [(key, _layout(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_layout(item) for item in value]
    return value
