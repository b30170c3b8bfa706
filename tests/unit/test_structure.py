"""What tensor parallelism accepts of a decoder, and the reasons for which it refuses another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_fold.model.inspect import find_parts
from lightning_fold.model.structure import DecoderParts, check_decoder
from lightning_fold.topology.folding import Folding


class Holder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def build(**overrides: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 6,
        "moe_intermediate_size": 4,
        "num_experts": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "mlp_only_layers": [0],
    }
    with torch.device("meta"):
        config = transformers.Qwen3MoeConfig(**{**sizes, **overrides})
        return transformers.AutoModelForCausalLM.from_config(config)


def check(model: nn.Module, tp: int = 2) -> DecoderParts:
    return check_decoder(find_parts(Holder(model)), Folding.from_world(tp, tp=tp))


def test_a_decoder_of_dense_and_moe_layers_is_accepted() -> None:
    parts = check(build())
    assert [layer.dense_mlp is not None for layer in parts.layers] == [True, False]
    assert parts.lm_head is not None


def test_key_value_heads_may_be_fewer_than_tp() -> None:
    assert len(check(build(intermediate_size=8), tp=4).layers) == 2


class WideLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _replace_q(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj = WideLinear(8, 16)


def _norm_over_all_heads(model: Any) -> None:
    model.model.layers[1].self_attn.q_norm.weight = nn.Parameter(torch.zeros(16))


def _extra_parameter(model: Any) -> None:
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))


def _no_attention(model: Any) -> None:
    del model.model.layers[0].self_attn


def _mixer(model: Any) -> None:
    model.model.layers[0].conv = nn.Conv1d(8, 8, 3)


def _outside(model: Any) -> None:
    model.model.projector = nn.Linear(8, 8)


def _gated_q(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj = nn.Linear(8, 32)


def _head(model: Any) -> None:
    model.lm_head = WideLinear(8, 16)


def _embedding(model: Any) -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 2

    model.model.embed_tokens = Scaled(16, 8)


def _hidden_states(model: Any) -> None:
    model.config.output_hidden_states = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_replace_q, r"layers.0.self_attn.q_proj cannot run .*missing or not nn.Linear"),
        (_norm_over_all_heads, r"layers.1.self_attn.q_norm.weight .*16 elements and head_dim is 4"),
        (_extra_parameter, r"layers.0.self_attn .*parameters sinks are not known"),
        (_no_attention, r"layers.0 .*no `self_attn`"),
        (_mixer, r"layers.0.conv .*Conv1d is neither MLP nor norm"),
        (_outside, r"model.model.projector.weight .*outside embed_tokens"),
        (_gated_q, r"q_proj gives 32 features, o_proj takes 16"),
        (_head, r"model.lm_head .*WideLinear, not nn.Linear"),
        (_embedding, r"embed_tokens .*Scaled computes more than nn.Embedding"),
        (_hidden_states, r"config.output_hidden_states .*slice of every sequence"),
    ],
)
def test_refusals_name_the_module_and_the_reason(
    change: Callable[[Any], None], reason: str
) -> None:
    model = build()
    change(model)
    with pytest.raises(ValueError, match=reason):
        check(model)


def test_width_and_heads_must_be_divided_by_tp() -> None:
    with pytest.raises(ValueError, match="width 6 cannot be split over tp=4"):
        check(build(num_key_value_heads=4), tp=4)
    with pytest.raises(ValueError, match="4 heads cannot be split over tp=3"):
        check(build(), tp=3)


def test_a_model_without_base_is_refused() -> None:
    model = build()
    model.model.tokens = model.model.embed_tokens
    del model.model.embed_tokens
    with pytest.raises(ValueError, match="no submodule holds `embed_tokens`"):
        check(model)
