"""Outputs, dropout masks, precisions, events and unsupported experts under a mapping."""

from __future__ import annotations

import pytest
import torch

from contract.compare import worst_move
from contract.launch import Run


@pytest.mark.parametrize("length", [7, 1])
def test_outputs_are_plain_and_full_under_tp(length: int, two: Run, plain: Run) -> None:
    reference = plain(f"outputs-{length}@plain")
    for rank in two.ranks(f"outputs-{length}@tp2"):
        assert rank["plain"]
        for name in ("logits", "last_hidden_state", "last_logits"):
            torch.testing.assert_close(rank[name], reference[name], rtol=1e-6, atol=1e-9)
    assert reference["last_logits"].shape[1] == 1


def test_tp_replicas_of_a_token_draw_the_same_mask(two: Run) -> None:
    first, second = two.ranks("dropout@tp2")
    assert torch.equal(first["outside"], second["outside"])


def test_owners_of_different_tokens_draw_different_masks(two: Run) -> None:
    first, second = two.ranks("dropout@tp2")
    assert not torch.equal(first["inside"][0], second["inside"][0])
    first, second = two.ranks("dropout@ep2")
    assert not torch.equal(first["outside"], second["outside"])
    assert not torch.equal(first["inside"][0], second["inside"][0])


def test_recompute_draws_the_same_masks(two: Run) -> None:
    for stored, recomputed in zip(
        two.ranks("dropout@tp2"), two.ranks("dropout-recomputed@tp2"), strict=True
    ):
        forward, again = recomputed["inside"]
        assert torch.equal(forward, again)
        assert torch.equal(forward, stored["inside"][0])
        for name, value in stored["after"].items():
            torch.testing.assert_close(recomputed["after"][name], value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("scenario", "dtype"),
    [
        ("precision-64-true@ep2", "torch.float64"),
        ("precision-bf16-mixed@tp2ep2", "torch.float32"),
        ("precision-bf16-true@tp2ep2", "torch.bfloat16"),
        ("precision-16-mixed@ep2", "torch.float32"),
        ("precision-16-mixed_torch@pp2", "torch.float32"),
        *(
            pytest.param(f"precision-{name}@pp2", f"torch.{dtype}", marks=pytest.mark.slow)
            for name, dtype in (
                ("64-true", "float64"),
                ("bf16-mixed", "float32"),
                ("bf16-true", "bfloat16"),
                ("16-mixed", "float32"),
            )
        ),
    ],
)
def test_precision_trains_with_its_dtypes(scenario: str, dtype: str, two: Run) -> None:
    for rank in two.ranks(scenario):
        assert rank["parameters"] == rank["moments"] == [dtype]
        assert rank["losses"][-1] < 0.5 * rank["losses"][0]


@pytest.mark.parametrize(
    "name",
    [
        "bf16-mixed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16-true", "16-mixed")),
    ],
)
def test_weaving_keeps_to_a_low_precision(name: str, two: Run) -> None:
    """The same roundings: weights come to each piece as to the whole layer."""
    woven, plain = two(f"precision-{name}@pp2woven"), two(f"precision-{name}@pp2")
    assert woven["woven"]
    assert woven["parameters"] == plain["parameters"]
    torch.testing.assert_close(woven["losses"], plain["losses"], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("mapping", ["ep2", "pp2", "pp2woven"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(mapping: str, two: Run) -> None:
    for rank in two.ranks(f"overflow@{mapping}"):
        assert rank["skipped"] == [True]
        assert rank["scale"] == 32.0


def test_collectives_of_a_forward_are_the_closed_list(two: Run) -> None:
    """Nothing moves between the o_proj reduce-scatter and the routing: no border collective."""
    attention = ["tp all_gather", "tp reduce_scatter"]
    moe = ["ep all_to_all"] * 4  # Counts, rows, routing weights, and the way back.
    head = ["tp all_gather", "tp all_to_all"]  # Hidden states; logits of an uneven vocabulary.
    for rank in two.ranks("events@tp2ep2"):
        assert rank["forward"] == ["tp all_reduce", *attention, *moe, *attention, *moe, *head]


def test_one_host_synchronisation_a_moe_layer(two: Run) -> None:
    assert two("events@tp2ep2")["syncs"] == 2


def test_one_routing_event_a_moe_layer_and_forward(two: Run) -> None:
    layers = [f"model.model.layers.{i}.mlp.experts" for i in (0, 1)]
    events = two.ranks("events@tp2ep2")
    for rank in events:
        assert rank["evaluated"] == [(name, False, 32) for name in layers]
        assert rank["trained"] == [(name, True, 32) for name in layers]


@pytest.mark.parametrize("kind", ["list", "gpt_oss"])
def test_experts_that_cannot_be_folded_train_under_dp(kind: str, two: Run, plain: Run) -> None:
    run, reference = two(f"unsupported-{kind}@dp2"), plain(f"unsupported-{kind}@plain2")
    distance, name = worst_move(run, reference)
    assert distance < 1e-6, name
