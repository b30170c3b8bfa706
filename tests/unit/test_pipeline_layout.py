"""Layouts of pipeline stages: the grammar, its refusals, the even cut, and what layers weigh."""

from __future__ import annotations

import doctest
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_fold.callbacks.flops import ModelShape, training_flops
from lightning_fold.model.decoder import Decoder, DecoderConfig
from lightning_fold.model.inspect import ModelParts, find_parts
from lightning_fold.pipeline import layout as module
from lightning_fold.pipeline.costs import LayerCosts, core_flops, costs_of, layer_costs
from lightning_fold.pipeline.costs import layer_weights as weights_of_layer
from lightning_fold.pipeline.even import even_cut
from lightning_fold.pipeline.layout import Layout, StageLayers, even_layout, parse_layout

quick = settings(deadline=None, max_examples=60)


def counts_of(layout: Layout) -> list[int]:
    return [len(stage.layers) for stage in layout.stages]


def read(text: str, counts: Sequence[int]) -> Layout:
    """The layout of a text that should place so many layers in each stage."""
    layout = parse_layout(text, sum(counts), num_stages=len(counts))
    assert counts_of(layout) == list(counts)
    return layout


def check_sound(layout: Layout) -> None:
    """Every layer once and in order, embedding first, head last."""
    layers = [layer for stage in layout.stages for layer in stage.layers]
    assert layers == list(range(len(layers)))
    assert [stage.index for stage in layout.stages] == list(range(len(layout.stages)))
    last = len(layout.stages) - 1
    assert [stage.embedding for stage in layout.stages] == [True] + [False] * last
    assert [stage.head for stage in layout.stages] == [False] * last + [True]
    for layer in layers:
        assert layer in layout.stages[layout.owner(layer)].layers


# The grammar.


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).attempted == 1
    assert doctest.testmod(module).failed == 0


def test_the_example_of_megatrons_documentation_is_read_as_there() -> None:
    text = "Et*3|(tt|)*29,m|L"
    layout = parse_layout(text, 61, num_stages=32, num_mtp=1)
    assert layout.stages[0] == StageLayers(0, (0, 1, 2), embedding=True, head=False)
    assert all(len(stage.layers) == 2 for stage in layout.stages[1:30])
    assert layout.stages[30] == StageLayers(30, (), embedding=False, head=False, mtp=1)
    assert layout.stages[31] == StageLayers(31, (), embedding=False, head=True)
    assert str(layout) == text
    check_sound(layout)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("EtL", [1]),
        ("EL", [0]),
        ("E|t|L", [0, 1, 0]),
        ("E||t|L", [0, 0, 1, 0]),
        ("Et||||L", [1, 0, 0, 0, 0]),
        ("Et|*4L", [1, 0, 0, 0, 0]),
        ("E,t,t | t ,, t\n|\tt L", [2, 2, 1]),
        ("E t *2 (t|) * 2 L", [3, 1, 0]),
        ("Et*12L", [12]),
        ("Et*012L", [12]),
        ("E(|tt)*3L", [0, 2, 2, 2]),
        ("E(t|t)*2,tL", [1, 2, 2]),
        ("E((t|)*2,t)*2,L", [1, 1, 2, 1, 1]),
        ("E(t)(|)(tL)", [1, 1]),
        ("(Et|)*1,tL", [1, 1]),
    ],
)
def test_texts_place_layers(text: str, counts: list[int]) -> None:
    check_sound(read(text, counts))


Written = tuple[str, list[str]]
"""A text, and the letters and bars it stands for."""


def written(depth: int = 2) -> st.SearchStrategy[Written]:
    """Any expression without E and L, with separators strewn in."""
    single = st.sampled_from(["t", "|"]).map(lambda letter: (letter, [letter]))
    if not depth:
        return single
    inner = written(depth - 1)
    group = st.lists(inner, min_size=1, max_size=3).map(
        lambda parts: (f"({joined(parts)[0]})", joined(parts)[1])
    )
    item = single | group
    gap = st.sampled_from(["", "", ",", " ", ", "])
    repeated = st.tuples(item, gap, st.integers(1, 4)).map(
        lambda made: (f"{made[0][0]}*{made[1]}{made[2]}{made[1]}", made[0][1] * made[2])
    )
    return item | repeated


