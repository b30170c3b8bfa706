"""Families and the table of gradient sums."""

import pytest

from lightning_fold.params import Family, assign_families, reduce_axes
from lightning_fold.params.shard import MESH_OF_AXES

OWNERS = {
    "experts": ["model.layers.0.mlp.experts"],
    "routers": ["model.layers.0.mlp.gate"],
    "shared": ["model.layers.0.mlp.shared_expert", "model.layers.0.mlp.shared_expert_gate"],
}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", Family.EXPERT),
        ("model.layers.0.mlp.gate.weight", Family.ROUTER),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", Family.SHARED),
        ("model.layers.0.mlp.shared_expert_gate.weight", Family.SHARED),
        ("model.layers.0.mlp.gate_norm.weight", Family.DENSE),
        ("model.layers.1.mlp.gate_proj.weight", Family.DENSE),
        ("model.embed_tokens.weight", Family.DENSE),
    ],
)
def test_the_owning_module_decides(name: str, family: Family) -> None:
    assert assign_families([name], **OWNERS) == {name: family}


@pytest.mark.parametrize("family", [Family.DENSE, Family.SHARED, Family.ROUTER])
def test_token_spreading_axes_are_summed_unless_sharded(family: Family) -> None:
    assert reduce_axes(family, ()) == ("dp", "cp", "tp")
    assert reduce_axes(family, ("tp",)) == ("dp", "cp")


def test_experts_are_summed_over_edp_only() -> None:
    assert reduce_axes(Family.EXPERT, ()) == ("edp",)
    assert reduce_axes(Family.EXPERT, ("ep", "etp")) == ("edp",)


def test_every_line_of_the_table_has_a_mesh() -> None:
    lines = {
        reduce_axes(family, axes) for family in Family for axes in ((), ("tp",), ("ep", "etp"))
    }
    assert lines == set(MESH_OF_AXES)
