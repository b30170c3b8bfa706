"""Making a model small: the numbers fall, the structure stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_fold.model.decoder import Decoder, DecoderConfig
from lightning_fold.verify.product.shrink import (
    describe,
    shrink_cores,
    shrunk_fields,
    shrunk_model,
    silence,
)

LARGE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "attention_dropout": 0.1,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "mlp_only_layers": [],
}


def shrunk(**more: object) -> dict[str, object]:
    fields = LARGE | more
    return fields | shrunk_fields(fields)


def test_sizes_fall_and_heads_stay_grouped() -> None:
    small = shrunk()
    assert small["hidden_size"] == 32
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (8, 2)
    assert (small["num_experts"], small["num_experts_per_tok"]) == (8, 4)
    assert small["tie_word_embeddings"] is True
    assert small["attention_dropout"] == 0.0


@pytest.mark.parametrize(("kv", "expected"), [(1, 1), (32, 8), (8, 2), (16, 4)])
def test_kinds_of_key_value_heads_stay(kv: int, expected: int) -> None:
    assert shrunk(num_key_value_heads=kv)["num_key_value_heads"] == expected


def test_every_kind_of_layer_stays() -> None:
    kinds = (["linear"] * 3 + ["full"]) * 12
    small = shrunk(layer_types=kinds)
    assert small["layer_types"] == kinds[:4]
    assert small["num_hidden_layers"] == 4
    assert shrunk(decoder_sparse_step=2)["num_hidden_layers"] == 2


def test_dense_layers_stay_dense() -> None:
    assert shrunk(mlp_only_layers=[0, 1])["mlp_only_layers"] == [0, 1]
    assert shrunk(mlp_only_layers=[40])["mlp_only_layers"] == [3]
    assert shrunk(first_k_dense_replace=3)["first_k_dense_replace"] == 1


def test_groups_of_experts_hold_enough_of_them() -> None:
    small = shrunk(n_group=8, topk_group=4)
    groups, chosen, per_token = (small[n] for n in ("n_group", "topk_group", "num_experts_per_tok"))
    assert (groups, chosen) == (4, 2)
    assert isinstance(per_token, int)
    assert per_token <= 2 * 8 // 4


def test_a_padding_token_beyond_the_vocabulary_goes() -> None:
    assert shrunk(pad_token_id=151643)["pad_token_id"] is None
    assert shrunk(pad_token_id=0)["pad_token_id"] == 0


def test_small_fields_stay_and_nothing_is_told_of_them() -> None:
    small = shrunk()
    assert shrunk_fields(small) == {}
    assert describe({}) == ""
    assert describe({"hidden_size": (2048, 32)}) == "shrunk: hidden_size 2048 -> 32"


def test_models_under_a_module_are_rebuilt_by_their_config() -> None:
    root = nn.Module()
    config = DecoderConfig(hidden_size=64, num_experts=16, mlp_only_layers=(1,))
    root.model = Decoder(config)
    changes = shrink_cores(root)
    assert root.model.config.num_experts == 8
    assert root.model.config.mlp_only_layers == (1,)
    assert changes["num_experts"] == (16, 8)
    assert shrunk_model(nn.Linear(2, 2)) is None


def test_randomness_is_turned_off_and_told() -> None:
    root = nn.Sequential(nn.Dropout(0.3), nn.Linear(2, 2))
    root.attention_dropout = 0.1
    assert silence(root) == {".attention_dropout": (0.1, 0.0), "0.p": (0.3, 0.0)}
    x = torch.ones(4, 2)
    assert torch.equal(root(x), root(x))
