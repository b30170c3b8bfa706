"""The pieces of `verify`: which model, which batches, which mappings, what is told."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from rich.console import Console
from torch import Tensor, nn

from lightning_fold.model.decoder import Decoder, DecoderConfig
from lightning_fold.pipeline.layout import parse_layout
from lightning_fold.steps.microbatches import split
from lightning_fold.steps.step import PROTOCOL
from lightning_fold.topology.folding import Folding
from lightning_fold.verify import verify
from lightning_fold.verify.launch import WorldRun
from lightning_fold.verify.plain import cut
from lightning_fold.verify.plan_pipelines import SCHEDULES
from lightning_fold.verify.product.batches import batches_of
from lightning_fold.verify.product.checks import (
    StepCheck,
    assembled,
    compare_outputs,
    join_parts,
    worst,
)
from lightning_fold.verify.product.diagnosis import Finding
from lightning_fold.verify.product.picture import draw_result, level
from lightning_fold.verify.product.pipelines import pipeline_of, spread
from lightning_fold.verify.product.record import Seen
from lightning_fold.verify.product.result import MappingResult, VerifyResult
from lightning_fold.verify.product.run import (
    _after_crash,
    _Verification,
    refusal_of,
    refused_step,
)
from lightning_fold.verify.product.subject import (
    DEFAULT,
    Built,
    PlainModule,
    Subject,
    build,
    strategy_options,
    subject_of,
)
from lightning_fold.verify.product.training import MappingCase

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "recipes" / "demo.tp2cp1dp2pp1-etp1ep4edp1.yaml"
LOOP = f"{ROOT / 'recipes' / 'loop_experts.py'}:LoopDecoder"


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(num_hidden_layers=1, hidden_dropout=0.1))


class Manual(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = Decoder(DecoderConfig(num_hidden_layers=1))


class NoConfig(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)

    def example_batch(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((1, 2), float(index))}


# ------------------------------------------------------------ subjects


def test_a_recipe_is_built_small_and_equal_in_every_process() -> None:
    subject = subject_of(None, DEMO, full=False)
    first, second = build(subject), build(subject)
    assert first.changes["vocab_size"] == (264, 101)
    assert type(first.module).__name__ == "FoldedLitModule"
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "expert_parallel_size" in strategy_options(str(DEMO))
    batches = batches_of(first)
    assert not torch.equal(batches(0, 0, 2)["input_ids"], batches(0, 1, 2)["input_ids"])
    assert int(batches(0, 3, 4)["attention_mask"].min()) == 0


def test_the_recipe_of_transformers_is_built_small() -> None:
    recipe = ROOT / "recipes" / "qwen3-moe.tp2cp1dp2pp1-etp1ep4edp1.yaml"
    built = build(subject_of(None, recipe, full=False))
    model: Any = built.module.model
    assert model.config.hidden_size == 32
    assert model.config._experts_implementation == "eager"
    assert not any(param.is_meta for param in model.parameters())


def test_a_function_is_named_for_other_processes() -> None:
    subject = subject_of(decoder, None, full=False)
    assert subject.function.endswith(":decoder")
    built = build(subject)
    assert isinstance(built.module, PlainModule)
    assert built.changes["hidden_dropout"] == (0.1, 0.0)
    with pytest.raises(ValueError, match="exists in this process only"):
        subject_of(lambda: decoder(), None, full=False)


def test_tiny_is_called_and_full_is_left_alone() -> None:
    tiny = build(Subject(function=LOOP)).module.model
    assert tiny.words.embedding_dim == 16
    assert "attention_mask" not in batches_of(Built(PlainModule(tiny), {}))(0, 0, 1)
    small = build(Subject(function=f"{__file__}:decoder", full=True)).module.model
    assert small.config.hidden_size == 128


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"{__file__}:NoConfig", r"classmethod `tiny\(\)`.*`--full`"),
        (f"{__file__}:Manual", "optimises manually"),
        (f"{__file__}:nothing", "cannot be loaded.*Change `--model`"),
        ("nowhere:model", "cannot be loaded.*Change `--model`"),
        ("justaname", "Legal: module:callable, file.py:callable"),
    ],
)
def test_models_that_cannot_be_verified_say_why(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(Subject(function=name))


def test_a_recipe_without_a_class_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model": {"learning_rate": 1.0}}))
    with pytest.raises(ValueError, match="names no class"):
        build(Subject(recipe=str(path)))


def test_batches_come_from_the_model_itself_where_it_says_so() -> None:
    module = PlainModule(NoConfig())
    batches = batches_of(Built(module, {}))
    assert float(batches(2, 1, 4)["x"][0, 0]) == 9.0


# ------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: verify(ranks=9), r"Legal ranks: 1 to 8\.  Change `--ranks`"),
        (lambda: verify(ranks=0), "Change `--ranks`"),
        (lambda: verify(inject="nonsense"), "Legal: expert-grad-times-ep, .*Change `--inject`"),
        (lambda: verify(mappings=["tp2"]), "46 are legal. Change `--mapping`"),
        (lambda: verify(mappings=["tp2"], pp=[1]), "36 are legal. Change `--mapping`"),
        (lambda: verify(pp=[3]), r"pp=3 does not divide 4 ranks\. Legal pp: 1, 2, 4\.  Change"),
        (lambda: verify("a:b", config="c.yaml"), "Leave out `--model` or `--config`"),
        (lambda: verify(config="missing.yaml"), "does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    call: Callable[[], Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_mappings_are_refused_in_the_words_of_set_up() -> None:
    module = build(DEFAULT).module
    assert refusal_of(case_of(Folding.from_world(2, tp=2, ep=2)), module) is None
    told = refusal_of(case_of(Folding.from_world(3, tp=3)), module)
    assert "8 heads cannot be split over tp=3" in str(told)
    full = case_of(Folding.from_world(2, pp=2), options={"data_parallel_shard": "full"})
    assert "data_parallel_shard" in str(refusal_of(full, module))


class Scalars(pl.LightningModule):
    """Its batches have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder(DecoderConfig(num_hidden_layers=2))

    def example_batch(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(float(index))}


