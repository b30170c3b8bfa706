"""Floating point operations of one training pass, from the shape of the model alone.

Invariant: integers, equal to Megatron-LM's `num_floating_point_operations` to the last digit.
Counted: products with the weights a token uses (top-k and shared experts, projections, LM head)
and the attention core. Not counted: router, norms, activations, softmax, embedding lookup,
recomputation, dispatch, capacity padding, sliding windows.
"""

from dataclasses import dataclass
from typing import Any

from lightning_fold.pipeline.costs import FLOPS_PER_WEIGHT, Attention, core_flops, layer_weights

# The backward is twice the forward.
_PASSES = 3
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PLAIN_ATTENTION = {"full_attention", "sliding_attention", "attention"}


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide how much a decoder computes per token.

    Attributes:
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the LM head.
        query_size: Attention heads times head width.
        key_value_size: Key/value heads times head width.
        dense_layers: Layers with an ordinary MLP.
        dense_width: Inner width of that MLP.
        moe_layers: Layers with experts.
        top_k: Experts per token.
        expert_width: Inner width of one expert.
        shared_width: Inner width of all shared experts of one layer together.
        mlp_matrices: 3 for gated MLPs (gate, up, down), 2 for plain ones.
    """

    hidden_size: int
    vocab_size: int
    query_size: int
    key_value_size: int
    dense_layers: int = 0
    dense_width: int = 0
    moe_layers: int = 0
    top_k: int = 0
    expert_width: int = 0
    shared_width: int = 0
    mlp_matrices: int = 3

    @property
    def num_layers(self) -> int:
        """All decoder layers."""
        return self.dense_layers + self.moe_layers

    @property
    def active_weights(self) -> int:
        """Matrix weights that one token is multiplied with, LM head included."""
        moe_width = self.top_k * self.expert_width + self.shared_width
        dense, moe = self._layer_weights(self.dense_width), self._layer_weights(moe_width)
        head = self.hidden_size * self.vocab_size
        return self.dense_layers * dense + self.moe_layers * moe + head

    def _layer_weights(self, mlp_width: int) -> int:
        return layer_weights(
            hidden_size=self.hidden_size,
            query_size=self.query_size,
            key_value_size=self.key_value_size,
            mlp_width=mlp_width,
            mlp_matrices=self.mlp_matrices,
        )


def training_flops(
    shape: ModelShape, *, tokens: int, sequence_length: int, attention: Attention = "causal"
) -> int:
    """Count forward and backward of `tokens` tokens in sequences of `sequence_length`.

    Args:
        shape: The model.
        tokens: Tokens of all sequences together.
        sequence_length: Tokens that one token may attend to, before any causal mask.
        attention: As `core_flops` says.

    Raises:
        ValueError: If `attention` is neither.
    """
    core = core_flops(
        query_size=shape.query_size, sequence_length=sequence_length, attention=attention
    )
    forward = FLOPS_PER_WEIGHT * shape.active_weights + shape.num_layers * core
    return _PASSES * tokens * forward


def shape_from_config(config: Any) -> ModelShape:
    """Read the sizes from a config with Hugging Face's field names.

    Raises:
        ValueError: If a size is missing, or the architecture has parts that the formula does not
            describe (latent attention, linear attention).
    """
    config = getattr(config, "text_config", None) or config
    _refuse_other_attention(config)
    hidden_size, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    head_dim = getattr(config, "head_dim", None) or hidden_size // heads
    num_layers, moe_layers = _need(config, "num_hidden_layers"), _count_moe_layers(config)
    return ModelShape(
        hidden_size=hidden_size,
        vocab_size=_need(config, "vocab_size"),
        query_size=heads * head_dim,
        key_value_size=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        dense_layers=num_layers - moe_layers,
        dense_width=_need(config, "intermediate_size") if moe_layers < num_layers else 0,
        moe_layers=moe_layers,
        top_k=_need(config, "num_experts_per_tok") if moe_layers else 0,
        expert_width=_expert_width(config) if moe_layers else 0,
        shared_width=_shared_width(config) if moe_layers else 0,
    )


def _refuse_other_attention(config: Any) -> None:
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(_unknown(config, f"latent attention (kv_lora_rank={config.kv_lora_rank})"))
    others = set(getattr(config, "layer_types", None) or ()) - _PLAIN_ATTENTION
    if others:
        raise ValueError(_unknown(config, f"layers of type {', '.join(sorted(others))}"))


def _unknown(config: Any, part: str) -> str:
    return (
        f"{type(config).__name__}: the FLOPs formula does not describe {part}.\n"
        "Pass `shape=ModelShape(...)` with equivalent sizes to MFUMonitor."
    )


def _need(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(_unknown(config, f"a config without `{name}`"))
    return int(value)


def _count_moe_layers(config: Any) -> int:
    num_layers = _need(config, "num_hidden_layers")
    if not any(getattr(config, name, None) for name in _EXPERT_COUNTS):
        return 0
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    step = getattr(config, "decoder_sparse_step", None) or 1
    first = getattr(config, "first_k_dense_replace", None) or 0
    return sum(
        layer >= first and layer not in dense and (layer + 1) % step == 0
        for layer in range(num_layers)
    )


def _expert_width(config: Any) -> int:
    width = getattr(config, "moe_intermediate_size", None)
    return int(width) if width else _need(config, "intermediate_size")


def _shared_width(config: Any) -> int:
    width = getattr(config, "shared_expert_intermediate_size", None)
    if width:
        return int(width)
    return int(getattr(config, "n_shared_experts", None) or 0) * _expert_width(config)