def joined(parts: Sequence[Written]) -> Written:
    return "".join(text for text, _ in parts), [item for _, items in parts for item in items]


@given(st.lists(written(), max_size=6))
@quick
def test_any_expression_stands_for_what_it_says(parts: list[Written]) -> None:
    text, items = joined(parts)
    counts = [len(run) for run in "".join(items).split("|")]
    check_sound(read(f"E{text}L", counts))


COUNTS = st.lists(st.sampled_from([0, 1, 2, 2, 2, 3, 4, 11, 12]), min_size=1, max_size=24)


@given(COUNTS, st.integers(0, 4), st.data())
@quick
def test_the_short_text_is_read_as_the_same_layout(
    counts: list[int], num_mtp: int, data: st.DataObject
) -> None:
    stages = ["t" * count for count in counts]
    for _ in range(num_mtp):
        fit = [i for i in range(len(counts)) if not any(counts[i + 1 :])]
        stages[data.draw(st.sampled_from(fit))] += "m"
    sizes: dict[str, int] = {"num_stages": len(counts), "num_mtp": num_mtp}
    plain = f"E{'|'.join(stages)}L"
    layout = parse_layout(plain, sum(counts), **sizes)
    check_sound(layout)
    assert sum(stage.mtp for stage in layout.stages) == num_mtp
    short = str(layout)
    assert parse_layout(short, sum(counts), **sizes) == layout
    assert len(short.replace(",", "")) <= len(plain)


def test_the_owner_of_a_layer_that_is_not_there_is_refused() -> None:
    layout = read("Et|t|L", [1, 1, 0])
    assert [layout.owner(layer) for layer in (0, 1)] == [0, 1]
    with pytest.raises(ValueError, match=r"layer 2 is in no stage of Et\|t\|L.*0 to 1"):
        layout.owner(2)


REFUSED = {
    "EtxttL": r"'x' is no item of a layout.*t \(decoder layer\).*\n  EtxttL\n    \^ character 3 of",
    "etttL": r"'e' is no item",
    "Et\u0663ttL": r"'\\u0663' is no item.*\n  Et\?ttL\n    \^",
    "Et\x00ttL": r"'\\x00' is no item.*\n  Et\?ttL",
    "E((t|)ttL": r"never closed.*\n  .*\n   \^ character 2",
    "Ettt)L": r"closes none.*\n.*\n      \^ character 5",
    "Ettt()L": r"hold nothing.*\n.*\n      \^ character 5",
    "*2EtttL": r"nothing before this `\*`.*\n.*\n  \^ character 1",
    "E(*2t)ttL": r"nothing before this `\*`",
    "Et*1*3L": r"nothing before this `\*`.*\n.*\n      \^ character 5",
    "Ettt*L": r"followed by no number",
    "Ettt*-1L": r"followed by no number",
    "Ettt*0L": r"\*0 leaves nothing.*\n.*\n      \^ character 5",
    "Ettt|*00L": r"\*0 leaves nothing",
    "": r"E \(embedding\) must stand once.*it stands 0 times",
    "ttt|L": r"E \(embedding\) must stand once.*it stands 0 times",
    "EtttEL": r"E \(embedding\) must stand once.*it stands 2 times.*\n.*\n      \^",
    "tEttL": r"E .* must stand once, first in the first stage; it stands here.*\n.*\n   \^",
    "|EtttL": r"first in the first stage; it stands here",
    "Ettt|": r"L \(final norm, LM head and loss\) must stand once.*it stands 0 times",
    "Ettt|L*2": r"L .*it stands 2 times",
    "ELttt": r"L .*last in the last stage; it stands here.*\n.*\n   \^",
    "EtttL|": r"L .*last in the last stage; it stands here",
    "Ettt,m|L": r"1 m \(multi-token prediction layer\) placed; the model has none.*\n.*\n       \^",
    "Ettt,t|L": r"4 decoder layers \(t\) placed; the model has num_layers=3.*\n  Ettt,t\|L\nC",
    "Et|tL": r"2 decoder layers \(t\) placed; the model has num_layers=3",
    "Et|tt|L": r"3 stages are written.*pipeline_parallel_size \* virtual_pipeline_size = 2.*\n.*\n"
    r"Change `pipeline_layout`, `pipeline_parallel_size` or `virtual_pipeline_size`\.$",
    "EtttL": r"1 stages are written",
}


