"""The suite that verifies: its data differ between ranks, its comparison sees every error."""

from __future__ import annotations

import copy
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fold.model import decoder, tensor_parallel
from lightning_fold.pipeline.schedules import check_schedule
from lightning_fold.topology.folding import Folding, divisors, legal_foldings
from lightning_fold.topology.sequence import balanced_sizes, zigzag_places
from lightning_fold.verify import cases, mutations
from lightning_fold.verify.compare import (
    CHECKS,
    Check,
    Outcome,
    compare_case,
    family_of,
    relative_error,
)
from lightning_fold.verify.launch import _explain
from lightning_fold.verify.mutate import judge
from lightning_fold.verify.mutations import MUTATIONS
from lightning_fold.verify.plan import (
    EIGHT,
    MAIN_MODELS,
    METHODS,
    QUICK,
    Case,
    closed_form,
    full,
    mappings_of,
    reference_requests,
    tolerance_of,
)
from lightning_fold.verify.plan_pipelines import MAPPINGS, SCHEDULES, pipelines
from lightning_fold.verify.plan_pipelines import QUICK as QUICK_PIPELINES

CASE = Case("decoder", "tp2cp1dp2pp1-etp1ep4edp1", clip=True)

# ------------------------------------------------------------ batches and cases


@pytest.mark.parametrize("index", range(cases.STEPS * cases.ACCUMULATE))
def test_ranks_see_different_tokens_padding_and_labels(index: int) -> None:
    batches = [cases.sub_batch(index, dp_rank) for dp_rank in range(8)]
    padding = [int((b["attention_mask"] == 0).sum()) for b in batches]
    labels = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
    assert len(set(padding)) == 8
    assert all(a != b for a, b in itertools.pairwise(labels))
    assert len({tuple(b["input_ids"].flatten().tolist()) for b in batches}) == 8
    for batch in batches:
        assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


def test_some_lengths_are_not_divided_by_any_tp() -> None:
    lengths = {cases.sub_batch(index, 0)["input_ids"].shape[1] for index in range(3)}
    assert {length for length in lengths if length % 2} == {13, 11}
    assert cases.VOCABULARY % 2 == 1


def test_models_build_alike_twice_and_have_the_layers_the_suite_needs() -> None:
    first, second = (cases.build_model("decoder-shared-bias", decoder=decoder) for _ in range(2))
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    kinds = [type(layer.mlp).__name__ for layer in first.model.layers]
    assert kinds == ["SparseMoeBlock", "GatedMLP", "SparseMoeBlock"]
    norm = first.model.norm.weight
    assert (norm != 1).all()


def test_closed_form_counts_the_mappings() -> None:
    assert [closed_form(world) for world in (1, 2, 4, 8)] == [1, 9, 36, 100]
    for world in range(1, 25):
        assert closed_form(world) == len(legal_foldings(world, cp=divisors(world)))


def test_plan_covers_what_it_promises() -> None:
    assert len(set(EIGHT)) >= 20
    assert {"tp2cp2dp2pp1-etp1ep8edp1", "tp2cp2dp2pp1-etp2ep4edp1"} <= set(EIGHT)
    assert all(Folding.from_id(mapping).world == 8 for mapping in EIGHT)
    for world in (1, 2, 4):
        assert len(mappings_of(world)) == closed_form(world)
    for world in (1, 2, 4, 8):
        ran = {(c.model, c.mapping, c.clip) for c in full(world)}
        wanted = {
            (model, mapping, clip)
            for model in MAIN_MODELS
            for mapping in mappings_of(world)
            for clip in (False, True)
            if Folding.from_id(mapping).cp == 1
        }
        assert wanted <= ran
        assert {mapping for _, mapping, _ in ran} == set(mappings_of(world))
        if world > 1:
            seen = {(c.context_parallel_method, c.batch) for c in full(world) if c.folding.cp > 1}
            assert {(m, b) for m in METHODS for b in ("padded", "packed", "short")} <= seen
        assert any(c.precision == "32" and not c.clip for c in full(world))
        alone = {c.model for c in full(world)}
        assert set(cases.MODELS) == alone | {"decoder-deep"}
    assert len({c.mapping for c in QUICK if c.folding.world == 4}) == 8
    assert {c.context_parallel_method for c in QUICK if c.folding.cp > 1} == set(METHODS)


