"""Steps that are cut into microbatches: what is joined, who decides, which modules do more."""

from __future__ import annotations

import pytest
import torch

from contract.compare import worst_move
from contract.launch import Run

TOLERANCE = 1e-6


@pytest.mark.parametrize("monitor", ["val_loss", "train_loss"])
def test_learning_rate_and_stop_follow_the_same_metric_on_every_rank(
    monitor: str, two: Run, plain: Run
) -> None:
    reference = plain("plateau@plain")[monitor]
    assert len(set(reference["rates"])) > 1
    assert len(reference["rates"]) < 8, "nothing stopped the plain run"
    for rank in two.ranks("plateau@pp2"):
        assert rank[monitor]["rates"] == reference["rates"]
        assert rank[monitor]["metrics"] == pytest.approx(reference["metrics"], rel=TOLERANCE)


def test_outputs_of_a_batch_are_whole_on_every_rank(two: Run, plain: Run) -> None:
    reference = plain("served@plain")
    assert reference["logits-1"].shape[1] == 1
    for rank in two.ranks("served@pp2"):
        assert set(rank) == set(reference)
        for name, value in reference.items():
            torch.testing.assert_close(rank[name], value, rtol=TOLERANCE, atol=1e-9)


@pytest.mark.parametrize("scenario", ["own_loss", "packed"])
def test_modules_that_say_how_they_are_cut_train_as_without(
    scenario: str, two: Run, plain: Run
) -> None:
    run, reference = two(f"{scenario}@pp2"), plain(f"{scenario}@plain")
    distance, name = worst_move(run, reference)
    assert distance < TOLERANCE, name
    for rank in two.ranks(f"{scenario}@pp2"):
        for loss, other in zip(rank["losses"], reference["losses"], strict=True):
            assert float(loss) == pytest.approx(float(other), rel=TOLERANCE)
        assert rank["metrics"] == pytest.approx(reference["metrics"], rel=TOLERANCE)


def test_stages_leave_a_step_with_the_same_random_numbers(two: Run) -> None:
    first, last = two.ranks("dropout@pp2")
    assert torch.equal(first["next"], last["next"])
    masks = first["inside"]
    assert len(masks) == 3
    assert not torch.equal(masks[1], masks[2]), "microbatches draw the same"
    assert last["inside"] == []
    assert len(last["outside"]) == 4, "one mask a row"


@pytest.mark.slow
def test_recompute_of_a_microbatch_draws_its_masks_again(two: Run) -> None:
    stored, recomputed = two("dropout@pp2"), two("dropout-recomputed@pp2")
    assert len(recomputed["inside"]) == 6
    for mask in stored["inside"]:
        assert sum(torch.equal(mask, other) for other in recomputed["inside"]) == 2
    for name, value in stored["after"].items():
        torch.testing.assert_close(recomputed["after"][name], value, rtol=1e-12, atol=1e-15)
