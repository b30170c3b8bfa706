"""The routing decision and its gradient, one program for a few tokens.

Experts are taken one after the other: each round keeps the largest of distinct 64-bit keys, made
of (score, lower id first), so ids never repeat and ties fall as in `fold_kernels.router`. The
gradient computes the scores again from the logits instead of keeping them. fp32 throughout.
"""

# Shapes.  T tokens   K top-k   E all experts   G groups of experts

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fold_kernels.router import RouterSpec

SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}
TINY = tl.constexpr(1e-20)
# Registers hold the scores of one program's tokens.
ELEMENTS = 2048


@triton.jit
def load_logits(logits_ptr, token, expert, T, NUM_EXPERTS: tl.constexpr):
    mask = (token < T)[:, None] & (expert < NUM_EXPERTS)[None, :]
    place = token.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :]
    return tl.load(logits_ptr + place, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def scores_of(logits, SCORES: tl.constexpr):
    """Scores over all experts; columns of no expert hold minus infinity and get none."""
    if SCORES == 0:
        top = tl.max(logits, 1)
        # A row of minus infinities is NaN in torch too; padding rows are such rows.
        shifted = tl.exp(logits - top[:, None])
        return shifted / tl.sum(shifted, 1)[:, None]
    if SCORES == 1:
        return tl.sigmoid(logits)
    return tl.sqrt(softplus(logits))


@triton.jit
def softplus(x):
    # torch's own: linear above 20.
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def keys_of(values, expert, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Distinct integers that order like (value, lower id); padding columns come last."""
    # Adding zero makes -0.0 equal to 0.0.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 16) | (BLOCK_E - 1 - expert).to(tl.int64)[None, :]
    return tl.where((expert < NUM_EXPERTS)[None, :], keys, -(1 << 62))


@triton.jit
def only_best_groups(
    values,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUM_OF_TWO: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Minus infinity outside of the groups that a token may choose from."""
    SIZE: tl.constexpr = BLOCK_E // GROUPS
    grouped = tl.reshape(values, (BLOCK_T, GROUPS, SIZE))
    score = tl.max(grouped, 2)
    if SUM_OF_TWO and SIZE > 1:
        member = tl.arange(0, SIZE)[None, None, :]
        best = tl.argmax(grouped, 2, tie_break_left=True)
        score += tl.max(tl.where(member == best[:, :, None], -float("inf"), grouped), 2)
    group = tl.arange(0, GROUPS)
    mine, other = score[:, :, None], score[:, None, :]
    earlier = (group[None, :] < group[:, None])[None, :, :]
    ahead = (other > mine) | ((other == mine) & earlier)
    kept = tl.sum(ahead.to(tl.int32), 2) < TOP_GROUPS
    return tl.reshape(tl.where(kept[:, :, None], grouped, -float("inf")), (BLOCK_T, BLOCK_E))


@triton.jit(do_not_specialize=["T"])
def router_topk_kernel(
    logits_ptr,  # [T, E], in
    bias_ptr,  # [E] fp32, in; with HAS_BIAS
    weights_ptr,  # [T, K] fp32, out
    index_ptr,  # [T, K] int64, out
    T,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORES: tl.constexpr,
    AFTER: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUM_OF_TWO: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    logits = load_logits(logits_ptr, token, expert, T, NUM_EXPERTS)
    scores = scores_of(logits, SCORES)
    ranked = logits if AFTER else scores
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)[None, :]
    if TOP_GROUPS < GROUPS:
        ranked = only_best_groups(ranked, GROUPS, TOP_GROUPS, SUM_OF_TWO, BLOCK_T, BLOCK_E)
    keys = keys_of(ranked, expert, NUM_EXPERTS, BLOCK_E)
    slot = tl.arange(0, BLOCK_K)
    chosen = logits if AFTER else scores
    weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    if AFTER:
        weights += -float("inf")
    index = tl.zeros((BLOCK_T, BLOCK_K), tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        found = (BLOCK_E - 1) - (best & 0xFFFF)
        hit = expert.to(tl.int64)[None, :] == found[:, None]
        value = tl.sum(tl.where(hit, chosen, 0.0), 1)
        here = (slot == k)[None, :]
        weights = tl.where(here, value[:, None], weights)
        index = tl.where(here, found[:, None], index)
        keys = tl.where(hit, -(1 << 62), keys)
    if AFTER:
        shifted = tl.exp(weights - tl.max(weights, 1)[:, None])
        weights = shifted / tl.sum(shifted, 1)[:, None]
    elif RENORMALISE:
        weights = weights / (tl.sum(weights, 1)[:, None] + TINY)
    # Group limits may pass over a NaN; the layer refuses NaN weights, so it must see one.
    broken = tl.max((logits != logits).to(tl.int32), 1)
    weights = tl.where(broken[:, None] > 0, float("nan"), weights)
    place = token.to(tl.int64)[:, None] * TOP_K + slot[None, :]
    mask = (token < T)[:, None] & (slot < TOP_K)[None, :]
    tl.store(weights_ptr + place, weights * scale, mask=mask)
    tl.store(index_ptr + place, index, mask=mask)


@triton.jit(do_not_specialize=["T"])
def router_topk_backward_kernel(
    logits_ptr,  # [T, E], in
    index_ptr,  # [T, K] int64, in
    grad_weights_ptr,  # [T, K] fp32, in
    grad_logits_ptr,  # [T, E], out
    T,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORES: tl.constexpr,
    AFTER: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    logits = load_logits(logits_ptr, token, expert, T, NUM_EXPERTS)
    scores = scores_of(logits, SCORES)
    # Gradients of the chosen, and which those are, spread over the experts.
    spread = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    chosen = tl.zeros((BLOCK_T, BLOCK_E), tl.int1)
    for k in tl.static_range(TOP_K):
        place = token.to(tl.int64) * TOP_K + k
        found = tl.load(index_ptr + place, mask=token < T, other=-1)
        grad = tl.load(grad_weights_ptr + place, mask=token < T, other=0.0) * scale
        hit = expert.to(tl.int64)[None, :] == found[:, None]
        spread += tl.where(hit, grad[:, None], 0.0)
        chosen = chosen | hit
    if AFTER:
        kept = tl.where(chosen, logits, -float("inf"))
        shifted = tl.exp(kept - tl.max(kept, 1)[:, None])
        weights = shifted / tl.sum(shifted, 1)[:, None]
        grad_logits = weights * (spread - tl.sum(spread * weights, 1)[:, None])
    else:
        if RENORMALISE:
            kept = tl.where(chosen, scores, 0.0)
            total = tl.sum(kept, 1)[:, None] + TINY
            inner = tl.sum(spread * kept, 1)[:, None] / total
            spread = tl.where(chosen, (spread - inner) / total, 0.0)
        if SCORES == 0:
            grad_logits = scores * (spread - tl.sum(spread * scores, 1)[:, None])
        elif SCORES == 1:
            grad_logits = spread * scores * (1.0 - scores)
        else:
            # The slope of sqrt(softplus) is sigmoid / (2 sqrt(softplus)); 0/0 far to the left.
            root = tl.where(scores > 0.0, scores, 1.0)
            slope = tl.where(scores > 0.0, tl.sigmoid(logits) / (2.0 * root), 0.0)
            grad_logits = spread * slope
    mask = (token < T)[:, None] & (expert < NUM_EXPERTS)[None, :]
    place = token.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(grad_logits_ptr + place, grad_logits.to(grad_logits_ptr.dtype.element_ty), mask=mask)


def router_topk(
    logits_TE: Tensor, spec: RouterSpec, bias_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] fp32 and index [T, K] int64. See `fold_kernels.router.route`."""
    tokens, experts = logits_TE.shape
    weights_TK = logits_TE.new_empty(tokens, spec.top_k, dtype=torch.float32)
    index_TK = logits_TE.new_empty(tokens, spec.top_k, dtype=torch.int64)
    if tokens == 0:
        return weights_TK, index_TK
    sizes = _sizes(experts)
    router_topk_kernel[(triton.cdiv(tokens, sizes["BLOCK_T"]),)](
        logits_TE,
        None if bias_E is None else bias_E.float().contiguous(),
        weights_TK,
        index_TK,
        tokens,
        spec.scaling_factor,
        HAS_BIAS=bias_E is not None,
        GROUPS=spec.num_groups,
        TOP_GROUPS=spec.top_groups,
        SUM_OF_TWO=spec.group_score == "top2_sum",
        BLOCK_K=triton.next_power_of_2(spec.top_k),
        **_decision(spec, experts),
        **sizes,
    )
    return weights_TK, index_TK


def router_topk_backward(
    logits_TE: Tensor, index_TK: Tensor, grad_TK: Tensor, spec: RouterSpec
) -> Tensor:
    """Gradient of the logits, [T, E] in their dtype; every element is written."""
    tokens, experts = logits_TE.shape
    grad_TE = torch.empty_like(logits_TE)
    if tokens == 0:
        return grad_TE
    sizes = _sizes(experts)
    router_topk_backward_kernel[(triton.cdiv(tokens, sizes["BLOCK_T"]),)](
        logits_TE,
        index_TK,
        grad_TK,
        grad_TE,
        tokens,
        spec.scaling_factor,
        **_decision(spec, experts),
        **sizes,
    )
    return grad_TE


def _decision(spec: RouterSpec, experts: int) -> dict[str, int]:
    return {
        "NUM_EXPERTS": experts,
        "TOP_K": spec.top_k,
        "SCORES": SCORES[spec.scores],
        "AFTER": spec.softmax_after_topk,
        "RENORMALISE": spec.renormalise,
    }


def _sizes(experts: int) -> dict[str, int]:
    block = triton.next_power_of_2(experts)
    return {"BLOCK_T": max(1, min(16, ELEMENTS // block)), "BLOCK_E": block}
