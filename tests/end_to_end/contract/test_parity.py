"""Training under a mapping equals plain Lightning on one device, option by option."""

from __future__ import annotations

import pytest
import torch

from contract.cases import PARITY, parity_ids, plain_twin
from contract.compare import worst_move
from contract.launch import Run

CASES = [(world, scenario) for world in PARITY for scenario in parity_ids(world, slow=False)]
SLOW = [(world, scenario) for world in (2, 4) for scenario in parity_ids(world, slow=True)]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]

# Hugging Face computes norms and router in fp32 whatever the dtype: a rounding flip there is 1e-7.
TOLERANCE = 1e-6
FP32_TOLERANCE = 1e-4


@pytest.mark.parametrize(("world", "scenario"), ALL)
def test_training_equals_plain_lightning(
    world: int, scenario: str, plain: Run, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue({1: "one", 2: "two", 4: "four"}[world])
    result, reference = run(scenario), plain(plain_twin(scenario, world))
    tolerance = FP32_TOLERANCE if "fp32" in scenario else TOLERANCE
    reference = _with_start(reference)
    distance, name = worst_move(result, reference)
    assert distance < tolerance, f"{name}: {distance:.1e}"
    assert result["steps"] == reference["steps"]
    assert bool(result["woven"]) == ("woven" in scenario)
    assert float(result["val_loss"]) == pytest.approx(float(reference["val_loss"]), rel=1e-6)
    moved = [n for n, b in reference["before"].items() if not torch.equal(reference["after"][n], b)]
    assert len(moved) >= len(reference["before"]) // 2


@pytest.mark.parametrize(("world", "scenario"), [case for case in CASES if "clipped" in case[1]])
def test_clip_norm_is_the_single_device_norm(
    world: int, scenario: str, plain: Run, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue({1: "one", 2: "two", 4: "four"}[world])
    norms, reference = run(scenario)["norms"], plain(plain_twin(scenario, world))["norms"]
    if "value" in scenario:
        assert not norms.any(), "clipping by value needs no norm"
        return
    # The strategy's last norm is read after every batch, the plain one at every step.
    every = max(1, len(norms) // len(reference))
    torch.testing.assert_close(norms[every - 1 :: every], reference, rtol=1e-6, atol=0.0)


def test_frozen_parameters_stay(two: Run) -> None:
    for scenario, part in (
        ("fit-frozen_experts@ep2", ".experts."),
        ("fit-frozen_router@tp2ep2", ".gate."),
    ):
        run = two(scenario)
        frozen = [n for n in run["before"] if part in n]
        assert frozen
        assert all(torch.equal(run["after"][n], run["before"][n]) for n in frozen)


def test_one_device_is_plain_lightning_to_the_last_digits(one: Run, plain: Run) -> None:
    distance, name = worst_move(one("fit-sgd@plain"), plain("fit-sgd@plain"))
    assert distance < 1e-13, name


def _with_start(reference: dict[str, object]) -> dict[str, object]:
    """A model built in configure_model has no weights before it: measure against its norm."""
    before = reference["before"] or {n: torch.zeros_like(v) for n, v in reference["after"].items()}
    return {**reference, "before": before}
