"""Sizes and options of the built-in decoder, and what is refused of them.

The reference process loads this file beside `decoder`, in a package of its own; so the two import
each other relatively, and nothing else of ours.
"""

from dataclasses import dataclass
from typing import Literal

import torch

ROUTER_DTYPES = {"": None, "fp32": torch.float32, "fp64": torch.float64}
_ROUTER_CHOICES = {
    "scoring_func": ("softmax", "sigmoid", "sqrt_softplus"),
    "group_score": ("top2_sum", "max"),
    "router_dtype": tuple(ROUTER_DTYPES),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a `Decoder`, checked on construction; names follow Hugging Face.

    Attributes:
        vocab_size: Rows of embedding and head; the default holds the tokens of `TextDataModule`.
        intermediate_size: Width of the dense layers, those named in `mlp_only_layers`.
        head_dim: Width of one head; 0 means hidden_size / num_attention_heads.
        shared_expert_intermediate_size: Width of an expert every token uses; 0 means none.
        scoring_func: Turns router logits into scores: softmax, sigmoid or sqrt_softplus.
        softmax_after_topk: Choose by logits and take the softmax of the chosen ones alone.
        norm_topk_prob: Whether the routing weights of a token are rescaled to sum to 1.
        routed_scaling_factor: Multiplies the routing weights.
        n_group: Runs of experts; a token chooses from its best `topk_group` runs.
        topk_group: See `n_group`.
        group_score: What ranks the runs: top2_sum (DeepSeek-V3) or max (DeepSeek-V2).
        use_expert_bias: Whether routers have a buffer `e_score_correction_bias` that is added to
            what ranks the experts; `bias_update_rate` of the strategy moves it.
        router_dtype: Of the router's product: fp32 or fp64; empty means that of the hidden states.
        router_jitter_noise: The router's input is multiplied by U(1 - x, 1 + x) in training.
        attention_bias: Whether q, k, v and o projections have biases.
        hidden_dropout: Dropout of the embedding and of each residual branch.
        initializer_range: Standard deviation of initial weights; outputs get it / sqrt(2 * layers).
        gradient_checkpointing: Recompute each layer in backward: less memory, one more forward.
    """

    vocab_size: int = 264
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 0
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    shared_expert_intermediate_size: int = 0
    scoring_func: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    softmax_after_topk: bool = False
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    use_expert_bias: bool = False
    router_dtype: Literal["", "fp32", "fp64"] = ""
    router_jitter_noise: float = 0.0
    mlp_only_layers: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        # YAML and checkpoints carry lists; a tuple keeps the config hashable.
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        _check_sizes(self)
        if not self.head_dim:
            _check_divides(self, "num_attention_heads", "hidden_size")
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        _check_divides(self, "num_key_value_heads", "num_attention_heads")
        _check_options(self)
        _check_router(self)

    @property
    def num_active_parameters(self) -> int:
        """Parameters one token passes through: all but the experts it is not routed to."""
        from .decoder import Decoder

        with torch.device("meta"):
            sizes = {name: p.numel() for name, p in Decoder(self).named_parameters()}
        idle = sum(size for name, size in sizes.items() if ".experts." in name)
        return sum(sizes.values()) - idle + idle * self.num_experts_per_tok // self.num_experts


def _check_sizes(config: DecoderConfig) -> None:
    fields = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    for field in f"{fields} num_key_value_heads num_experts moe_intermediate_size".split():
        _require(config, field, getattr(config, field) >= 1, "at least 1")


def _check_divides(config: DecoderConfig, field: str, whole: str) -> None:
    size = getattr(config, whole)
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    legal = f"a divisor of {whole}={size} (else heads are cut): {', '.join(map(str, divisors))}"
    _require(config, field, getattr(config, field) in divisors, legal)


def _check_options(config: DecoderConfig) -> None:
    experts, layers = config.num_experts, config.num_hidden_layers
    used, shared = config.num_experts_per_tok, config.shared_expert_intermediate_size
    pairs = config.head_dim > 0 and config.head_dim % 2 == 0
    inside = all(0 <= layer < layers for layer in config.mlp_only_layers)
    _require(config, "head_dim", pairs, "even: rotary embedding turns pairs")
    _require(config, "num_experts_per_tok", 1 <= used <= experts, f"in 1..{experts} (num_experts)")
    _require(config, "shared_expert_intermediate_size", shared >= 0, "at least 0, which means none")
    _require(config, "mlp_only_layers", inside, f"in 0..{layers - 1} (num_hidden_layers - 1)")
    for field in ("attention_dropout", "hidden_dropout"):
        _require(config, field, 0.0 <= getattr(config, field) < 1.0, "in [0, 1)")


def _check_router(config: DecoderConfig) -> None:
    experts, groups, used = config.num_experts, config.n_group, config.num_experts_per_tok
    for field, choices in _ROUTER_CHOICES.items():
        _require(config, field, getattr(config, field) in choices, f"one of {choices}")
    _require(config, "n_group", groups >= 1 and experts % groups == 0, f"a divisor of {experts}")
    fewest = -(-used * groups // experts)
    legal = f"in {fewest}..{groups}: num_experts_per_tok={used} must fit into that many groups"
    _require(config, "topk_group", fewest <= config.topk_group <= groups, legal)
    after = config.softmax_after_topk
    sound = not after or (config.scoring_func == "softmax" and used > 1)
    legal = "False unless scoring_func is softmax and num_experts_per_tok above 1"
    _require(config, "softmax_after_topk", sound, legal)
    _require(config, "router_jitter_noise", 0 <= config.router_jitter_noise < 1, "in [0, 1)")


def _require(config: DecoderConfig, field: str, holds: bool, legal: str) -> None:
    if not holds:
        raise ValueError(f"{field}={getattr(config, field)} must be {legal}. Change `{field}`.")
