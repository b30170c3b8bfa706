"""The models and batches that every mapping is verified on; one file, torch and transformers only.

The reference process loads this file by its path, so it imports nothing of this package: both sides
build the same weights and the same batches from it. Knows no mapping and compares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Shapes.  B sequences   S tokens of a sequence   T tokens = B*S   K top-k

VOCABULARY, LENGTHS, SEQUENCES = 101, (13, 16, 11), 2
SHORT, MANY, ROWS = (3, 2, 5), 6, 10
STEPS, ACCUMULATE, LEARNING_RATE, CLIP = 3, 2, 0.2, 0.5
# Labels set to -100 beside the padding, by dp rank: ranks of one step then differ in labels too.
IGNORED = (1, 1, 2, 2, 4, 3, 4, 6)
PRELOAD = (
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
)
"""Modules that take long to import."""


@dataclass(frozen=True)
class ModelCase:
    """One model under test.

    Attributes:
        source: "decoder" (built in), or a Hugging Face family.
        options: Fields of its config beside the common sizes.
    """

    source: str
    options: Mapping[str, Any] = field(default_factory=dict)


# Mixtral has no dense layers; the others have one between two MoE layers. Eight heads over two
# key/value heads, so that tp = 4 replicates them; a vocabulary that no tp divides.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    # Far from 0.02: attention and router must be far from uniform, or their errors would not show.
    "initializer_range": 0.15,
}
_DENSE_AND_MOE = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
_MIXTRAL = {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2}
_SHARED = {"shared_expert_intermediate_size": 16, "attention_bias": True}
# DeepSeek-V3's router.
_GROUPS = {
    "scoring_func": "sigmoid",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "use_expert_bias": True,
}
_DEEPSEEK = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 8,
}
_AUX = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
_TIED = {"tie_word_embeddings": True}
# A layer for each of the stages of four ranks with two stages.
_EIGHT_LAYERS = {"num_hidden_layers": 8, "mlp_only_layers": [1, 4]}

MODELS: Mapping[str, ModelCase] = {
    "decoder": ModelCase("decoder", _DENSE_AND_MOE),
    "decoder-shared-bias": ModelCase("decoder", _DENSE_AND_MOE | _SHARED),
    "decoder-tied": ModelCase("decoder", _DENSE_AND_MOE | _TIED),
    "decoder-groups": ModelCase("decoder", _DENSE_AND_MOE | _GROUPS),
    "decoder-deep": ModelCase("decoder", _DENSE_AND_MOE | _EIGHT_LAYERS),
    "mixtral": ModelCase("mixtral", _MIXTRAL),
    "mixtral-aux": ModelCase("mixtral", _MIXTRAL | _AUX),
    "deepseek_v3": ModelCase("deepseek_v3", _DEEPSEEK),
    "mixtral-tied": ModelCase("mixtral", _MIXTRAL | _TIED),
    "qwen3_moe": ModelCase("qwen3_moe", _DENSE_AND_MOE),
    "qwen3_moe-bias": ModelCase("qwen3_moe", _DENSE_AND_MOE | {"attention_bias": True}),
}


def build_model(name: str, *, decoder: Any) -> nn.Module:
    """Build one of `MODELS` in fp32, from a fixed seed.

    Args:
        name: Its key.
        decoder: The module that holds `Decoder` and `DecoderConfig`, imported in whatever way.
    """
    case = MODELS[name]
    # With this seed the first step sends tokens to every expert of every model, under dp = 1 too.
    torch.manual_seed(6)
    model = _build_decoder(case, decoder) if case.source == "decoder" else _build_hf(case)
    _perturb_vectors(model)
    return model


def sub_batch(index: int, dp_rank: int, kind: str = "padded") -> dict[str, Tensor]:
    """What a dp rank sees in its `index`-th step: own tokens, length, padding, ignored labels.

    Args:
        index: Of the step.
        dp_rank: Coordinate on dp.
        kind: "padded"; "packed", documents of one row told by positions alone; "short",
            sequences of fewer tokens than some cp has ranks; or "rows", enough of them to be cut
            into microbatches, no two of which have as many targets.
    """
    generator = torch.Generator().manual_seed(1000 * index + dp_rank)
    lengths = SHORT if kind == "short" else LENGTHS
    sequences = {"short": MANY, "rows": ROWS}.get(kind, SEQUENCES)
    length = lengths[(index + dp_rank) % len(lengths)]
    ids = torch.randint(0, VOCABULARY, (sequences, length), generator=generator)
    if kind == "packed":
        return _packed(ids, dp_rank)
    if kind == "short":
        # A query that sees padding alone, beside sequences without any.
        mask = torch.ones_like(ids).index_put_((torch.tensor(0), torch.tensor(0)), torch.tensor(0))
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}
    if kind == "rows":
        return _many_rows(ids, index, dp_rank)
    mask = torch.ones_like(ids)
    right, left = dp_rank % 4, dp_rank // 4 * 4 + index % 2
    mask[0, length - right :] = 0
    mask[1, :left] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 1 : 1 + IGNORED[dp_rank]] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _packed(ids: Tensor, dp_rank: int) -> dict[str, Tensor]:
    """Rows of two and three documents, whose borders lie nowhere in particular."""
    positions = torch.arange(ids.shape[1]).repeat(ids.shape[0], 1)
    for row, starts in enumerate(((4 + dp_rank % 3,), (1, 6 + dp_rank % 4))):
        for start in starts:
            positions[row, start:] = torch.arange(ids.shape[1] - start)
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def _many_rows(ids: Tensor, index: int, dp_rank: int) -> dict[str, Tensor]:
    """Rows padded on either side, with targets that begin late, and in some steps a row without."""
    rows = torch.arange(ids.shape[0]).unsqueeze(1)
    places = torch.arange(ids.shape[1]).unsqueeze(0)
    left = torch.where(rows % 4 == 3, 1 + (index + dp_rank) % 3, 0)
    valid = (places >= left) & (places < ids.shape[1] - (rows * 3 + dp_rank) % 5)
    targets = valid & (places > left + (rows * rows + 2 * dp_rank) % 6 + dp_rank // 3)
    if (index + dp_rank) % 3 == 1:
        targets[dp_rank % ids.shape[0]] = False
    labels = ids.masked_fill(~targets, -100)
    return {"input_ids": ids, "attention_mask": valid.long(), "labels": labels}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds, by name."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


class RoutingTap:
    """Records the routing decision of every MoE layer and forward.

    Attributes:
        decisions: One list a layer, in order of the layers, of index tensors [T, K] in order of the
            forwards.
    """

    def __init__(self, model: nn.Module) -> None:
        self.decisions: list[list[Tensor]] = []
        for name, module in model.named_modules():
            # Routers of all these models return (logits, weights, index).
            if name.endswith("mlp.gate"):
                module.register_forward_hook(partial(self._see, len(self.decisions)))
                self.decisions.append([])

    def note(self, layer: int, index_TK: Tensor) -> None:
        """Keep one decision."""
        self.decisions[layer].append(index_TK)

    def _see(self, layer: int, module: nn.Module, args: Any, out: Any) -> None:
        # A layer that backward repeats decides nothing new.
        if torch._C._current_graph_task_id() == -1:
            self.note(layer, out[2].detach().clone())


def _build_decoder(case: ModelCase, decoder: Any) -> nn.Module:
    model: nn.Module = decoder.Decoder(decoder.DecoderConfig(**{**_SIZES, **case.options}))
    return model


def _build_hf(case: ModelCase) -> nn.Module:
    import transformers

    classes = {
        "mixtral": transformers.MixtralConfig,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "deepseek_v3": transformers.DeepseekV3Config,
    }
    sizes = {**_SIZES, **case.options}
    config = classes[case.source](**sizes, max_position_embeddings=64, use_cache=False)
    # grouped_mm has no fp64; a folded model computes its experts by itself.
    config._experts_implementation = "eager"
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@torch.no_grad()
def _perturb_vectors(model: nn.Module) -> None:
    """Move norms off one and biases off zero: a bias added twice would not show at zero."""
    for param in model.parameters():
        if param.dim() == 1:
            param.add_(torch.randn(param.shape), alpha=0.1)