@pytest.mark.parametrize("text", REFUSED, ids=ascii)
def test_what_is_no_layout_of_the_model_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[text]) as caught:
        parse_layout(text, 3, num_stages=2)
    assert "Change `pipeline_layout`" in str(caught.value)


def test_multi_token_prediction_layers_are_counted_and_come_last() -> None:
    with pytest.raises(ValueError, match=r"0 m .* placed; the model has 1"):
        parse_layout("Et|L", 1, num_stages=2, num_mtp=1)
    with pytest.raises(ValueError, match=r"m .* must stand behind all t"):
        parse_layout("Em|tL", 1, num_stages=2, num_mtp=1)


HUGE = (
    "Et*99999999999L",
    "Et*" + "9" * 5000 + "L",
    "E|*99999999999L",
    "E" + "(t" * 30 + ")*9" * 30 + "L",
    "E" + "(t*9000)" * 1000 + "L",
    "t" * 1_000_000,
    "(" * 10_000,
    ")" * 10_000,
    "E" + "(" * 3000 + "t*9000" + ")" * 3000 + "*2L",
)


@pytest.mark.parametrize("text", HUGE, ids=range(len(HUGE)))
def test_texts_that_grow_without_bound_are_refused_with_a_short_message(text: str) -> None:
    told = r"grows beyond 10000|never closed|closes none|1000000 characters; legal: up to 10000"
    with pytest.raises(ValueError, match=told) as caught:
        parse_layout(text, 3, num_stages=2)
    assert len(str(caught.value)) < 400


@given(st.text("EtmL|*(),0129 x\n\x00\u0663", max_size=40))
@quick
def test_any_text_is_a_sound_layout_or_refused(text: str) -> None:
    items = Counter(text)
    sizes = {"num_stages": items["|"] + 1, "num_mtp": items["m"]}
    try:
        layout = parse_layout(text, items["t"], **sizes)
    except ValueError as error:
        told = str(error)
    else:
        check_sound(layout)
        assert parse_layout(str(layout), items["t"], **sizes) == layout
        return
    assert told.startswith("pipeline_layout: ")


# The even cut.


def every_cut(members: int, runs: int) -> Iterator[tuple[int, ...]]:
    for borders in combinations(range(1, members), runs - 1):
        yield tuple(b - a for a, b in pairwise((0, *borders, members)))


def run_costs(weights: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [sum(weights[a:b]) for a, b in pairwise((0, *accumulate(counts)))]


def rank_costs(costs: Sequence[int], ranks: Sequence[int]) -> list[int]:
    totals: Counter[int] = Counter()
    for rank, cost in zip(ranks, costs, strict=True):
        totals[rank] += cost
    return sorted(totals.values(), reverse=True)


def placements(pp: int, vpp: int) -> tuple[list[int], list[int]]:
    """Loop, and back and forth."""
    loop = [stage % pp for stage in range(pp * vpp)]
    there = list(range(pp))
    return loop, [rank for chunk in range(vpp) for rank in (there, there[::-1])[chunk % 2]]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.data())
