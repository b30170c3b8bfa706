"""This package's decision in place of a router's own; the router's weights and names stay.

Hooks of the user on the router go on seeing (logits, weights, index). Which options a router's
experts allow is checked before anything is touched.
"""

# Shapes.  T tokens   K top-k   E all experts   D model width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fold_kernels.ops.router import route
from fold_kernels.router import RouterSpec, router_logits, scores_of, weights_of
from lightning_fold.model.routers import Router, refuse_router
from lightning_fold.moe.tokens import RunningTokens, TokenLayout
from lightning_fold.params import local_tensor
from lightning_fold.router_options import RouterOptions

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def plan_decision(router: Router, options: RouterOptions) -> RouterSpec:
    """The decision that replaces the router's own. Changes nothing.

    Raises:
        ValueError: The router is more than a weight [E, D], or the options do not fit its experts.
    """
    weight, bias = (router.module._parameters.get(key) for key in ("weight", "bias"))
    needed_for = f"router={options.router!r}"
    if weight is None or weight.dim() != 2 or weight.shape[0] != router.num_experts:
        raise refuse_router(router.name, f"it has no weight [{router.num_experts}, D]", needed_for)
    known = {id(param) for param in (weight, bias)}
    others = [name for name, p in router.module.named_parameters() if id(p) not in known]
    if others:
        raise refuse_router(
            router.name, f"it has further parameters ({', '.join(others)})", needed_for
        )
    names = {field.name for field in fields(RouterSpec)}
    chosen = {key: value for key, value in options.decision.items() if key in names}
    spec = replace(router.spec, **chosen)
    try:
        spec.check(router.num_experts)
    except ValueError as error:
        raise ValueError(f"{router.name}: {error} It is a key of `router_options`.") from error
    return spec


def replace_decision(router: Router, options: RouterOptions, tokens: RunningTokens) -> None:
    """Let `router.spec` decide in place of the router's forward, or the even load."""
    even = options.router == "balanced"
    router.module.forward = FoldedRouter(router, options.decision, even=even, tokens=tokens)
    # Where `token_rng.has_randomness` looks for it.
    router.module.input_jitter = float(options.decision.get("input_jitter", 0.0))


class FoldedRouter:
    """Replaces the forward of a router; its weights stay where they are.

    Args:
        router: The router; its `spec` decides.
        decision: The keys `dtype` and `input_jitter`.
        even: Choose round-robin instead, which spreads any tokens evenly.
        tokens: Which tokens of the batch the rows are.
    """

    def __init__(
        self,
        router: Router,
        decision: Mapping[str, Any],
        *,
        even: bool,
        tokens: RunningTokens,
    ) -> None:
        self.router = router
        self.spec = router.spec
        self.dtype = _DTYPES.get(decision.get("dtype", ""))
        self.jitter = float(decision.get("input_jitter", 0.0))
        self.even = even
        self.tokens = tokens

    def __call__(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, E], weights [T, K] in at least fp32, and index [T, K], of rows [..., D].

        Some blocks pass their expert bias too; it is found without.
        """
        module = self.router.module
        hidden_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        if module.training and self.jitter > 0:
            noise_TD = torch.empty_like(hidden_TD).uniform_(1 - self.jitter, 1 + self.jitter)
            hidden_TD = hidden_TD * noise_TD
        bias = module._parameters.get("bias")
        linear_bias_E = None if bias is None else local_tensor(bias)
        logits_TE = router_logits(hidden_TD, local_tensor(module.weight), self.dtype, linear_bias_E)
        if not self.even:
            weights_TK, index_TK = route(logits_TE, self.spec, self.router.bias_E)
            return logits_TE, weights_TK, index_TK
        index_TK = even_ids(hidden_TD, self.tokens.moe, self.spec.top_k, self.router.num_experts)
        scores_TE = scores_of(logits_TE, self.spec.scores)
        return logits_TE, weights_of(logits_TE, scores_TE, index_TK, self.spec), index_TK


def even_ids(rows_TD: Tensor, layout: TokenLayout | None, top_k: int, num_experts: int) -> Tensor:
    """Experts of every token taken in turn, int64 [T, K], equal under every mapping.

    Tokens are numbered by sequence and place; without a layout, by row.
    """
    if layout is None:
        number_T = torch.arange(rows_TD.shape[0], device=rows_TD.device)
    else:
        places_T = layout.places_s.repeat(layout.num_sequences)
        number_T = layout.sequence_T() * layout.length + places_T
    turns_K = torch.arange(top_k, device=rows_TD.device)
    return (number_T.unsqueeze(1) * top_k + turns_K) % num_experts
