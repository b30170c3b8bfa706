"""Layers that a sweep runs, and the operands of one of them on one routing.

On meta tensors the operands say what has to be compiled, and hold nothing.
"""

# Shapes.  T tokens of a rank   K top-k   R = T*K pairs in expert order   e local experts
#          D model width   F expert width   O = 2F both halves of the first product

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fold_kernels.expert_operands import Operands
from fold_kernels.ops.rows import expert_index_ref
from fold_kernels.swiglu import swiglu

Routing = Literal["uniform", "random", "skewed"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
# How far experts differ in what a router finds of them, as a standard deviation of logits.
_SPREAD = {"uniform": 0.0, "random": 0.3, "skewed": 1.2}
# Few wide experts: the bound between two aims of speed (kernels.md 3.4).
COARSE_EXPERTS = 8


@dataclass(frozen=True)
class Layer:
    """A MoE layer as one rank meets it.

    Attributes:
        name: For people.
        model: D.
        width: F, of this rank's part.
        experts: e, of this rank.
        top_k: Pairs a token has on this rank, on average.
        tokens: T.
    """

    name: str
    model: int
    width: int
    experts: int
    top_k: int
    tokens: int

    def __post_init__(self) -> None:
        """Refuse a layer that does not exist.

        Raises:
            ValueError: Names the layer and the field.
        """
        for field in ("model", "width", "experts", "top_k", "tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}: {field}={getattr(self, field)} must be positive")
        if self.top_k > self.experts:
            raise ValueError(f"{self.name}: top_k={self.top_k} is more than experts={self.experts}")

    @property
    def pairs(self) -> int:
        """R."""
        return self.tokens * self.top_k

    @property
    def grain(self) -> str:
        """Which aims hold for it."""
        return "coarse" if self.experts <= COARSE_EXPERTS else "fine"

    @property
    def flop(self) -> int:
        """Of all six products, forward and backward."""
        return 18 * self.pairs * self.model * self.width

    @property
    def kept_bytes(self) -> int:
        """What backward keeps of one layer in 16 bits: rows and first product, 2TD + 4TKF."""
        return 2 * self.tokens * self.model + 4 * self.pairs * self.width


# Expert width, local experts and top-k of the models' own configs; tokens of one microbatch.
LAYERS = (
    Layer("mixtral-8x7b", 4096, 14336, 8, 2, 16384),
    Layer("qwen3-30b-a3b", 2048, 768, 128, 8, 32768),
    Layer("8x22b-g8t8", 6144, 2048, 64, 8, 16384),
    Layer("qwen2-57b-a14b", 3584, 2560, 64, 8, 16384),
    Layer("qwen3-235b-a22b", 4096, 1536, 128, 8, 16384),
    # Under ep 8: 32 of 256 experts, and rows that arrive once for each expert, from 4096 tokens.
    Layer("deepseek-v3-ep8", 7168, 2048, 32, 1, 32768),
    Layer("mixtral-8x22b", 6144, 16384, 8, 2, 16384),
)
# What an interpreter computes within seconds.
DRY_LAYER = Layer("tiny", 64, 48, 4, 2, 20)


@dataclass(frozen=True)
class Inputs:
    """Operands of one layer on one routing.

    Attributes:
        layer: Of these sizes.
        routing: How the router decides.
        logits_TE: fp32, of the router.
        ids_N: int64, expert of every pair, token by token.
        x: Operands of the experts.
        offsets_e1: int32, where each expert's pairs begin.
        upstream_TD: Gradient of the sums.
        hidden_RO: First product.
        act_RF: Weighted activation.
        grad_RO: Gradient of the first product.
    """

    layer: Layer
    routing: Routing
    logits_TE: Tensor
    ids_N: Tensor
    x: Operands
    offsets_e1: Tensor
    upstream_TD: Tensor
    hidden_RO: Tensor
    act_RF: Tensor
    grad_RO: Tensor

    @property
    def width(self) -> int:
        """F."""
        return self.layer.width


def draw_inputs(
    layer: Layer,
    routing: Routing,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    logits_TE: Tensor | None = None,
) -> Inputs:
    """Draw operands with unit gain; reads the sizes back to the host, on meta they are even.

    Args:
        layer: Its sizes.
        routing: How the router decides.
        device: Of all tensors.
        dtype: Of rows and weights.
        logits_TE: What decides in place of `routing`.
    """

    def draw(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device).mul_(gain)

    model, width, experts, pairs = layer.model, layer.width, layer.experts, layer.pairs
    if logits_TE is None:
        logits_TE = draw_logits(layer, routing, device)
    ids_TK = logits_TE.topk(layer.top_k, dim=1).indices
    order_R, _, counts_e = expert_index_ref(ids_TK.reshape(-1), experts)
    is_meta = device.type == "meta"
    sizes = [pairs // experts] * experts if is_meta else counts_e.tolist()
    x = Operands(
        draw(layer.tokens, model),
        torch.rand(pairs, device=device),
        draw(experts, 2 * width, model, gain=model**-0.5),
        draw(experts, model, width, gain=width**-0.5),
        order_R // layer.top_k,
        counts_e,
        sizes,
        swiglu,
    )
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    return Inputs(
        layer,
        routing,
        logits_TE,
        ids_TK.reshape(-1),
        x,
        torch.cat([ends_e.new_zeros(1), ends_e]),
        draw(layer.tokens, model),
        draw(pairs, 2 * width),
        draw(pairs, width),
        draw(pairs, 2 * width),
    )


def draw_logits(layer: Layer, routing: Routing, device: torch.device) -> Tensor:
    """Logits [T, E] of which top-k makes the routing; a skewed one leaves an expert empty."""
    shape = layer.tokens, layer.experts
    if routing == "uniform":
        # Every token's experts follow the previous token's.
        place = torch.arange(layer.tokens, device=device).unsqueeze(1) * layer.top_k
        distance = (torch.arange(layer.experts, device=device) - place) % layer.experts
        return -distance.float()
    popular_E = torch.randn(layer.experts, device=device) * _SPREAD[routing]
    if routing == "skewed" and layer.experts > layer.top_k:
        popular_E[layer.experts // 2] = -1e4
    return torch.randn(shape, device=device) + popular_E