def test_references_are_shared_between_mappings_of_equal_dp() -> None:
    other = replace(CASE, mapping="tp2cp1dp2pp1-etp2ep2edp1")
    requests = reference_requests([CASE, other])
    wanted = {"model": "decoder", "dp": 2, "clip": True, "precision": "64", "feature": ""}
    wanted |= {"batch": "padded", "pieces": 1}
    assert requests == [{"key": CASE.reference, **wanted}]


# ------------------------------------------------------------ pipelines


def sizes_of(number: int) -> list[int]:
    return [cases.ROWS // number + (piece < cases.ROWS % number) for piece in range(number)]


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6])
def test_microbatches_ranks_and_halves_of_sequences_differ_in_targets(number: int) -> None:
    for index in range(cases.STEPS * cases.ACCUMULATE):
        targets = []
        for dp_rank in range(4):
            batch = cases.sub_batch(index, dp_rank, "rows")
            counted = batch["labels"][:, 1:] != -100
            pieces = [int(piece.sum()) for piece in counted.split(sizes_of(number))]
            assert len(set(pieces)) > 1
            assert min(pieces) > 0
            targets.append(sum(pieces))
            own = [counted.index_select(1, zigzag(counted.shape[1], rank)) for rank in (0, 1)]
            assert own[0].sum() != own[1].sum()
        assert len(set(targets)) == 4


def zigzag(length: int, rank: int) -> torch.Tensor:
    return torch.tensor(zigzag_places(length, cp=2, rank=rank))


def test_some_microbatches_of_one_row_have_no_target() -> None:
    batches = [cases.sub_batch(index, 0, "rows") for index in range(3)]
    empty = [int(((b["labels"][:, 1:] != -100).sum(1) == 0).sum()) for b in batches]
    assert sum(empty) > 0


def test_pipelines_cover_what_they_promise() -> None:
    every = [case for world in (2, 4, 8) for case in pipelines(world)]
    telling = {(case.model, case.mapping) for case in QUICK_PIPELINES}
    assert {case.schedule for case in QUICK_PIPELINES} >= {"1f1b", *SCHEDULES} - {"gpipe"}
    assert len(telling) == len(QUICK_PIPELINES) <= 10
    for pp in (2, 4):
        for name, virtual in SCHEDULES.items():
            counts = {
                case.num_microbatches
                for case in every
                if (case.folding.pp, case.schedule) == (pp, name) and case.folding.stage_size == 1
            }
            assert any(n and cases.ROWS % n for n in counts), (pp, name)
            assert any(n and cases.ROWS % n == 0 for n in counts), (pp, name)
            for number in counts:
                check_schedule(name, pp, virtual, number)
    eight = [case for case in every if case.folding.world == 8]
    for mapping in MAPPINGS:
        ran = {(c.model, c.feature) for c in eight if c.mapping == mapping}
        assert ran >= {(model, feature) for model in MAIN_MODELS for feature in ("", "selective")}
    foldings = [Folding.from_id(mapping) for mapping in MAPPINGS]
    assert len(set(MAPPINGS)) >= 15
    assert all(folding.world == 8 and folding.pp > 1 for folding in foldings)
    assert sum(folding.dp > 1 for folding in foldings) >= 8
    assert {"tp2cp2dp1pp2-etp1ep4edp1", "tp2cp1dp2pp2-etp2ep2edp1"} <= set(MAPPINGS)
    assert len({case.key for case in every}) == len(set(every))


def test_only_what_sees_microbatches_is_cut_in_the_reference() -> None:
    case = replace(CASE, mapping="tp1cp1dp2pp2-etp1ep2edp1", num_microbatches=4, batch="rows")
    assert case.pieces == 1
    assert replace(case, feature="per_sequence").pieces == 1
    assert replace(case, feature="per_layer").pieces == 4
    assert replace(case, model="mixtral-aux").reference.endswith(".4pieces")


# ------------------------------------------------------------ comparison

NAMES = {
    "model.model.norm.weight": "dense",
    "model.model.layers.0.mlp.gate.weight": "router",
    "model.model.layers.0.mlp.gate_proj.weight": "dense",
    "model.model.layers.0.mlp.shared_expert.gate_proj.weight": "shared",
    "model.model.layers.0.mlp.experts.gate_up_proj": "expert",
}
BIAS = "model.model.layers.0.mlp.gate.e_score_correction_bias"