@quick
def test_the_cut_is_that_of_trying_all(weights: list[int], data: st.DataObject) -> None:
    runs = data.draw(st.integers(1, len(weights)))

    def value(counts: tuple[int, ...]) -> Any:
        costs = run_costs(weights, counts)
        return max(costs), sum(cost * cost for cost in costs), counts

    best = min(every_cut(len(weights), runs), key=value)
    assert even_cut(weights, range(runs)) == best


def test_the_dearest_stage_comes_before_the_sum_of_squares() -> None:
    # 1 5 | 2 | 3 has squares of 49, but a run of 6; 1 | 5 | 2 3 has 51, and none above 5.
    assert even_cut((1, 5, 2, 3), range(3)) == (1, 1, 2)


@given(
    st.integers(1, 3),
    st.integers(2, 3),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
)
@quick
def test_ranks_are_as_even_as_can_be_where_layers_weigh_the_same(
    pp: int, vpp: int, more: int, embedding: int, head: int, is_v: bool
) -> None:
    ranks = placements(pp, vpp)[is_v]
    weights = [3] * (pp * vpp + more)
    weights[0] += embedding
    weights[-1] += head

    def value(counts: tuple[int, ...]) -> Any:
        costs = run_costs(weights, counts)
        return max(costs), rank_costs(costs, ranks)

    best = min(value(counts) for counts in every_cut(len(weights), len(ranks)))
    assert value(even_cut(weights, ranks)) == best


@given(st.integers(1, 3), st.integers(2, 3), st.booleans(), st.data())
@quick
def test_ranks_never_cost_the_dearest_stage(
    pp: int, vpp: int, is_v: bool, data: st.DataObject
) -> None:
    ranks = placements(pp, vpp)[is_v]
    sizes = st.lists(st.integers(0, 6), min_size=len(ranks), max_size=len(ranks) + 4)
    weights = data.draw(sizes)
    plain = run_costs(weights, even_cut(weights, range(len(ranks))))
    costs = run_costs(weights, even_cut(weights, ranks))
    assert max(costs) == max(plain)
    assert rank_costs(costs, ranks) <= rank_costs(plain, ranks)


@pytest.mark.parametrize(
    ("costs", "num_stages", "text"),
    [
        # A head of two layers, dense layers first that weigh half.
        (LayerCosts(0.0, (1.0,) * 8, 2.0), 2, "Et*5|t*3,L"),
        (LayerCosts(0.1, (0.5, 0.5, *(1.0,) * 6), 1.0), 4, "Et*3|tt|tt|tL"),
        (LayerCosts(0.0, (1.0,) * 7, 0.0), 4, "Et|tt|tt|ttL"),
        (LayerCosts(0.0, (0.1,) * 6, 0.1 + 0.1), 4, "Et|tt|tt|tL"),
        (LayerCosts(0.0, (0.0,) * 3, 0.0), 2, "Et|ttL"),
    ],
)
def test_even_layouts(costs: LayerCosts, num_stages: int, text: str) -> None:
    layout = even_layout(costs, num_stages)
    assert str(layout) == text
    check_sound(layout)


def test_the_ranks_of_virtual_stages_decide_between_equal_dearest_stages() -> None:
    costs = LayerCosts(0.0, (1.0,) * 10, 1.0)
    # Dearest stage 3 in any case. Rank 0 has stages 0 2 in a loop, 0 3 with the head there and
    # back.
    loop, there_and_back = placements(2, 2)
    for placement in (loop, there_and_back):
        layout = even_layout(costs, 4, placement=placement)
        cost = [float(count) for count in counts_of(layout)]
        cost[3] += 1.0
        assert max(cost) == 3.0
        assert rank_costs(cost, placement) == [6.0, 5.0]  # type: ignore[arg-type]


