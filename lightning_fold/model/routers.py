"""Find the routers of a model and read off them how they decide.

A router is known by what it does, not by its class: called with rows [T, D] it returns (logits,
weights, index). That is tried on three rows at set-up, so a router of another kind is refused
before anything is touched. Changes nothing.
"""

# Shapes.  T tokens   K top-k   E all experts   D model width

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fold_kernels.router import RouterSpec, ScoreKind
from lightning_fold.model.inspect import ROUTER_NAMES, ExpertsSpec, ModelParts

BIAS_NAMES = ("e_score_correction_bias", "expert_bias")
"""Buffers, at a router or at its block, that are added to what ranks the experts."""
_SCORES: Mapping[str, ScoreKind] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrt_softplus",
    "sqrt_softplus": "sqrt_softplus",
}
# Field of RouterSpec -> where a Hugging Face router or config says it.
_SAID_BY = {
    "renormalise": ("norm_topk_prob",),
    "scaling_factor": ("routed_scaling_factor",),
    "num_groups": ("num_group", "n_group"),
    "top_groups": ("topk_group",),
}


@dataclass(frozen=True)
class Router:
    """One router.

    Attributes:
        name: Qualified name from the LightningModule.
        module: The router.
        num_experts: E.
        spec: How it decides, as far as module and config say; `top_k` and `scores` always hold.
        bias_owner: Module that holds the expert bias; None where there is none.
        bias_name: Name of that buffer.
    """

    name: str
    module: Any
    num_experts: int
    spec: RouterSpec
    bias_owner: nn.Module | None
    bias_name: str = BIAS_NAMES[0]

    @property
    def bias_E(self) -> Tensor | None:
        """The expert bias."""
        return None if self.bias_owner is None else self.bias_owner._buffers[self.bias_name]


def find_routers(root: nn.Module, parts: ModelParts, *, needed_for: str) -> tuple[Router, ...]:
    """Find the router of every MoE layer, in order of the forward. Changes nothing.

    Args:
        root: The LightningModule.
        parts: Its parts.
        needed_for: The option that asks for them, for the message.

    Raises:
        ValueError: A layer has no router that can be read.
    """
    return tuple(_find(root, parts, spec, needed_for) for spec in parts.experts)


def _find(root: nn.Module, parts: ModelParts, experts: ExpertsSpec, needed_for: str) -> Router:
    block_name = experts.name.rpartition(".")[0]
    block = root.get_submodule(block_name)
    for child in ROUTER_NAMES:
        module: Any = block._modules.get(child)
        if module is not None:
            name = f"{block_name}.{child}"
            owner, bias_name = _bias_place(module, block)
            bias_E = None if owner is None else owner._buffers[bias_name]
            top_k = _tried(name, module, experts, bias_E, needed_for)
            spec = _spec_of(module, parts.core, top_k, has_bias=bias_E is not None)
            return Router(name, module, experts.num_experts, spec, owner, bias_name)
    raise refuse_router(block_name, f"it has no router ({' or '.join(ROUTER_NAMES)})", needed_for)


def _bias_place(router: nn.Module, block: nn.Module) -> tuple[nn.Module | None, str]:
    for owner in (router, block):
        for name in BIAS_NAMES:
            if owner._buffers.get(name) is not None:
                return owner, name
    return None, BIAS_NAMES[0]


def _tried(
    name: str, router: Any, experts: ExpertsSpec, bias_E: Tensor | None, needed_for: str
) -> int:
    """K, read off what the router makes of three rows."""
    more = list(inspect.signature(router.forward).parameters.values())[1:]
    extra = [p.name for p in more if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if extra and (extra != [BIAS_NAMES[0]] or bias_E is None):
        raise refuse_router(name, f"its forward also takes {', '.join(extra)}", needed_for)
    weight = next(router.parameters(), None)
    width = None if weight is None else _model_width(weight, experts)
    if weight is None or width is None:
        raise refuse_router(name, "it has no weight, or its experts are not stacked", needed_for)
    rows = torch.ones(3, width, dtype=weight.dtype, device=weight.device)
    try:
        # The forward by itself, without the hooks of others; random numbers stay as they were.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = router.forward(rows, **({extra[0]: bias_E} if extra else {}))
    except Exception as error:
        reason = f"its forward fails on rows {list(rows.shape)}: {type(error).__name__}: {error}"
        raise refuse_router(name, reason, needed_for) from error
    num_experts = experts.num_experts
    if not (isinstance(out, tuple) and len(out) == 3 and _is_decision(*out, num_experts)):
        reason = f"it does not return logits [T, {num_experts}], weights [T, K] and index [T, K]"
        raise refuse_router(name, reason, needed_for)
    return int(out[2].shape[1])


def _model_width(weight: Tensor, experts: ExpertsSpec) -> int | None:
    if weight.dim() == 2 and weight.shape[0] == experts.num_experts:
        return int(weight.shape[1])
    down = experts.module._parameters.get("down_proj")
    first = experts.module._parameters.get("gate_up_proj")
    if down is None:
        return None
    transposed = getattr(experts.module, "is_transposed", False)
    return int(down.shape[2] if transposed and first is not None else down.shape[1])


def _is_decision(logits: Any, weights: Any, index: Any, num_experts: int) -> bool:
    if not all(isinstance(x, Tensor) and x.dim() == 2 for x in (logits, weights, index)):
        return False
    integer = not index.is_floating_point() and not index.is_complex()
    return integer and logits.shape == (3, num_experts) and weights.shape == index.shape


def _spec_of(router: Any, core: Any, top_k: int, *, has_bias: bool) -> RouterSpec:
    """The decision of a router of the built-in kind, or what a Hugging Face config says of it."""
    known = getattr(router, "spec", None)
    if isinstance(known, RouterSpec):
        return known
    config = getattr(core, "config", None)
    said: dict[str, Any] = {}
    for field, names in _SAID_BY.items():
        values = [getattr(place, name, None) for place in (router, config) for name in names]
        said |= dict.fromkeys([field], next((v for v in values if v is not None), None))
    said = {field: value for field, value in said.items() if value is not None}
    kind = _SCORES.get(str(getattr(config, "scoring_func", None)))
    scores: ScoreKind = kind or ("sigmoid" if has_bias else "softmax")
    method = getattr(router, "topk_method", None)
    if method == "greedy":
        said |= {"num_groups": 1, "top_groups": 1}
    elif method == "group_limited_greedy":
        said["group_score"] = "max"
    return RouterSpec(top_k=top_k, scores=scores, **said)


def refuse_router(name: str, reason: str, needed_for: str) -> ValueError:
    """The error that says why a router cannot do what `needed_for` asks of it."""
    return ValueError(
        f"{name} cannot serve {needed_for}: {reason}. A router has to take rows [T, D] and return "
        "(logits [T, E], weights [T, K], index [T, K]). Legal: router='model' without aux_losses, "
        "z_loss and bias_update_rate.  Change `router_options`."
    )