def reference() -> dict[str, Any]:
    """Two steps of two dp ranks; sequences of 5 tokens, top-2, one MoE layer."""
    torch.manual_seed(0)
    values = {name: torch.randn(3, 4, dtype=torch.float64) for name in NAMES}
    return {
        "losses": [torch.tensor(float(i + 1), dtype=torch.float64) for i in range(4)],
        "logits": [torch.randn(2, 5, 7, dtype=torch.float64) for _ in range(4)],
        "norms": [3.0, 2.0],
        "routing": [[torch.randint(0, 8, (10, 2)) for _ in range(4)]],
        "grads": values,
        "weights": {name: value + 1 for name, value in values.items()},
        "buffers": {BIAS: torch.zeros(8)},
    }


def as_ranks(record: dict[str, Any], folding: Folding) -> list[dict[str, Any]]:
    """What ranks would write if they agreed with `record`.

    Each cp rank has its zigzag of 5 tokens, and each tp rank a run of that.
    """
    ranks = []
    for rank in range(folding.world):
        at = folding.coordinates(rank)
        mine = slice(at["dp"], None, folding.dp)
        held = torch.tensor(zigzag_places(5, cp=folding.cp, rank=at["cp"]))
        own = held.split(balanced_sizes(len(held), folding.tp))[at["tp"]]
        slices = [
            index.view(2, 5, 2).index_select(1, own).flatten(0, 1)
            for index in record["routing"][0][mine]
        ]
        logits = [x.index_select(1, held) for x in record["logits"][mine]]
        ranks.append(
            {
                "coordinates": at,
                "routing": [slices],
                "losses": record["losses"][mine],
                "logits": logits,
                "places": [own] * len(logits),
                "logit_places": [held] * len(logits),
                "norms": record["norms"],
                "grads": record["grads"] if rank == 0 else {},
                "weights": record["weights"] if rank == 0 else {},
                "buffers": record["buffers"],
                "families": dict(NAMES),
            }
        )
    return copy.deepcopy(ranks)


def compare(
    ranks: list[dict[str, Any]], record: dict[str, Any], folder: Path, case: Case = CASE
) -> Outcome:
    torch.save(record, folder / f"{case.reference}.pt")
    for rank, written in enumerate(ranks):
        torch.save(written, folder / f"rank{rank}.pt")
    return compare_case(case, folder, folder)


def test_equal_records_pass_and_checks_come_in_order(tmp_path: Path) -> None:
    record = reference()
    outcome = compare(as_ranks(record, CASE.folding), record, tmp_path)
    assert outcome.passed, outcome.explain()
    assert [check.name for check in outcome.checks] == [
        *("names", "routing", "logits"),
        *("dense gradient", "shared gradient", "router gradient", "expert gradient"),
        *("clip norm", "weights", "buffers", "loss"),
    ]
    assert set(outcome.family_norms) == {"dense", "shared", "router", "expert"}


@pytest.mark.parametrize("mapping", ["tp1cp2dp2pp1-etp1ep4edp1", "tp2cp2dp2pp1-etp1ep8edp1"])
def test_tokens_of_cp_and_tp_ranks_are_joined_by_their_places(mapping: str, tmp_path: Path) -> None:
    record, case = reference(), replace(CASE, mapping=mapping)
    ranks = as_ranks(record, case.folding)
    assert compare(ranks, record, tmp_path, case).passed
    ranks[0]["places"][0] = ranks[0]["places"][0].flip(0)
    outcome = compare(ranks, record, tmp_path, case)
    assert [check.name for check in outcome.failed_checks] == ["routing"]


def as_stages(record: dict[str, Any], folding: Folding) -> list[dict[str, Any]]:
    """The same of two stages: the first has the layer, the last one has final norm and logits."""
    ranks = as_ranks(record, folding)
    norm = "model.model.norm.weight"
    for rank in ranks:
        families = rank["families"]
        if rank["coordinates"]["pp"] == 0:
            rank |= {"logits": [], "logit_places": []}
            rank["families"] = {n: family for n, family in families.items() if n != norm}
        else:
            rank |= {"routing": [[]], "places": [], "buffers": {}}
            rank["families"] = {norm: families[norm]}
    return ranks