def test_more_stages_than_layers_are_refused_with_a_layout_that_would_do() -> None:
    with pytest.raises(ValueError, match="num_layers=3 cannot") as caught:
        even_layout(LayerCosts(0.0, (1.0,) * 3, 0.0), 8, placement=[0, 1, 2, 3] * 2)
    message = str(caught.value)
    assert "pp * vpp = 4 * 2 = 8 stages: 5 would have no layer" in message
    for field in ("pipeline_parallel_size", "virtual_pipeline_size", "pipeline_layout"):
        assert f"`{field}`" in message
    offered = message.split("'")[1]
    assert counts_of(parse_layout(offered, 3, num_stages=8)) == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="is no cost"):
        LayerCosts(0.0, (1.0, bad), 0.0)


# What layers weigh.


def test_plain_numbers_add_up_to_the_flops_of_a_training_step() -> None:
    shape = ModelShape(64, 264, 32, 16, 1, 96, 2, 2, 40, 24)
    sizes = {"hidden_size": 64, "query_size": 32, "key_value_size": 16}
    weights = [
        weights_of_layer(**sizes, mlp_width=width) for width in (2 * 40 + 24, 96, 2 * 40 + 24)
    ]
    core = core_flops(query_size=32, sequence_length=10)
    costs = layer_costs(weights, head_weights=64 * 264, hidden_size=64, core=core)
    forward = sum(costs.layers) + costs.head
    assert 3 * forward == training_flops(shape, tokens=1, sequence_length=10)
    assert costs.layers[0] > costs.layers[1] > costs.embedding > 0


SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts_per_tok": 2,
}
# q and o, k and v, two norms.
ATTENTION = 2 * 16 * 16 + 2 * 16 * 8 + 2 * 16
HEAD = 16 * 50 + 16


def parts_of(model: nn.Module) -> ModelParts:
    return find_parts(nn.ModuleDict({"model": model}))


@pytest.mark.parametrize("tied", [False, True])
def test_the_builtin_decoder_is_weighed_by_its_parameters(tied: bool) -> None:
    config = DecoderConfig(
        **SIZES,
        num_experts=8,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        mlp_only_layers=(0,),
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        costs = costs_of(parts_of(Decoder(config)), core=7.0)
    dense = ATTENTION + 3 * 16 * 24
    moe = ATTENTION + 8 * 16 + 2 * 3 * 16 * 12 + 3 * 16 * 20
    assert costs.layers == (2 * dense + 7, 2 * moe + 7, 2 * moe + 7)
    assert (costs.embedding, costs.head) == (2 * 16, 2 * HEAD)


def test_hugging_face_models_are_weighed_by_their_parameters() -> None:
    transformers = pytest.importorskip("transformers")
    mixtral = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    qwen = transformers.Qwen2MoeConfig(
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        num_experts=6,
        moe_intermediate_size=4,
        shared_expert_intermediate_size=8,
        mlp_only_layers=[1],
    )
    with torch.device("meta"):
        models = [transformers.AutoModelForCausalLM.from_config(c) for c in (mixtral, qwen)]
    found, shared = (costs_of(parts_of(model)) for model in models)
    assert found.layers == (2 * (ATTENTION + 4 * 16 + 2 * 3 * 16 * 24),) * 3
    assert found.head == 2 * HEAD
    # Biases of q, k and v; router, shared expert and its gate.
    biased = ATTENTION + 16 + 2 * 8
    moe = 2 * (biased + 6 * 16 + 2 * 3 * 16 * 4 + 3 * 16 * 8 + 16)
    assert shared.layers == (moe, 2 * (biased + 3 * 16 * 24), moe)


class Block(nn.Module):
    """Stacked experts, and no router that says how many of them a token uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.zeros(4, 6, 5))
        self.experts.down_proj = nn.Parameter(torch.zeros(4, 5, 3))


def test_experts_per_token_that_stand_nowhere_must_be_given() -> None:
    parts = parts_of(nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])}))
    assert costs_of(parts, top_k=1) == LayerCosts(0, (90.0, 90.0), 0)
    assert costs_of(parts, top_k=4).layers == costs_of(parts, top_k=9).layers == (360.0, 360.0)
    with pytest.raises(ValueError, match=r"model.layers.0.experts: how many of its 4 experts"):
        costs_of(parts)