def test_batches_without_rows_refuse_pipelines_alone(tmp_path: Path) -> None:
    subject = Subject(function=f"{__file__}:Scalars", full=True)
    foldings = [Folding.from_world(2, pp=2), Folding.from_world(2)]
    seen = _Verification(subject, foldings, {}, (), "", None, tmp_path)
    staged, plain = (seen._refusal(case) for case in seen._cases())
    assert "has no tensor with rows" in str(staged)
    assert plain is None


def case_of(folding: Folding, **fields: Any) -> MappingCase:
    return MappingCase("", folding.mapping_id, **fields)


def test_a_step_that_fits_no_pipeline_takes_all_of_them_along() -> None:
    chain: list[MappingCase] = []
    for folding in (Folding.from_world(4, pp=2), Folding.from_world(4)) * 2:
        fields = {"resumes": chain[-1].key if chain else ""}
        mapping = Folding.from_world(4, pp=folding.pp, ep=1 + len(chain) // 2)
        chain.append(case_of(mapping, **fields))
    failures: dict[str, str] = {}
    story = f"Traceback\nValueError: Twice.training_step calls it more than once. {PROTOCOL}."
    left = _after_crash(chain, WorldRun(story, chain[0].key), failures)
    assert [(case.mapping, case.resumes) for case in left] == [
        (chain[1].mapping, ""),
        (chain[3].mapping, ""),
    ]
    assert failures == {chain[0].key: story, chain[2].key: story}
    assert str(refused_step(story)).startswith("Twice.training_step calls it more than once")
    # A crash of another kind costs its own mapping.
    failures.clear()
    left = _after_crash(chain, WorldRun("rank 1 failed", chain[0].key), failures)
    assert [case.resumes for case in left] == ["", chain[1].key, chain[2].key]


# ------------------------------------------------------------ pipelines


def test_built_in_schedules_take_turns_where_they_are_legal() -> None:
    two, options = Folding.from_world(2, pp=2), dict[str, Any]()
    seen = [
        pipeline_of(two, turn=turn, num_layers=3, rows=10, options=options)
        for turn in range(len(SCHEDULES))
    ]
    assert [fields["schedule"] for fields in seen] == [*SCHEDULES]
    assert {fields["num_microbatches"] for fields in seen} == {4}
    assert seen[0]["layout"] is None
    assert seen[-1]["layout"] == "E|t|t|tL"
    # Two rows are too few for a V of four stages, and one layer for more than two stages.
    few = [pipeline_of(two, turn=t, num_layers=3, rows=2, options=options) for t in range(6)]
    assert {fields["schedule"] for fields in few} == set(SCHEDULES) - {"zbv", "dualpipev"}
    flat = [pipeline_of(two, turn=t, num_layers=1, rows=10, options=options) for t in range(6)]
    assert {fields["virtual_stages"] for fields in flat} == {1}
    assert flat[0]["layout"] == "E|tL"


def test_a_recipes_own_schedule_runs_every_pipeline() -> None:
    options = {"pipeline_schedule": "zbv", "virtual_pipeline_size": 2}
    for turn in range(2):
        fields = pipeline_of(
            Folding.from_world(4, pp=4), turn=turn, num_layers=9, rows=10, options=options
        )
        assert fields == {
            "schedule": "zbv",
            "virtual_stages": 2,
            "num_microbatches": 8,
            "layout": None,
            "overlap": False,
        }


def test_a_woven_recipe_is_verified_under_schedules_that_weave() -> None:
    options = {"pipeline_overlap": True}
    two = Folding.from_world(2, pp=2)
    seen = [pipeline_of(two, turn=t, num_layers=3, rows=10, options=options) for t in range(6)]
    assert {fields["schedule"] for fields in seen} == {"1f1b", "interleaved_1f1b", "dualpipev"}
    assert all(fields["overlap"] for fields in seen)


@pytest.mark.parametrize(("layers", "stages"), [(1, 2), (3, 4), (3, 8), (2, 8)])
def test_few_layers_are_spread_over_many_stages(layers: int, stages: int) -> None:
    layout = parse_layout(spread(layers, stages), layers, num_stages=stages)
    assert len(layout.stages) == stages
    assert all(len(stage.layers) <= 1 for stage in layout.stages)


def test_the_plain_cut_weighs_by_targets_else_by_rows() -> None:
    labels = torch.tensor([[1, 1, 1], [1, 1, -100], [1, -100, -100]])
    cuts = cut({"labels": labels, "one": torch.ones(1, 2), "extra": [torch.arange(3)]}, 2)
    assert [share.loss for _, share in cuts] == [1.0, 0.0]
    assert [share.rows for _, share in cuts] == [2 / 3, 1 / 3]
    assert torch.equal(cuts[1][0]["labels"], labels[2:])
    assert cuts[1][0]["one"].shape == (1, 2)
    assert cuts[0][0]["extra"][0].tolist() == [0, 1]
    own = split({"labels": labels, "one": torch.ones(1, 2), "extra": [torch.arange(3)]}, 2)
    assert own.weights == (1.0, 0.0)
    assert [share.loss for _, share in cut((torch.ones(5, 2),), 2)] == [3 / 5, 2 / 5]


# ------------------------------------------------------------ comparison


def test_dealt_tokens_are_put_back_into_their_places() -> None:
    whole_BSK = torch.arange(2 * 5 * 3).view(2, 5, 3)
    places = [torch.tensor([0, 4]), torch.tensor([1, 2, 3])]
    parts = [
        Seen("experts", (0, 0), whole_BSK[:, own].flatten(0, 1), own, sequences=2, length=5)
        for own in places
    ]
    assert torch.equal(join_parts(parts), whole_BSK.flatten(0, 1))
    logits = [
        Seen("logits", (0, 0), whole_BSK[:, own].double(), own, sequences=2, length=5)
        for own in places
    ]
    assert torch.equal(join_parts(logits), whole_BSK.double())
    folding = Folding.from_world(2, tp=2)
    ranks = [
        {"coordinates": folding.coordinates(r), "seen": [parts[r], logits[r], logits[r]]}
        for r in range(2)
    ]
    keys = {("experts", 0, 0, 0, 0), ("logits", 0, 0, 0, 0), ("logits", 0, 0, 0, 1)}
    assert set(assembled(ranks, folding)) == keys


def test_what_two_stages_have_seen_is_put_together() -> None:
    folding = Folding.from_world(2, pp=2)
    first = [Seen("a", (0, 0), torch.tensor(m), microbatch=m) for m in range(2)]
    last = [Seen("b", (0, 0), torch.tensor(2 + m), microbatch=m) for m in (1, 0)]
    ranks = [
        {"coordinates": folding.coordinates(r), "seen": seen}
        for r, seen in enumerate((first, last))
    ]
    found = {key: int(value) for key, value in assembled(ranks, folding).items()}
    assert found == {
        ("a", 0, 0, 0, 0): 0,
        ("a", 0, 0, 1, 0): 1,
        ("b", 0, 0, 0, 0): 2,
        ("b", 0, 0, 1, 0): 3,
    }


def test_worst_names_the_tensor_and_the_first_step() -> None:
    right = torch.ones(2, dtype=torch.float64)
    expected = {f"loss, step {i}, dp rank 0": right for i in range(3)}
    actual = {name: right * (1 + i) for i, name in enumerate(expected)}
    check = worst("outputs", actual, expected, 1e-10)
    assert (check.error, check.step) == (1.0, 1)
    assert check.ratio == pytest.approx(2.0)
    assert check.where == "loss, step 1, dp rank 0"
    close = worst(
        "outputs", {n: right * (1 + 1e-12 * i) for i, n in enumerate(expected)}, expected, 1e-10
    )
    assert (close.where, close.step) == ("loss, step 2, dp rank 0", 0)
    assert worst("outputs", {}, expected, 1e-10).error == math.inf


def test_a_loss_is_named_only_where_the_logits_of_its_step_are_right() -> None:
    right = torch.ones(2, dtype=torch.float64)

    def named(logits: list[float], losses: list[float]) -> tuple[str, int]:
        pairs = [
            (
                {f"{what}, step {i}, dp rank 0": right * (1 + e) for i, e in enumerate(errors)},
                {f"{what}, step {i}, dp rank 0": right for i in range(len(errors))},
            )
            for what, errors in (("logits", logits), ("loss", losses))
        ]
        check = compare_outputs(pairs[0], pairs[1], 1e-10)
        assert not check.passed
        return check.where, check.step

    assert named([0.0, 0.2], [0.1, 0.5]) == ("loss, step 0, dp rank 0", 0)
    # A loss that is further off follows from logits that are off at all.
    assert named([1e-3, 0.2], [0.1, 0.5]) == ("logits, step 0, dp rank 0", 0)
    assert named([0.0, 0.2], [0.0, 0.5]) == ("logits, step 1, dp rank 0", 1)
    # A module that shows no logits.
    assert named([], [0.0, 0.5]) == ("loss, step 1, dp rank 0", 1)


# ------------------------------------------------------------ what is told

EQUAL = MappingResult(
    "tp2cp1dp1pp1-etp1ep2edp1",
    (StepCheck("routing", 0, 0), StepCheck("outputs", 1e-15, 1e-10)),
)
OFF = replace(
    EQUAL, mapping="tp1cp1dp2pp1-etp1ep2edp1", checks=(StepCheck("outputs", 1.0, 1e-10, "x", 2.0),)
)
REFUSED = MappingResult("tp1cp2dp1pp1-etp1ep2edp1", refusal="no\n  such thing")
CRASHED = MappingResult("tp1cp1dp2pp1-etp2ep1edp1", failure="rank 1 failed")


def result(*mappings: MappingResult) -> VerifyResult:
    finding = Finding("outputs", "", ("ep",), "cause", True, "x", OFF.mapping, math.nan, (), 2)
    return VerifyResult("model", "", 2, 1e-10, "", mappings, (finding,), (), 1.0)


def test_a_result_passes_only_if_all_that_ran_is_equal() -> None:
    assert result(EQUAL, REFUSED).passed
    assert not result(EQUAL, OFF).passed
    assert not result(EQUAL, CRASHED).passed
    assert not result(REFUSED).passed
    told = result(EQUAL, REFUSED).headline()
    assert "2 legal mappings, 1 refused, 1 run" in told
    staged = replace(EQUAL, mapping="tp1cp1dp1pp2-etp1ep1edp1", schedule="zbv x2")
    assert "2 legal mappings (1 with pp = 1), 0 refused, 2 run" in result(EQUAL, staged).headline()
    assert result(staged).to_json()["mappings"][0]["schedule"] == "zbv x2"


def test_the_table_shows_errors_ratios_and_verdicts() -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(result(EQUAL, OFF, CRASHED).table())
    text = console.export_text()
    for shown in ("1e-15", "1e+00 x2", "OFF: outputs", "FAILED", "ok"):
        assert shown in text
    assert result(REFUSED).refusals() == [f"refused 1: {REFUSED.mapping}: no such thing"]


def test_json_holds_every_figure_and_no_infinity() -> None:
    off = replace(OFF, checks=(StepCheck("outputs", math.inf, 1e-10, "x", math.nan),))
    told = json.loads(json.dumps(result(EQUAL, off, REFUSED).to_json(), allow_nan=False))
    assert (told["legal"], told["refused"], told["run"], told["passed"]) == (3, 1, 2, False)
    first, second, third = told["mappings"]
    assert first["checks"]["outputs"]["error"] == 1e-15
    assert second["checks"]["outputs"]["error"] == "infinite"
    assert third["refusal"] == REFUSED.refusal
    assert told["findings"][0]["axes"] == ["ep"]


def test_the_picture_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "matrix.png"
    draw_result(result(EQUAL, OFF, REFUSED, CRASHED), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["matrix.png"]
    assert (level(0.0), level(1e-3), level(math.inf)) == (-17.0, -3.0, 1.0)
