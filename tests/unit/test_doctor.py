"""Every refusal of the doctor, on its message; and that nothing legal is refused."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fold.topology.doctor import (
    DEGREE_FIELDS,
    check_experts,
    check_heads,
    largest_legal_ep,
    nearest,
    resolve_folding,
)
from lightning_fold.topology.folding import Folding, divisors, legal_foldings

ONES = {"tp": 1, "cp": 1, "pp": 1, "etp": 1, "ep": 1}


def refusal(world=8, **degrees):
    with pytest.raises(ValueError, match="Change `") as caught:
        resolve_folding(world, **{**ONES, **degrees})
    return str(caught.value)


def test_legal_degrees_give_the_folding():
    folding = resolve_folding(16, tp=2, cp=2, pp=2, etp=1, ep=4)
    assert folding == Folding(tp=2, cp=2, dp=2, pp=2, etp=1, ep=4, edp=2)


def test_accepts_exactly_the_legal_foldings():
    degrees = range(1, 9)
    legal = set(legal_foldings(8, cp=degrees, pp=degrees))
    accepted = set()
    for tp, cp, pp, etp, ep in itertools.product(degrees, repeat=5):
        try:
            accepted.add(resolve_folding(8, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep))
        except ValueError as error:
            assert "Change `" in str(error)  # noqa: PT017
    assert accepted == legal


def test_moe_view_that_does_not_close_is_the_model_message():
    assert refusal(tp=2, cp=2, etp=3, ep=2) == (
        "Folding does not close: etp*ep*edp must equal tp*cp*dp per pipeline stage.\n"
        "  tp=2 cp=2 dp=2  ->  stage_size = 8\n"
        "  etp=3 ep=2      ->  3*2 = 6 does not divide 8\n"
        "Legal ep for etp=3: none.  Legal etp for ep=2: 1, 2, 4."
        "  Change `expert_tensor_parallel_size`."
    )


def test_attention_view_that_does_not_close():
    message = refusal(16, tp=3, pp=2)
    assert "world=16 pp=2  ->  stage_size = 8" in message
    assert "3*1 = 3 does not divide 8" in message
    assert "Legal tp for cp=1: 1, 2, 4, 8." in message
    assert message.endswith("Legal cp for tp=3: none.  Change `tensor_parallel_size`.")


def test_pipeline_that_does_not_divide_the_world():
    message = refusal(12, pp=5)
    assert "pp=5 does not divide world=12" in message
    assert message.endswith("Legal pp: 1, 2, 3, 4, 6, 12.  Change `pipeline_parallel_size`.")


def test_either_degree_may_change_where_either_helps():
    message = refusal(etp=2, ep=8)
    assert "Legal ep for etp=2: 1, 2, 4.  Legal etp for ep=8: 1." in message
    assert message.endswith("Change `expert_parallel_size` or `expert_tensor_parallel_size`.")


def test_both_degrees_must_change_where_neither_helps_alone():
    message = refusal(etp=3, ep=5)
    assert message.endswith("Change `expert_parallel_size` and `expert_tensor_parallel_size`.")


@pytest.mark.parametrize("axis", list(DEGREE_FIELDS))
@pytest.mark.parametrize("degree", [0, -1, True, 2.0, "2", None])
def test_degree_of_the_wrong_kind_names_its_field(axis, degree):
    message = refusal(**{axis: degree})
    assert f"{axis}={degree!r}" in message
    assert message.endswith(f"Legal {axis}: 1, 2, 3, ...  Change `{DEGREE_FIELDS[axis]}`.")


@pytest.mark.parametrize("world", [0, -8, False, "8"])
def test_world_of_the_wrong_kind_names_the_trainer(world):
    assert refusal(world).endswith("Change `devices * num_nodes`.")


@given(
    st.integers(1, 24),
    *(st.integers(1, 9) for _ in range(4)),
)
def test_values_called_legal_are_legal(world, tp, cp, etp, ep):
    try:
        resolve_folding(world, tp=tp, cp=cp, pp=1, etp=etp, ep=ep)
    except ValueError as error:
        degrees = {"tp": tp, "cp": cp, "pp": 1, "etp": etp, "ep": ep}
        view = ("tp", "cp") if world % (tp * cp) else ("ep", "etp")
        others = {axis: 1 for axis in degrees if axis not in view}
        listed = {
            axis: [int(value) for value in values.split(", ") if value != "none"]
            for axis, values in re.findall(r"Legal (\w+) for \w+=\d+: ([\d, none]+)\.", str(error))
        }
        assert set(listed) == set(view)
        for axis in view:
            for value in range(1, world + 1):
                changed = {**degrees, **others, axis: value}
                product = changed[view[0]] * changed[view[1]]
                assert (value in listed[axis]) == (world % product == 0)


EIGHT = Folding.from_world(8, ep=8)
EXPERTS = {"num_experts": 64, "width": 96}


def test_experts_that_ep_does_not_divide():
    with pytest.raises(ValueError, match="cannot be split") as caught:
        check_experts(
            "model.layers[3].mlp.experts", **{**EXPERTS, "num_experts": 60}, folding=EIGHT
        )
    assert str(caught.value) == (
        "model.layers[3].mlp.experts: 60 experts cannot be split over ep=8; legal ep: 1 2 4 "
        "(they divide 60 and stage_size/etp = 8/1 = 8).  Change `expert_parallel_size`."
    )


def test_width_that_etp_does_not_divide():
    folding = Folding.from_world(8, etp=4, ep=2)
    with pytest.raises(ValueError, match="cannot be split") as caught:
        check_experts("m.experts", **{**EXPERTS, "width": 90}, folding=folding)
    assert str(caught.value) == (
        "m.experts: expert width 90 cannot be split over etp=4; legal etp: 1 2 "
        "(they divide 90 and stage_size/ep = 8/2 = 4).  Change `expert_tensor_parallel_size`."
    )


def test_experts_that_fit_pass():
    check_experts("m", **EXPERTS, folding=EIGHT)
    check_experts("m", **EXPERTS, folding=Folding.from_world(8, etp=8))


def test_heads_that_tp_does_not_divide():
    with pytest.raises(ValueError, match="cannot be split") as caught:
        check_heads("model.layers[0].self_attn", heads=12, kv_heads=4, folding=tp_of(8))
    assert str(caught.value) == (
        "model.layers[0].self_attn: 12 heads cannot be split over tp=8; legal tp: 1 2 4 "
        "(they divide 12 heads, and divide 4 key/value heads or are a multiple of them)."
        "  Change `tensor_parallel_size`."
    )


def test_kv_heads_that_tp_neither_divides_nor_replicates():
    with pytest.raises(ValueError, match=r"6 key/value heads can be neither .* tp=4") as caught:
        check_heads("a", heads=24, kv_heads=6, folding=tp_of(4))
    assert "legal tp: 1 2 (" in str(caught.value)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp"), [(8, 8, 8), (8, 4, 2), (8, 2, 8), (8, 1, 4), (6, 3, 1)]
)
def test_heads_that_split_or_replicate_pass(heads, kv_heads, tp):
    check_heads("a", heads=heads, kv_heads=kv_heads, folding=tp_of(tp))


def tp_of(size):
    return Folding.from_world(8, tp=size)


@given(st.integers(1, 256), st.integers(1, 256))
def test_largest_legal_ep_is_the_largest_that_divides_both(world, num_experts):
    legal = [ep for ep in divisors(world) if num_experts % ep == 0]
    assert largest_legal_ep(world, num_experts) == legal[-1]


def test_nearest_word():
    fields = DEGREE_FIELDS.values()
    assert nearest("tensor_model_parallel_size", fields) == "tensor_parallel_size"
    assert nearest("expert_paralel_size", fields) == "expert_parallel_size"
    assert nearest("learning_rate", fields) is None
    assert nearest("anything", ()) is None
