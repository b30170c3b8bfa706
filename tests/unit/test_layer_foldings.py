"""Foldings of single layers: what may be written, and what is refused."""

import doctest
from typing import Any

import pytest

from lightning_fold.topology import layer_foldings as module
from lightning_fold.topology.folding import Folding
from lightning_fold.topology.layer_foldings import check_layers, layer_foldings

BASE = Folding.from_world(8, tp=2, cp=2, etp=1, ep=4)


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_runs_numbers_and_commas_name_layers() -> None:
    written = {"0-1": {"etp": 2, "ep": 2}, 4: {"ep": 8}, "6, 8-9": {"expert_parallel_size": 2}}
    found = layer_foldings(written, BASE)
    assert sorted(found) == [0, 1, 4, 6, 8, 9]
    assert (found[1].etp, found[1].ep, found[1].edp) == (2, 2, 2)
    assert (found[4].etp, found[4].ep, found[4].edp) == (1, 8, 1)
    assert (found[9].etp, found[9].ep) == (1, 2)
    assert {(f.tp, f.cp, f.dp) for f in found.values()} == {(2, 2, 2)}


def test_none_names_no_layers() -> None:
    assert layer_foldings(None, BASE) == {}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({"3-1": {"ep": 2}}, r"'3-1' names no layers"),
        ({"first": {"ep": 2}}, r"'first' names no layers"),
        ({-1: {"ep": 2}}, r"-1 names no layers"),
        ({"0-2": {"ep": 2}, "2": {"ep": 4}}, r"layer 2 is named twice"),
        ({"0": {"epp": 2}}, r"`epp` of '0' is no degree.*Change it to `ep`"),
        ({"0": {"tp": 2}}, r"`tp` of '0' is no degree"),
        ({"0": 2}, r"must be followed by degrees"),
        ({"0": {}}, r"must be followed by degrees"),
        ({"0": {"ep": 3}}, r"(?s)moe_layers: '0': Folding does not close.*Change `moe_layers`\.$"),
        ({"0": {"ep": 0}}, r"ep=0 of '0' counts ranks"),
        ({"0": {"ep": "2"}}, r"moe_layers: ep='2' of '0' counts ranks.*Change `moe_layers`"),
    ],
)
def test_what_cannot_be_is_refused(written: dict[Any, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        layer_foldings(written, BASE)


def test_layers_must_be_there_and_have_experts() -> None:
    moe = {0: "layers.0.mlp.experts", 2: "layers.2.mlp.experts"}
    check_layers({0: BASE, 2: BASE}, num_layers=3, moe=moe)
    with pytest.raises(ValueError, match=r"layer 1 has no experts.*Legal layers: 0, 2"):
        check_layers({1: BASE}, num_layers=3, moe=moe)
    with pytest.raises(ValueError, match=r"layer 7 is not in the model.*3 layers"):
        check_layers({7: BASE}, num_layers=3, moe=moe)
