"""The routing decision of a MoE layer: from rows to experts and weights, in plain torch.

Invariants: the ids of a token differ from each other, also in rows of NaN, and equal scores go to
the lower id, which `torch.topk` does not promise. The choice carries no gradient; the weights do.
Not here: jitter, statistics.
"""

# Shapes.  T tokens   K top-k   E all experts   G groups of experts   D model width

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

ScoreKind = Literal["softmax", "sigmoid", "sqrt_softplus"]
GroupScore = Literal["top2_sum", "max"]
_KNOWN = {"scores": get_args(ScoreKind), "group_score": get_args(GroupScore)}
TINY = 1e-20
"""Added to the sum of a token's weights before they are divided by it."""


@dataclass(frozen=True)
class RouterSpec:
    """How a token chooses its experts.

    Attributes:
        top_k: Experts per token, K.
        scores: Turns logits into scores, in at least fp32.
        softmax_after_topk: Choose by logits, then take the softmax of the chosen K. They sum to 1,
            so `renormalise` changes nothing.
        renormalise: Divide the weights of a token by their sum + 1e-20.
        scaling_factor: Multiplies the weights at last.
        num_groups: G; experts lie in G runs of equal length.
        top_groups: Groups that a token may choose from.
        group_score: What ranks the groups: the sum of the two best experts (DeepSeek-V3), or the
            best one (DeepSeek-V2).
    """

    top_k: int
    scores: ScoreKind = "softmax"
    softmax_after_topk: bool = False
    renormalise: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2_sum"

    def check(self, num_experts: int) -> None:
        """Refuse what no router with `num_experts` experts can do.

        Raises:
            ValueError: Names the field.
        """
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise _refuse(name, getattr(self, name), f"one of {', '.join(known)}")
        if not 1 <= self.top_k <= num_experts:
            raise _refuse("top_k", self.top_k, f"in 1..{num_experts}, the number of experts")
        if self.softmax_after_topk and (self.scores != "softmax" or self.top_k == 1):
            legal = "False unless scores='softmax' and top_k > 1: else weights have no gradient"
            raise _refuse("softmax_after_topk", True, legal)
        if num_experts % self.num_groups:
            divisors = [g for g in range(1, num_experts + 1) if num_experts % g == 0]
            legal = f"a divisor of {num_experts} experts: {', '.join(map(str, divisors))}"
            raise _refuse("num_groups", self.num_groups, legal)
        size = num_experts // self.num_groups
        fewest = -(-self.top_k // size)
        if not fewest <= self.top_groups <= self.num_groups:
            legal = (
                f"in {fewest}..{self.num_groups}: top_groups * {num_experts}/{self.num_groups} "
                f"experts must hold top_k={self.top_k}, and there are {self.num_groups} groups"
            )
            raise _refuse("top_groups", self.top_groups, legal)


def route_ref(
    logits_TE: Tensor, spec: RouterSpec, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose K experts for every token. Local, without a host synchronisation.

    Args:
        logits_TE: Any floating dtype.
        spec: How to choose.
        bias_E: Added to what ranks experts and groups, not to the weights; no gradient.

    Returns:
        weights_TK: In at least fp32, with gradient.
        index_TK: int64, best first.
        scores_TE: Over all experts, in at least fp32, without bias or limits, with gradient.
    """
    scores_TE = scores_of(logits_TE, spec.scores)
    ranked_TE = logits_TE if spec.softmax_after_topk else scores_TE
    index_TK = _choose(ranked_TE.detach(), spec, bias_E)
    return weights_of(logits_TE, scores_TE, index_TK, spec), index_TK, scores_TE


def router_logits(
    hidden_TD: Tensor,
    weight_ED: Tensor,
    dtype: torch.dtype | None = None,
    bias_E: Tensor | None = None,
) -> Tensor:
    """The router's product [T, E].

    Args:
        hidden_TD: Any floating dtype.
        weight_ED: The router's weight.
        dtype: Of the product, also under autocast; None leaves it to the operands.
        bias_E: Of a linear router; part of the logits.
    """
    if dtype is None:
        return F.linear(hidden_TD, weight_ED, bias_E)
    bias_E = None if bias_E is None else bias_E.to(dtype)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        return F.linear(hidden_TD.to(dtype), weight_ED.to(dtype), bias_E)


def scores_of(logits_TE: Tensor, kind: ScoreKind) -> Tensor:
    """Scores over all experts in at least fp32; only softmax's sum to 1."""
    dtype = torch.promote_types(logits_TE.dtype, torch.float32)
    if kind == "softmax":
        return F.softmax(logits_TE, dim=-1, dtype=dtype)
    wide_TE = logits_TE.to(dtype)
    return wide_TE.sigmoid() if kind == "sigmoid" else F.softplus(wide_TE).sqrt()


def weights_of(logits_TE: Tensor, scores_TE: Tensor, index_TK: Tensor, spec: RouterSpec) -> Tensor:
    """Weights of experts that are already chosen, [T, K] in at least fp32, with gradient."""
    if spec.softmax_after_topk:
        chosen_TK = logits_TE.gather(1, index_TK)
        weights_TK = F.softmax(chosen_TK, dim=-1, dtype=scores_TE.dtype)
    else:
        weights_TK = scores_TE.gather(1, index_TK)
        if spec.renormalise:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + TINY)
    return weights_TK if spec.scaling_factor == 1.0 else weights_TK * spec.scaling_factor


def top_ids(values_TE: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row, largest first; of equal ones the lower id."""
    num_columns = values_TE.shape[1]
    if values_TE.dtype != torch.float32 or num_columns > 1 << 16:
        return values_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    # Twice as quick as the sort: distinct integers that order like (value, lower id), for topk.
    # Adding zero makes -0.0 equal to 0.0; the mask turns sign and magnitude into two's complement.
    bits_TE = (values_TE + 0.0).view(torch.int32)
    ordered_TE = bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)
    last_first_E = torch.arange(num_columns - 1, -1, -1, device=values_TE.device)
    return ((ordered_TE.long() << 16) | last_first_E).topk(k, dim=-1).indices


def _choose(ranked_TE: Tensor, spec: RouterSpec, bias_E: Tensor | None) -> Tensor:
    if bias_E is not None:
        ranked_TE = ranked_TE + bias_E.detach()
    if spec.top_groups < spec.num_groups:
        ranked_TE = _only_best_groups(ranked_TE, spec)
    return top_ids(ranked_TE, spec.top_k)


def _only_best_groups(ranked_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Minus infinity outside of the groups that a token may choose from."""
    grouped_TGe = ranked_TE.unflatten(1, (spec.num_groups, -1))
    best = min(2, grouped_TGe.shape[2]) if spec.group_score == "top2_sum" else 1
    group_scores_TG = grouped_TGe.topk(best, dim=-1).values.sum(dim=-1)
    kept = top_ids(group_scores_TG, spec.top_groups)
    closed_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter(1, kept, False)
    return grouped_TGe.masked_fill(closed_TG.unsqueeze(-1), -torch.inf).flatten(1)


def _refuse(field: str, value: object, legal: str) -> ValueError:
    return ValueError(f"{field}={value!r} of a router must be {legal}. Change `{field}`.")
