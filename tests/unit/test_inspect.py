"""Finding the parts of a model, and the reasons for which a container is not folded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fold_kernels.swiglu import swiglu
from lightning_fold.model.inspect import find_parts
from lightning_fold.moe.layer import FoldedExperts

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts_per_tok": 2,
}


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def qwen3_moe() -> nn.Module:
    more = {"num_experts": 6, "moe_intermediate_size": 4, "mlp_only_layers": [0]}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3MoeConfig(**SIZES, **more)
        )


class Holder(nn.Module):
    """Stands for the LightningModule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Experts(nn.Module):
    """A stacked container of a user's own."""

    def __init__(self, gate_up: tuple[int, ...] = (4, 8, 6), **flags: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(gate_up))
        self.down_proj = nn.Parameter(torch.zeros(4, 6, 4))
        for name, value in flags.items():
            setattr(self, name, value)


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), experts
        self.shared_expert, self.shared_expert_gate = nn.Linear(6, 6), nn.Linear(6, 1)


def in_layers(experts: nn.Module) -> Holder:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"mlp": Block(experts)})])
    return Holder(model)


def test_parts_of_mixtral() -> None:
    parts = find_parts(Holder(mixtral()))
    assert parts.core_name == "model"
    layers = [f"model.model.layers.{i}" for i in (0, 1)]
    assert [spec.name for spec in parts.experts] == [f"{name}.mlp.experts" for name in layers]
    assert list(parts.routers) == [f"{name}.mlp.gate" for name in layers]
    assert [name for name, _ in parts.layers] == layers
    assert all((s.num_experts, s.width, s.refusal) == (4, 8, None) for s in parts.experts)


def test_dense_layers_are_layers_without_experts() -> None:
    parts = find_parts(Holder(qwen3_moe()))
    assert [spec.name for spec in parts.experts] == ["model.model.layers.1.mlp.experts"]
    assert len(parts.layers) == 2


def test_shared_experts_and_their_gates_are_found() -> None:
    parts = find_parts(in_layers(Experts()))
    assert list(parts.shared) == [
        "model.layers.0.mlp.shared_expert",
        "model.layers.0.mlp.shared_expert_gate",
    ]


def test_the_activation_takes_gate_then_up() -> None:
    (spec,) = find_parts(in_layers(Experts())).experts
    gate, up = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 5.0]])
    wanted = nn.functional.silu(gate) * up
    torch.testing.assert_close(spec.activation(torch.cat([gate, up], 1)), wanted)


def test_swiglu_is_recognised_and_nothing_else_is_taken_for_it() -> None:
    for holder in (Holder(mixtral()), Holder(qwen3_moe()), in_layers(Experts())):
        assert {spec.activation for spec in find_parts(holder).experts} == {swiglu}
    other = mixtral()
    other.model.layers[0].mlp.experts.act_fn = nn.GELU()
    other.model.layers[1].mlp.experts._apply_gate = lambda x: x.chunk(2, -1)[0]
    assert swiglu not in {spec.activation for spec in find_parts(Holder(other)).experts}


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (Experts(is_transposed=True), "stored transposed"),
        (Experts(has_post_expert_norm=True), "normalises inside each expert"),
        (Experts(is_concatenated=False), "interleaved"),
        (Experts(gate_up=(4, 9, 6)), r"\(4, 9, 6\) and \(4, 6, 4\) are not"),
        (Experts(bias=nn.Parameter(torch.zeros(4))), r"further parameters \(bias\)"),
        (Experts(norm=nn.LayerNorm(3)), r"further parameters \(norm\)"),
        (nn.ModuleList([nn.Linear(6, 6)]), "a list of modules"),
    ],
)
def test_a_container_that_cannot_be_folded_says_why(experts: nn.Module, reason: str) -> None:
    (spec,) = find_parts(in_layers(experts)).experts
    assert spec.refusal is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(spec.refusal)


def test_a_model_without_moe_blocks_is_refused_with_its_modules() -> None:
    with pytest.raises(ValueError, match=r"no MoE block(.|\n)*model: Linear"):
        find_parts(Holder(nn.Linear(2, 2)))


def test_blocks_in_two_submodules_are_refused() -> None:
    holder = in_layers(Experts())
    holder.teacher = in_layers(Experts()).model
    with pytest.raises(ValueError, match="found them under model, teacher"):
        find_parts(holder)


def test_a_compiled_core_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wrapped by torch\.compile"):
        find_parts(Holder(torch.compile(nn.Linear(2, 2))))


def test_a_module_folded_by_another_strategy_is_refused() -> None:
    holder = in_layers(Experts())
    experts: Any = holder.model.layers[0]["mlp"].experts
    experts.forward = FoldedExperts.__new__(FoldedExperts)
    with pytest.raises(ValueError, match="folded by another FoldedMoEStrategy"):
        find_parts(holder)
