"""Which decoder layers may run in pieces: those that pass, what is refused, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fold.model.decoder import Decoder, DecoderConfig, DecoderLayer, SparseMoeBlock
from lightning_fold.model.inspect import find_parts
from lightning_fold.pipeline.probe import probe
from lightning_fold.pipeline.segment_probe import reason_against
from lightning_fold.pipeline.segments import MoeLayer, moe_layers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.15,
}


class Wrapped(nn.Module):
    """What a LightningModule is: its core under one name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def tried(model: nn.Module) -> list[tuple[MoeLayer | None, str | None]]:
    """Each layer, None where it is dense, and why it cannot run in pieces."""
    root = Wrapped(model)
    parts = find_parts(root)
    anatomy = probe(root, parts)
    found = moe_layers(root, parts, in_tuple=anatomy.in_tuple)
    results: list[tuple[MoeLayer | None, str | None]] = []
    for i, layer in found.items():
        if isinstance(layer, MoeLayer):
            results.append((layer, reason_against(layer, anatomy.calls[i], anatomy.width)))
        else:
            results.append((None, layer))
    return results


def reasons(model: nn.Module) -> list[str | None]:
    return [reason for _, reason in tried(model)]


def build(
    layer: type[nn.Module] = DecoderLayer,
    block: type[nn.Module] = SparseMoeBlock,
    prepare: Callable[[Any], None] = lambda layer: None,
    **options: Any,
) -> Decoder:
    """The built-in decoder with other code in its layers or blocks."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**SIZES, **options}))
    for each in model.model.layers:
        each.__class__, each.mlp.__class__ = layer, block
        prepare(each)
    return model


def reason(*args: Any, **options: Any) -> str | None:
    found = reasons(build(*args, **options, num_hidden_layers=1))
    return found[0]


# ------------------------------------------------------------ the built-in decoder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shared_expert_intermediate_size": 16},
        {"hidden_dropout": 0.1, "attention_dropout": 0.2, "shared_expert_intermediate_size": 16},
        {"router_jitter_noise": 0.1},
        {"scoring_func": "sigmoid", "n_group": 2, "use_expert_bias": True},
        {"norm_topk_prob": False, "router_dtype": "fp32"},
        {"num_experts_per_tok": 4},
    ],
    ids=["plain", "shared", "dropout", "jitter", "groups", "fp32-router", "all-experts"],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_of_the_built_in_decoder_pass(options: dict[str, Any], device: str) -> None:
    with torch.device(device):
        model = build(**options)
    assert reasons(model) == [None, None]


def test_a_dense_layer_is_no_moe_layer() -> None:
    model = Decoder(DecoderConfig(**SIZES, mlp_only_layers=(0,)))
    (dense, why), (moe, against) = tried(model)
    assert dense is None
    assert why is None
    assert isinstance(moe, MoeLayer)
    assert against is None


def test_a_model_in_low_precision_passes() -> None:
    assert reasons(build(hidden_dropout=0.1).bfloat16()) == [None, None]


# ------------------------------------------------------------ transformers

_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
}
_ALL_MOE = {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
_ATTENTION = {"layer_types": ["full_attention"] * 2}
PASS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "qwen3_moe": {},
    "qwen3_next": _ATTENTION | {"shared_expert_intermediate_size": 16},
    "olmoe": {},
    "deepseek_v2": _MLA | _ALL_MOE | {"n_shared_experts": 1},
    "deepseek_v3": _MLA | _ALL_MOE | {"n_shared_experts": 1},
    "glm4_moe": _ALL_MOE | {"n_routed_experts": 4},
    "dots1": _ALL_MOE | {"n_routed_experts": 4, "n_shared_experts": 1},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 1,
    },
    "hunyuan_v1_moe": {"moe_topk": 2},
    "minimax": _ATTENTION | {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4, "pad_token_id": 0},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "cohere2_moe": {"pad_token_id": 0},
    # Its factor is one, so it adds what its block gives.
    "granitemoe": {"num_local_experts": 4, "residual_multiplier": 1.0},
}
_DIFFERS = "run in pieces its output differs"
_SCALES = {"residual_multiplier": 0.5}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "granitemoe-scales": (
        "granitemoe",
        PASS["granitemoe"] | _SCALES,
        _DIFFERS,
    ),
    "minimax-scales": ("minimax", PASS["minimax"] | {"mlp_beta_factor": 2.0}, _DIFFERS),
    "flex_olmo-norms": ("flex_olmo", {"pad_token_id": 0}, _DIFFERS),
    "afmoe-norms": ("afmoe", {"num_dense_layers": 0, **_ATTENTION}, _DIFFERS),
    "phimoe-jitter": (
        "phimoe",
        PASS["phimoe"] | {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1},
        "inplace",
    ),
    "mixtral-jitter": ("mixtral", PASS["mixtral"] | {"router_jitter_noise": 0.1}, "inplace"),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4}, "stored transposed"),
    "llama4": (
        "llama4_text",
        {"num_local_experts": 4, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 48},
        "its experts are not folded",
    ),
}


def from_transformers(family: str, options: dict[str, Any]) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = CONFIG_MAPPING[family](**{**SIZES, "use_cache": False, **options})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("family", PASS)
def test_families_of_transformers_that_pass(family: str) -> None:
    with torch.device("meta"):
        on_meta = from_transformers(family, PASS[family])
    assert reasons(on_meta) == [None, None]
    torch.manual_seed(0)
    assert reasons(from_transformers(family, PASS[family]).float()) == [None, None]


@pytest.mark.parametrize("case", REFUSED)
def test_families_of_transformers_that_are_refused(case: str) -> None:
    family, options, why = REFUSED[case]
    for found in reasons(from_transformers(family, options)):
        assert found is not None
        assert why in found


def test_a_layer_that_checkpoints_by_itself_is_refused() -> None:
    model: Any = from_transformers("qwen3_moe", {})
    # The second name is deprecated since transformers 5.23.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            getattr(model, name)()
            break
    for found in reasons(model):
        assert found is not None
        assert "has gradient checkpointing of its own switched on" in found


# ------------------------------------------------------------ layers


class Bare(nn.Module):
    """A layer that says nothing of how it adds its block."""

    def forward(self, hidden_states: Tensor, attention_mask: Any, position_embeddings: Any) -> Any:
        attended = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
        )
        residual = hidden_states + attended
        return self.join(residual, self.post_attention_layernorm(residual))

    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + self.mlp(inside)


class Block(nn.Module):
    """A block, in places for others to change."""

    def forward(self, hidden_states: Tensor) -> Any:
        hidden_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights_TK, index_TK = self.gate(hidden_TD)
        return self.after(hidden_TD, index_TK, weights_TK).view(hidden_states.shape)

    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.experts(hidden_TD, index_TK, weights_TK)


class Scales(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + 0.5 * self.mlp(inside)


class ScalesByBuffer(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + self.scale * self.mlp(inside)


class Norms(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + F.rms_norm(self.mlp(inside), inside.shape[-1:])


class NormsAll(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return self.input_layernorm(residual + self.mlp(inside))


class Drops(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + F.dropout(self.mlp(inside), 0.1, training=self.training)


class DropsPath(DecoderLayer):
    """Inherits `add_block`, which is not all that it does."""

    def forward(self, hidden_states: Tensor, attention_mask: Any, position_embeddings: Any) -> Any:
        out = super().forward(hidden_states, attention_mask, position_embeddings)
        return hidden_states + F.dropout(out - hidden_states, 0.1, training=self.training)


class AddsMean(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        out = self.mlp(inside)
        return residual + out + out.mean()


class Multiplies(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        out = self.mlp(inside)
        return residual * (1 + out.mean()) + out


class Detaches(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + self.mlp(inside).detach()


class CallsTwice(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + self.mlp(inside) + self.mlp(residual)


class CallsNever(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + inside


class GivesMore(Bare):
    """What it gives more is None here and a mask where something is padding."""

    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + self.mlp(inside, None)


class TakesMore(Block):
    def forward(self, hidden_states: Tensor, mask: Any = None) -> Any:
        out = super().forward(hidden_states)
        return out if mask is None else out * mask


class Views(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + self.mlp(inside).view(residual.shape)


class GivesRows(Block):
    def forward(self, hidden_states: Tensor) -> Any:
        return super().forward(hidden_states).flatten(0, 1)


class Unpacks(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        out, _ = self.mlp(inside)
        return residual + out


class Indexes(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        return residual + self.mlp(inside)[0]


class GivesTuple(Block):
    def forward(self, hidden_states: Tensor) -> Any:
        return super().forward(hidden_states), None


class PutsDown(Bare):
    """Another microbatch overwrites what the block takes up."""

    def join(self, residual: Tensor, inside: Tensor) -> Tensor:
        self.mlp.context = residual.detach().mean()
        return residual + self.mlp(inside)


class TakesUp(Block):
    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return super().after(hidden_TD, index_TK, weights_TK) + self.context


class KeepsHistory(Block):
    """As an aux loss is kept that the training step adds up."""

    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.aux_loss = weights_TK.square().mean()
        return super().after(hidden_TD, index_TK, weights_TK)


class WeightsAgain(Block):
    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TD = super().after(hidden_TD, index_TK, weights_TK)
        return out_TD + weights_TK.square().sum(1, keepdim=True)


class ExpertsTwice(Block):
    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TD = super().after(hidden_TD, index_TK, weights_TK)
        return super().after(out_TD, index_TK, weights_TK)


class InRuns(Block):
    """Bounds memory by runs of tokens."""

    run = 2

    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        runs = zip(*(x.split(self.run) for x in (hidden_TD, index_TK, weights_TK)), strict=True)
        return torch.cat([super(InRuns, self).after(*run) for run in runs])


class InLongRuns(InRuns):
    run = 8


class ExpertsByKeyword(Block):
    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.experts(hidden_states=hidden_TD, index_TK=index_TK, weights_TK=weights_TK)


class NoExperts(Block):
    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return hidden_TD


class Checkpoints(Block):
    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return checkpoint(self.experts, hidden_TD, index_TK, weights_TK, use_reentrant=False)


class CountsInBuffer(Block):
    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().after(hidden_TD, index_TK, weights_TK)


class CountsInAttribute(Block):
    calls = 0

    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.calls += 1
        return super().after(hidden_TD, index_TK, weights_TK)


class InPlace(Block):
    def forward(self, hidden_states: Tensor) -> Any:
        hidden_states *= 1.5
        return super().forward(hidden_states)


class GateIsNoRouter(Block):
    """Its router has another name, and `gate` weighs what its experts give."""

    def forward(self, hidden_states: Tensor) -> Any:
        hidden_TD = hidden_states.flatten(0, 1)
        share_T1 = self.gate(hidden_TD).sigmoid()
        _, weights_TK, index_TK = self.chooser(hidden_TD)
        out_TD = self.experts(hidden_TD, index_TK, weights_TK) * share_T1
        return out_TD.view(hidden_states.shape)


def with_buffer(layer: Any) -> None:
    layer.register_buffer("scale", torch.ones(()))


def with_count(layer: Any) -> None:
    layer.mlp.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def with_own_gate(layer: Any) -> None:
    layer.mlp.chooser, layer.mlp.gate = layer.mlp.gate, nn.Linear(SIZES["hidden_size"], 1)


def nothing(layer: Any) -> None:
    pass


_FAILS = "run in pieces it fails: "
BAD: list[tuple[type[nn.Module], type[nn.Module], Callable[[Any], None], str]] = [
    (Scales, Block, nothing, _DIFFERS),
    (ScalesByBuffer, Block, with_buffer, _DIFFERS),
    (Norms, Block, nothing, _DIFFERS),
    (NormsAll, Block, nothing, _DIFFERS),
    (Drops, Block, nothing, _DIFFERS),
    (DropsPath, Block, nothing, _DIFFERS),
    (AddsMean, Block, nothing, _DIFFERS),
    (Multiplies, Block, nothing, _DIFFERS),
    (Detaches, Block, nothing, "run in pieces the gradient of"),
    (CallsTwice, Block, nothing, "calls its block a second time"),
    (CallsNever, Block, nothing, "does not call its block"),
    (GivesMore, TakesMore, nothing, "gives its block more than hidden states"),
    (Views, GivesRows, nothing, "something else than hidden states"),
    (Indexes, GivesTuple, nothing, "something else than hidden states"),
    (Unpacks, GivesTuple, nothing, f"{_FAILS}ValueError: not enough values to unpack"),
    (PutsDown, TakesUp, nothing, _DIFFERS),
    (Bare, KeepsHistory, nothing, "keeps a tensor with history as mlp.aux_loss"),
    (Bare, WeightsAgain, nothing, "run in pieces the gradient of"),
    (Bare, ExpertsTwice, nothing, "calls its experts a second time"),
    (Bare, InRuns, nothing, "calls its experts a second time"),
    (Bare, ExpertsByKeyword, nothing, f"{_FAILS}TypeError"),
    (Bare, NoExperts, nothing, "does not call its experts"),
    (Bare, Checkpoints, nothing, _FAILS),
    (Bare, CountsInBuffer, with_count, "run in pieces the buffer mlp.seen differs"),
    (Bare, CountsInAttribute, nothing, "run in pieces the attribute mlp.calls differs"),
    (Bare, InPlace, nothing, f"{_FAILS}RuntimeError"),
    (Bare, GateIsNoRouter, with_own_gate, "run in pieces the gradient of"),
]
_NAMES = [f"{layer.__name__}-{block.__name__}" for layer, block, _, _ in BAD]


@pytest.mark.parametrize(("layer", "block", "prepare", "why"), BAD, ids=_NAMES)
@pytest.mark.parametrize("state", ["drawn", "zeros", "meta"])
def test_a_layer_that_pieces_would_get_wrong_is_refused(
    layer: type[nn.Module],
    block: type[nn.Module],
    prepare: Callable[[Any], None],
    why: str,
    state: str,
) -> None:
    """Also where its weights are not there yet, and everything is equal to everything."""
    with torch.device("meta" if state == "meta" else "cpu"):
        model = build(layer, block, prepare, num_hidden_layers=1)
    if state == "zeros":
        for param in model.parameters():
            param.data.zero_()
    (found,) = reasons(model)
    assert found is not None
    assert why in found


@pytest.mark.parametrize("place", ["", "mlp", "mlp.experts"])
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_are_refused_where_pieces_would_call_them_at_other_times(
    place: str, register: str
) -> None:
    def prepare(layer: Any) -> None:
        getattr(layer.get_submodule(place), register)(lambda *args: None)

    found = reason(prepare=prepare)
    assert found is not None
    assert "has hooks, which pieces would call at other times" in found


# ------------------------------------------------------------ what may be


class SharedFirst(Block):
    def forward(self, hidden_states: Tensor) -> Any:
        shared = self.shared_expert(hidden_states)
        return shared + super().forward(hidden_states)


class OtherName(Block):
    def forward(self, hidden_states: Tensor) -> Any:
        hidden_TD = hidden_states.flatten(0, 1)
        _, weights_TK, index_TK = self.chooser(hidden_TD)
        return self.after(hidden_TD, index_TK, weights_TK).view(hidden_states.shape)


class GateAfterwards(Block):
    def forward(self, hidden_states: Tensor) -> Any:
        hidden_TD = hidden_states.flatten(0, 1)
        _, weights_TK, index_TK = self.chooser(hidden_TD)
        out_TD = self.experts(hidden_TD, index_TK, weights_TK) * self.gate(hidden_TD).sigmoid()
        return out_TD.view(hidden_states.shape)


class Narrow(Block):
    """Experts of a narrower width, between two projections."""

    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        narrow_TD = self.down(hidden_TD)
        return self.up(super().after(narrow_TD, index_TK, weights_TK)) + self.up(narrow_TD)


class InTuple(Bare):
    def join(self, residual: Tensor, inside: Tensor) -> Any:
        return (super().join(residual, inside),)


def with_other_name(layer: Any) -> None:
    layer.mlp.chooser = layer.mlp.gate
    del layer.mlp.gate


def with_projections(layer: Any) -> None:
    width = SIZES["hidden_size"]
    layer.mlp.down, layer.mlp.up = nn.Linear(width, 8), nn.Linear(8, width)


def with_counting_router(layer: Any) -> None:
    gate = layer.mlp.gate
    gate.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    gate.calls, own = 0, gate.forward

    def forward(hidden_TD: Tensor) -> Any:
        gate.seen.add_(1)
        gate.calls += 1
        return own(hidden_TD)

    gate.forward = forward


def frozen(layer: Any) -> None:
    layer.self_attn.requires_grad_(False)
    layer.mlp.gate.requires_grad_(False)


def with_odd_attributes(layer: Any) -> None:
    layer.limit = float("inf")
    layer.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    layer.register_buffer("flags", torch.ones(3, dtype=torch.bool))


def with_one_norm(layer: Any) -> None:
    layer.post_attention_layernorm = layer.input_layernorm


@pytest.mark.parametrize(
    ("layer", "block", "prepare", "options"),
    [
        (Bare, Block, nothing, {}),
        (Bare, SharedFirst, nothing, {"shared_expert_intermediate_size": 16}),
        (Bare, OtherName, with_other_name, {}),
        (Bare, GateAfterwards, with_own_gate, {}),
        (Bare, Narrow, with_projections, {}),
        (Bare, Block, with_counting_router, {}),
        (Bare, Block, frozen, {}),
        (Bare, Block, with_odd_attributes, {}),
        (Bare, Block, with_one_norm, {}),
        (Bare, Block, nothing, {"router_jitter_noise": 0.1, "attention_dropout": 0.1}),
    ],
    ids=[
        "bare",
        "shared-first",
        "other-name",
        "gate-afterwards",
        "narrow",
        "counting-router",
        "frozen",
        "odd-attributes",
        "one-norm",
        "random",
    ],
)
def test_other_layers_pass(
    layer: type[nn.Module],
    block: type[nn.Module],
    prepare: Callable[[Any], None],
    options: dict[str, Any],
) -> None:
    assert reason(layer, block, prepare, **options) is None


def test_a_layer_that_returns_a_tuple_passes() -> None:
    root = Wrapped(build(Bare, Block, num_hidden_layers=1))
    parts = find_parts(root)
    anatomy = probe(root, parts)
    parts.layers[0][1].__class__ = InTuple
    moe = moe_layers(root, parts, in_tuple=True)[0]
    assert isinstance(moe, MoeLayer)
    assert reason_against(moe, anatomy.calls[0], anatomy.width) is None


def test_what_only_longer_sequences_show_is_told_when_it_happens() -> None:
    ((moe, against),) = tried(build(Bare, InLongRuns, num_hidden_layers=1))
    assert moe is not None
    assert against is None
    x = torch.randn(1, 16, SIZES["hidden_size"])
    with pytest.raises(LookupError, match="calls its experts a second time"):
        moe.merge(x, x, x[0], {})


# ------------------------------------------------------------ nothing changes


def traces(model: nn.Module) -> dict[str, Any]:
    """All of a model that the probe could have touched; tensors with their identity."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            seen[f"{name}.{key}"] = (id(value), value if isinstance(value, (int, float)) else None)
            if isinstance(value, dict):
                seen[f"{name}.{key}.items"] = [(k, id(v)) for k, v in value.items()]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        version = (tensor._version, tensor.requires_grad, tensor.grad, tensor.dtype)
        seen[f"tensor {name}"] = (id(tensor), *version)
    return seen