STAGES = replace(CASE, mapping="tp2cp1dp2pp2-etp1ep4edp1")


def repeat_layer(ranks: list[dict[str, Any]]) -> None:
    ranks[-1] |= {key: ranks[3][key] for key in ("routing", "places")}


def lose_layer(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        rank["routing"] = [[]]


def lose_buffer(ranks: list[dict[str, Any]]) -> None:
    del ranks[1]["buffers"][BIAS]


def lose_family(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        rank["families"].pop("model.model.norm.weight", None)


def shift_loss_of_last_stage(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks[4:]:
        rank["losses"][0] += 1e-6


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda ranks: None, None),
        (repeat_layer, "routing"),
        (lose_layer, "routing"),
        (lose_buffer, "buffers"),
        (lose_family, "names"),
        (shift_loss_of_last_stage, "loss"),
    ],
)
def test_stages_are_compared_together(damage: Any, name: str | None, tmp_path: Path) -> None:
    record = reference()
    ranks = as_stages(record, STAGES.folding)
    damage(ranks)
    outcome = compare(ranks, record, tmp_path, STAGES)
    assert [check.name for check in outcome.failed_checks] == ([name] if name else [])


EXPERT = "model.model.layers.0.mlp.experts.gate_up_proj"


def rename(ranks: list[dict[str, Any]]) -> None:
    ranks[0]["weights"]["model.extra"] = torch.ones(1)


def misfile(ranks: list[dict[str, Any]]) -> None:
    ranks[0]["families"][EXPERT] = "dense"


def reroute(ranks: list[dict[str, Any]]) -> None:
    ranks[3]["routing"][0][1][-1, -1] += 1


def disturb_logits(ranks: list[dict[str, Any]]) -> None:
    ranks[2]["logits"][1][0, 0, 0] += 1e-8


def double_expert(ranks: list[dict[str, Any]]) -> None:
    ranks[0]["grads"][EXPERT] *= 2


def round_norm(ranks: list[dict[str, Any]]) -> None:
    # fp32 would not tell these apart.
    ranks[0]["norms"][1] *= 1 + 1e-9


def lose_weight(ranks: list[dict[str, Any]]) -> None:
    ranks[0]["weights"][EXPERT][0, 0] = math.nan


def move_bias(ranks: list[dict[str, Any]]) -> None:
    ranks[2]["buffers"][BIAS][0] = 1e-30


def narrow_weight(ranks: list[dict[str, Any]]) -> None:
    ranks[0]["weights"][EXPERT] = ranks[0]["weights"][EXPERT].float()


def shift_loss(ranks: list[dict[str, Any]]) -> None:
    ranks[2]["losses"][0] += 1e-6


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (rename, "names"),
        (misfile, "names"),
        (reroute, "routing"),
        (disturb_logits, "logits"),
        (double_expert, "expert gradient"),
        (round_norm, "clip norm"),
        (lose_weight, "weights"),
        (narrow_weight, "weights"),
        (move_bias, "buffers"),
        (shift_loss, "loss"),
    ],
)
def test_comparison_sees(damage: Any, name: str, tmp_path: Path) -> None:
    record = reference()
    ranks = as_ranks(record, CASE.folding)
    damage(ranks)
    outcome = compare(ranks, record, tmp_path)
    assert [check.name for check in outcome.failed_checks] == [name]
    assert name in outcome.explain()


def test_ratio_tells_the_factor(tmp_path: Path) -> None:
    record = reference()
    ranks = as_ranks(record, CASE.folding)
    double_expert(ranks)
    (check,) = compare(ranks, record, tmp_path).failed_checks
    assert (check.where, check.ratio) == (EXPERT, pytest.approx(2.0))


def test_vanishing_reference_gradient_is_a_failure(tmp_path: Path) -> None:
    record = reference()
    record["grads"][EXPERT] *= 1e-9
    outcome = compare(as_ranks(record, CASE.folding), record, tmp_path)
    assert [check.name for check in outcome.failed_checks] == ["expert gradient"]


