"""The FLOPs formula against published anchors and against torch's own counter."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_fold.callbacks.flops import ModelShape, shape_from_config, training_flops
from lightning_fold.callbacks.mfu import shape_of_model
from lightning_fold.model.decoder import Decoder, DecoderConfig

MIXTRAL_8X7B = ModelShape(
    hidden_size=4096,
    vocab_size=32000,
    query_size=4096,
    key_value_size=1024,
    moe_layers=32,
    top_k=2,
    expert_width=14336,
)
QWEN3_30B = ModelShape(
    hidden_size=2048,
    vocab_size=151936,
    query_size=4096,
    key_value_size=512,
    moe_layers=48,
    top_k=8,
    expert_width=768,
)


@pytest.mark.parametrize(
    ("shape", "flops"),
    [(MIXTRAL_8X7B, 326477644038144), (QWEN3_30B, 94233729957888)],
    ids=["mixtral-8x7b", "qwen3-30b-a3b"],
)
def test_flops_equal_megatrons_to_the_last_digit(shape, flops):
    assert training_flops(shape, tokens=4096, sequence_length=4096) == flops


# FLOPs per token at sequence length 4096, published to four digits.
PER_TOKEN = {
    "mixtral-8x22b": (
        ModelShape(6144, 32000, 6144, 1024, moe_layers=56, top_k=2, expert_width=16384),
        (2.506e11, 2.422e11),
    ),
    "qwen2-57b-a14b": (
        ModelShape(
            3584, 151936, 3584, 512, moe_layers=28, top_k=8, expert_width=2560, shared_width=20480
        ),
        (8.712e10, 8.465e10),
    ),
    "mixtral-8x22b-g8t8": (
        ModelShape(6144, 32000, 6144, 1024, moe_layers=56, top_k=8, expert_width=2048),
        (1.492e11, 1.407e11),
    ),
}


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("attention", ["full", "causal"])
def test_flops_per_token_equal_the_published_figures(name, attention):
    shape, (full, causal) = PER_TOKEN[name]
    flops = training_flops(shape, tokens=1, sequence_length=4096, attention=attention)
    published = {"full": full, "causal": causal}[attention]
    assert f"{flops:.3e}" == f"{published:.3e}"


def test_causal_halves_the_attention_core_only():
    sizes = {"tokens": 10, "sequence_length": 8}
    weights = 6 * 10 * MIXTRAL_8X7B.active_weights
    full = training_flops(MIXTRAL_8X7B, **sizes, attention="full") - weights
    causal = training_flops(MIXTRAL_8X7B, **sizes, attention="causal") - weights
    assert full == 2 * causal > 0


def test_an_unknown_convention_is_refused():
    with pytest.raises(ValueError, match=r"attention='half'.*\n.*'causal', 'full'"):
        training_flops(MIXTRAL_8X7B, tokens=1, sequence_length=1, attention="half")


class LoopMoE(nn.Module):
    """One attention layer and one MoE layer, written as plain loops over the experts."""

    def __init__(self, *, width: int, ffn: int, experts: int, vocab: int) -> None:
        super().__init__()
        kv = width // 2
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, kv, bias=False), nn.Linear(width, kv, bias=False)
        self.gate_up = nn.ModuleList(nn.Linear(width, 2 * ffn, bias=False) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(ffn, width, bias=False) for _ in range(experts))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x).repeat(1, 1, 2), self.v(x).repeat(1, 1, 2)
        x = self.o(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        outputs = []
        for row, token in enumerate(x.flatten(0, 1)):
            # Token r goes to experts r and r+1: top-2 without a router, which is not counted.
            for expert in (row % len(self.down), (row + 1) % len(self.down)):
                gate, up = self.gate_up[expert](token[None]).chunk(2, -1)
                outputs.append(self.down[expert](F.silu(gate) * up))
        return self.head(torch.cat(outputs).view(*x.shape[:2], 2, -1).sum(2))


def test_flops_equal_torchs_counter_on_a_loop_over_experts():
    batch, sequence, width, ffn, vocab = 2, 6, 8, 12, 10
    model = LoopMoE(width=width, ffn=ffn, experts=4, vocab=vocab)
    x = torch.randn(batch, sequence, width, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    shape = ModelShape(width, vocab, width, width // 2, moe_layers=1, top_k=2, expert_width=ffn)
    flops = training_flops(
        shape, tokens=batch * sequence, sequence_length=sequence, attention="full"
    )
    assert flops == counter.get_total_flops()


def test_the_builtin_decoder_is_read_from_its_config():
    config = DecoderConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=24,
        mlp_only_layers=(1,),
    )
    model = Decoder(config)
    shape = shape_of_model(nn.ModuleDict({"model": model}))
    assert shape == ModelShape(64, 264, 32, 16, 1, 96, 2, 2, 40, 24)
    # Everything the token passes except what the formula leaves out: norms (two per layer and
    # the last), router and shared expert's gate of the MoE layers, embedding.
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    left_out = sum(
        size
        for name, size in sizes.items()
        if any(part in name for part in ("norm", ".gate.", "shared_expert_gate", "embed_tokens"))
    )
    assert shape.active_weights == config.num_active_parameters - left_out


def test_mixtral_is_read_from_its_hugging_face_config():
    transformers = pytest.importorskip("transformers")
    assert shape_from_config(transformers.MixtralConfig()) == MIXTRAL_8X7B


def test_qwen3_moe_is_read_from_its_hugging_face_config():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=48, head_dim=128, num_experts=128, mlp_only_layers=[]
    )
    assert shape_from_config(config) == QWEN3_30B
    sparse = transformers.Qwen3MoeConfig(
        num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[1, 3]
    )
    shape = shape_from_config(sparse)
    # Every second layer, 1 3 5 7, without layers 1 and 3, which are named dense.
    assert (shape.moe_layers, shape.dense_layers, shape.dense_width) == (2, 6, 6144)


def test_qwen2_moe_shared_expert_is_counted():
    transformers = pytest.importorskip("transformers")
    assert shape_from_config(transformers.Qwen2MoeConfig()).shared_width == 5632


def test_parts_the_formula_does_not_describe_are_refused():
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"latent attention \(kv_lora_rank=512\)"):
        shape_from_config(transformers.DeepseekV3Config())
    config = SimpleNamespace(layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ValueError, match="layers of type linear_attention"):
        shape_from_config(config)
    with pytest.raises(ValueError, match="a config without `hidden_size`"):
        shape_from_config(SimpleNamespace(num_hidden_layers=2, num_attention_heads=2))


def test_a_config_that_contradicts_the_structure_is_refused():
    model = Decoder(DecoderConfig(num_hidden_layers=2))
    model.model.layers[0].mlp = nn.Identity()
    with pytest.raises(ValueError, match="describes 2 MoE layers, the model has 1"):
        shape_of_model(model)
    assert shape_of_model(model, is_whole=False).moe_layers == 2