class Careless(Block):
    """Leaves something wherever it can."""

    def after(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.last, self.calls = weights_TK.detach(), getattr(self, "calls", 0) + 1
        self.seen.add_(1)
        return super().after(hidden_TD, index_TK, weights_TK) + torch.rand_like(hidden_TD)


def careless(layer: Any) -> None:
    with_counting_router(layer)
    layer.mlp.register_buffer("seen", torch.zeros((), dtype=torch.float64))
    layer.self_attn.q_proj.register_forward_hook(lambda *args: None)
    layer.self_attn.requires_grad_(False)
    layer.input_layernorm.eval()


@pytest.mark.parametrize("block", [Block, Careless, ExpertsTwice])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_changes(block: type[nn.Module], dtype: torch.dtype) -> None:
    model = build(Bare, block, careless, attention_dropout=0.1).to(dtype)
    before, buffers = traces(model), {n: b.clone() for n, b in model.named_buffers()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    found = reasons(model)
    assert all((why is None) == (block is Block) for why in found)
    assert torch.equal(torch.get_rng_state(), state)
    assert traces(model) == before
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])


def test_hooks_inside_are_not_called() -> None:
    called: list[str] = []

    def prepare(layer: Any) -> None:
        layer.mlp.gate.register_forward_hook(lambda *args: called.append("gate"))

    assert reason(prepare=prepare) is None
    assert called == []


def test_ranks_with_other_weights_find_the_same() -> None:
    found = set()
    for seed in range(3):
        model = build(Scales, Block, num_hidden_layers=1)
        torch.manual_seed(seed)
        for param in model.parameters():
            nn.init.normal_(param)
        found.update(reasons(model))
    assert len(found) == 1