def test_refusals_of_some_ranks_only_are_a_failure(tmp_path: Path) -> None:
    record = reference()
    ranks = as_ranks(record, CASE.folding)
    ranks[1] = {"refusal": "tp=3"}
    outcome = compare(ranks, record, tmp_path)
    assert "tp=3" in str(outcome.failure)
    outcome = compare([{"refusal": "tp=3"}] * 4, record, tmp_path)
    assert (outcome.refusal, outcome.failure, outcome.passed) == ("tp=3", None, False)


def test_family_is_read_from_the_name() -> None:
    assert {name: family_of(name) for name in NAMES} == NAMES


def test_relative_error_of_what_cannot_be_compared() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert relative_error(zero, zero) == 0
    assert relative_error(one, zero) == math.inf
    assert relative_error(torch.ones(3), one) == math.inf
    assert relative_error(one, one.double()) == math.inf


def test_tolerances_are_the_agreed_ones() -> None:
    assert tolerance_of(CASE).tensors == 1e-10
    assert tolerance_of(replace(CASE, model="mixtral")).tensors == 1e-6
    assert tolerance_of(replace(CASE, model="mixtral")).loss == 5e-7
    assert tolerance_of(replace(CASE, precision="32")).tensors == 1e-5


# ------------------------------------------------------------ mutations


def test_injection_is_undone() -> None:
    before = tensor_parallel._use_rows
    with mutations.injected("first-kv-head"):
        assert tensor_parallel._use_rows is not before
    assert tensor_parallel._use_rows is before


def test_unknown_mutation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'nothing' is no mutation\. Legal: expert-grad-times-ep"):
        mutations.injected("nothing").__enter__()


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_finds_what_it_patches(name: str) -> None:
    with mutations.injected(name):
        pass
    assert MUTATIONS[name].seen_by in CHECKS


def outcome_with(*failed: str) -> Outcome:
    return Outcome(CASE, tuple(Check(name, 1.0, 1e-10, "x", 4.0) for name in failed))


def test_mutation_is_caught_by_its_own_check_only() -> None:
    mutation = MUTATIONS["expert-grad-times-ep"]
    caught = judge("m", mutation, outcome_with("logits", "expert gradient"))
    assert caught.caught
    assert "expert gradient: 1.0e+00 > 1e-10 at x, ratio 4.000000" in caught.evidence
    assert not judge("m", mutation, outcome_with("logits")).caught
    assert not judge("m", mutation, outcome_with()).caught


def test_crash_counts_only_where_it_is_expected() -> None:
    crash = Outcome(CASE, failure="rank 0 failed\nRuntimeError: Cannot use ReduceOp.PREMUL_SUM")
    other = Outcome(CASE, failure="rank 0 failed\nAttributeError: no such name")
    assert judge("m", MUTATIONS["sum-not-forced"], crash).caught
    assert not judge("m", MUTATIONS["sum-not-forced"], other).caught
    assert not judge("m", MUTATIONS["sum-not-forced"], outcome_with("dense gradient")).caught
    assert not judge("m", MUTATIONS["no-division-by-dp"], crash).caught


# ------------------------------------------------------------ failing ranks


def write_error(folder: Path, rank: int, *, when: float, text: str) -> None:
    error = {"time": when, "case": "a.case", "text": text}
    (folder / f"rank{rank}.error").write_text(json.dumps(error))


def test_first_cause_is_told_not_its_echo(tmp_path: Path) -> None:
    write_error(tmp_path, 0, when=1.0, text="RuntimeError: Connection closed by peer")
    write_error(tmp_path, 2, when=3.0, text="ValueError: second")
    write_error(tmp_path, 1, when=2.0, text="ValueError: first")
    run = _explain(tmp_path, [1, 1, 1, None])
    assert run.failed_case == "a.case"
    assert str(run.failure).splitlines() == ["rank 1 failed", "ValueError: first"]


def test_rank_that_died_without_a_word_is_told_before_echoes(tmp_path: Path) -> None:
    write_error(tmp_path, 0, when=1.0, text="RuntimeError: Connection closed by peer")
    (tmp_path / "rank1.log").write_text("case a.case\nFatal Python error: Segmentation fault\n")
    run = _explain(tmp_path, [1, -11])
    assert run.failed_case == "a.case"
    assert "rank 1 was killed by signal 11" in str(run.failure)
    assert "Segmentation fault" in str(run.failure)
