"""A model that was not written for this package: a Python loop over expert modules, its own router.

    lightning-fold verify --ranks 2 --model recipes/loop_experts.py:LoopDecoder

The class names, the attribute names and the router are the model's own. All that ties it to
parallel folding is the call of `register_experts` at the end: how the block routes, and where an
expert keeps its weights. Folded, a block's parameters are named `experts.gate_up_proj` and
`experts.down_proj`, in checkpoints too. Attention is not a known structure, so tp is refused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fold import register_experts


class Expert(nn.Module):
    """One small gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows [T, D] to the same shape."""
        return self.w2(F.gelu(self.w1(x)) * self.w3(x))


class LoopMoE(nn.Module):
    """Each token goes to its two best experts, one expert after the other."""

    def __init__(self, width: int, inner: int, num_experts: int) -> None:
        super().__init__()
        self.choose = nn.Linear(width, num_experts)
        self.mlps = nn.ModuleList(Expert(width, inner) for _ in range(num_experts))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Indices and sigmoid weights of two experts for each of [T, D] rows."""
        scores, index = self.choose(x).topk(2, dim=-1)
        return index, scores.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, D] to the same shape."""
        rows = x.flatten(0, 1)
        index, weights = self.route(rows)
        out = torch.zeros_like(rows)
        for number, mlp in enumerate(self.mlps):
            token, slot = (index == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, mlp(rows[token]) * weights[token, slot, None])
        return out.view_as(x)


class Output(NamedTuple):
    """What a call returns."""

    loss: Tensor | None
    logits: Tensor


class LoopDecoder(nn.Module):
    """A causal language model of averaging attention and looping experts."""

    def __init__(self, width: int = 512, depth: int = 8, num_experts: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(264, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"mix": nn.Linear(width, width), "moe": LoopMoE(width, width, num_experts)}
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 264)

    @classmethod
    def tiny(cls) -> LoopDecoder:
        """The model at the size that is verified."""
        return cls(width=16, depth=2, num_experts=8)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Logits [B, S, V] and, with labels, the mean loss of each token's successor."""
        x = self.words(input_ids)
        steps = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        for block in self.blocks:
            # The mean of all tokens so far stands for attention.
            x = x + block["mix"](x.cumsum(1) / steps)
            x = x + block["moe"](x)
        logits = self.head(x)
        if labels is None:
            return Output(None, logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)


register_experts(
    LoopMoE,
    experts="mlps",
    route=LoopMoE.route,
    weights=lambda mlp: (mlp.w1.weight, mlp.w3.weight, mlp.w2.weight),
    activation=F.gelu,
)
