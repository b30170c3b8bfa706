"""What pipeline stages hold, as one: order of names, parameter groups, options, optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fold.checkpoint import WholeModel
from lightning_fold.checkpoint.stage_groups import merge_groups, merge_rests, order_of
from lightning_fold.checkpoint.survey import by_optimizer

META = ((1,), torch.float32)
ORDER = order_of(["a", "b", "c", "d", "e"])


def whole_of(*names: str) -> WholeModel:
    return WholeModel(dict.fromkeys(names, META), tuple(names), dict.fromkeys(names, (0,)))


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ([["a", "c"], ["b"]], ["a", "b", "c"]),
        ([["c", "a"], ["b", "a"]], ["a", "b", "c"]),
        ([["b"]], ["b"]),
        ([], []),
    ],
)
def test_names_of_stages_follow_the_whole_model(held: list[list[str]], wanted: list[str]) -> None:
    assert whole_of("a", "b", "c").in_order(held) == wanted


def test_a_name_that_was_added_goes_beside_its_closest_neighbour() -> None:
    whole = whole_of("l.0.w", "l.1.w", "l.2.w", "l.2.gate.w", "n.w")
    held = [
        ["l.0.w", "l.0._extra_state", "l.2._extra_state", "l.2.w", "l.2.gate.w", "l.2.gate.bias"],
        ["l.1._extra_state", "l.1.w", "n.w", "n.b"],
    ]
    assert whole.in_order(held) == [
        "l.0.w",
        "l.0._extra_state",
        "l.1._extra_state",
        "l.1.w",
        "l.2._extra_state",
        "l.2.w",
        "l.2.gate.w",
        "l.2.gate.bias",
        "n.w",
        "n.b",
    ]


def test_a_whole_model_is_described_in_its_own_order() -> None:
    module = nn.Module()
    module.embed, module.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    module.head.weight = module.embed.weight
    module.register_buffer("table", torch.zeros(2, dtype=torch.int64))
    whole = WholeModel.of(module, lambda name: (0, 1) if "weight" in name else (1,))
    assert list(whole.state) == list(module.state_dict())
    assert whole.state["table"] == ((2,), torch.int64)
    assert whole.parameters == ("embed.weight",)
    assert whole.owners == {"table": (1,), "embed.weight": (0, 1), "head.weight": (0, 1)}
    with pytest.raises(AssertionError, match=r"no pipeline stage holds table"):
        WholeModel.of(module, lambda name: () if name == "table" else (0,))


def test_groups_are_those_of_one_process_and_may_be_empty_on_a_stage() -> None:
    merged = merge_groups([[[], ["a", "d"]], [["c"], ["b", "e"]]], ORDER)
    assert merged.names == [["c"], ["a", "b", "d", "e"]]
    assert merged.in_order


def test_groups_in_another_order_go_stage_after_stage() -> None:
    merged = merge_groups([[["d", "a"]], [["e", "b"]]], ORDER)
    assert merged.names == [["d", "a", "e", "b"]]
    assert not merged.in_order


def test_a_parameter_that_nobody_knew_of_has_no_place_in_the_order() -> None:
    assert not merge_groups([[["a", "new"]], [["b"]]], ORDER).in_order


def test_a_tied_parameter_counts_once() -> None:
    assert merge_groups([[["a", "b"]], [["a", "c"]]], ORDER).names == [["a", "b", "c"]]


def test_stages_whose_groups_cannot_be_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups on every stage \(stage 0: 1, stage 1: 2\)"):
        merge_groups([[["a"]], [["b"], []]], ORDER)
    with pytest.raises(ValueError, match=r"a lies on several stages, in parameter group 0 of one"):
        merge_groups([[["a"], []], [[], ["a"]]], ORDER)
    with pytest.raises(ValueError, match=r"numbers of optimizers \(stage 0: 1, stage 1: 0\)"):
        by_optimizer([[1], []])


def rest(names: list[str], **options: Any) -> dict[str, Any]:
    return {"param_groups": [{"params": names, **options}], "values": {n: {} for n in names}}


def test_options_and_the_users_names_are_kept() -> None:
    first = rest(["a", "c"], lr=0.1, param_names=["A", "C"])
    second = rest(["b"], lr=0.1, param_names=["B"])
    merged = merge_rests([first, second], ORDER)
    group = {"params": ["a", "b", "c"], "param_names": ["A", "B", "C"], "lr": 0.1}
    assert merged == {"param_groups": [group], "values": {"a": {}, "b": {}, "c": {}}}


@pytest.mark.parametrize("other", [{"lr": 0.2}, {"lr": torch.tensor(0.2)}, {}])
def test_options_that_differ_between_stages_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"group 0 has lr=0\.1 on stage 0 and lr=.* on stage 1"):
        merge_rests([rest(["a"], lr=0.1), rest(["b"], **other)], ORDER)


def test_options_may_be_tensors() -> None:
    each = [rest([name], lr=torch.tensor(0.1), betas=(0.9, 0.99)) for name in "ab"]
    assert merge_rests(each, ORDER)["param_groups"][0]["params"] == ["a", "b"]
