"""Capacity by the textbook, for the single-process reference. Torch alone.

Dispatchers are here too: they change nothing that a single process could see.
"""

# Shapes.  B sequences   S tokens of a sequence   T tokens = B*S   K top-k   E all experts

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .plain import Batch, Feature, Plain


class PlainCapacity(Plain):
    """A plain model whose experts take only so many tokens: the weights of the others are zero.

    Args:
        model: The plain model.
        factor: See `FoldedConfig.capacity_factor`.
        drop: See `FoldedConfig.token_drop`.
        scope: "sequence" counts each sequence by itself, "local" the whole sub-batch.
    """

    def __init__(self, model: nn.Module, *, factor: float, drop: str, scope: str) -> None:
        super().__init__(model)
        self.factor, self.drop, self.scope = Fraction(str(factor)), drop, scope
        self.valid_BS = torch.empty(0, 0, dtype=torch.bool)
        for module in model.modules():
            if isinstance(getattr(module, "down_proj", None), nn.Parameter):
                self._limit(module)
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model: nn.Module, args: Any, kwargs: Batch) -> None:
        shape = kwargs["input_ids"].shape
        self.valid_BS = kwargs.get("attention_mask", torch.ones(shape)).bool()

    def _limit(self, experts: Any) -> None:
        forward, num_experts = experts.forward, experts.down_proj.shape[0]

        def limited(hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
            kept_TK = self.kept(index_TK, weights_TK.detach(), num_experts)
            out: Tensor = forward(hidden_TD, index_TK, weights_TK * kept_TK)
            return out

        experts.forward = limited

    def kept(self, index_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Tensor:
        """Which rows stay, bool [T, K]."""
        valid = self.valid_BS.reshape(-1).tolist()
        size = self.valid_BS.shape[1] if self.scope == "sequence" else len(valid)
        kept_TK = torch.zeros(index_TK.shape, dtype=torch.bool)
        for start in range(0, len(valid), size):
            tokens = [t for t in range(start, start + size) if valid[t]]
            room = math.ceil(Fraction(len(tokens) * index_TK.shape[1], num_experts) * self.factor)
            for expert in range(num_experts):
                for row in self._by_merit(tokens, index_TK, weights_TK, expert)[:room]:
                    kept_TK[row] = True
        return kept_TK

    def _by_merit(
        self, tokens: Sequence[int], index_TK: Tensor, weights_TK: Tensor, expert: int
    ) -> list[tuple[int, int]]:
        rows = [(t, k) for t in tokens for k, e in enumerate(index_TK[t].tolist()) if e == expert]
        if self.drop == "position":
            return rows
        return sorted(rows, key=lambda row: -float(weights_TK[row]))


def _capacity(factor: float, drop: str, scope: str, **strategy: Any) -> Feature:
    options: dict[str, Any] = {"capacity_scope": scope} if scope == "sequence" else {}
    options |= strategy.pop("router_options", {})
    given: Mapping[str, Any] = {
        "capacity_factor": factor,
        "token_drop": drop,
        "router_options": options,
        **strategy,
    }
    return Feature(given, partial(PlainCapacity, factor=factor, drop=drop, scope=scope))


_PADDED = {"pad_to_capacity": True}

TOKENS: dict[str, Feature] = {
    "all_gather": Feature({"dispatcher": "all_gather"}),
    "dedup": Feature({"dispatcher": "dedup"}),
    "capacity": _capacity(0.7, "probability", "sequence"),
    "capacity-position": _capacity(0.9, "position", "sequence", dispatcher="dedup"),
    "capacity-padded": _capacity(0.7, "probability", "sequence", router_options=_PADDED),
    "capacity-local": _capacity(0.7, "probability", "local"),
    "capacity-local-padded": _capacity(0.7, "position", "local", router_options=_PADDED),
}
