"""What `router` and `router_options` make of a model: planned first, applied after all checks.

Owns which routers are needed, the coefficients that the model's config says, and when the model's
own aux loss is taken over: a Hugging Face model computes it from whole sequences, which no layer
sees under tp and cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_fold.model.balance import Balance
from lightning_fold.model.folded_router import plan_decision, replace_decision
from lightning_fold.model.inspect import ModelParts
from lightning_fold.model.passage import Passage
from lightning_fold.model.routers import BIAS_NAMES, Router, find_routers
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.router_options import AuxLoss, RouterOptions
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.folding import Folding


@dataclass(frozen=True)
class RoutingPlan:
    """What is to be done to the routers of one model.

    Attributes:
        routers: Those that are needed, with the decision that they will have.
        options: Options, all coefficients known.
        takes_over: See `Balance`.
    """

    routers: Sequence[Router] = ()
    options: RouterOptions = field(default_factory=RouterOptions)
    takes_over: bool = False

    @property
    def adds_bias(self) -> frozenset[str]:
        """Names of the buffers that the model gets."""
        lacking = [r for r in self.routers if r.bias_owner is None]
        asked = lacking if self.options.bias_update_rate else []
        return frozenset(f"{router.name}.{BIAS_NAMES[0]}" for router in asked)


def plan_routing(
    root: nn.Module, parts: ModelParts, options: RouterOptions, folding: Folding
) -> RoutingPlan:
    """Check the options against the model. Changes nothing.

    Raises:
        ValueError: A router cannot do what is asked for, or the model balances by itself.
    """
    own = bool(getattr(getattr(parts.core, "config", None), "output_router_logits", False))
    if own and options.balances:
        raise ValueError(
            "aux_losses or z_loss beside config.output_router_logits=True would balance the "
            "experts twice. Set config.output_router_logits=False; its formula is {'formula': "
            "'model'}.  Change `router_options`."
        )
    takes_over = own and folding.tp * folding.cp * folding.pp > 1
    if takes_over:
        _check_taken_over(parts.core, folding)
        options = replace(options, aux_losses=(AuxLoss("model"),))
    reason = _needed_for(options, takes_over)
    if reason is None:
        return RoutingPlan(options=options)
    routers = find_routers(root, parts, needed_for=reason)
    if options.router != "model":
        routers = tuple(replace(r, spec=plan_decision(r, options)) for r in routers)
    options = replace(options, aux_losses=_with_coefficients(options, parts.core))
    _check_balance(routers, options, takes_over)
    return RoutingPlan(routers, options, takes_over)


def apply_routing(plan: RoutingPlan, tokens: RunningTokens) -> RoutingPlan:
    """Give the routers their bias and their decision; before tensor parallelism. Local."""
    routers = plan.routers
    if plan.options.bias_update_rate:
        routers = [_with_bias(router) for router in routers]
    if plan.options.router != "model":
        for router in routers:
            replace_decision(router, plan.options, tokens)
    return replace(plan, routers=routers)


def install_balance(
    plan: RoutingPlan,
    parts: ModelParts,
    *,
    comm: Comm,
    tokens: RunningTokens,
    passage: Passage | None = None,
) -> Balance | None:
    """Hook what balances the experts; None where nothing does. See `Balance.install`.

    Args:
        plan: For the whole model.
        parts: Those of this rank.
        comm: Collectives.
        tokens: Which tokens the layers see.
        passage: What comes in from the pipeline stage before; None where there is none.
    """
    if not (plan.options.balances or plan.options.bias_update_rate):
        return None
    layers = tuple(f"{name}." for name, _ in parts.layers)
    balance = Balance(
        [router for router in plan.routers if router.name.startswith(layers)],
        plan.options,
        comm=comm,
        tokens=tokens,
        takes_over=plan.takes_over,
        passage=passage,
    )
    balance.install(parts.core)
    return balance


def _needed_for(options: RouterOptions, takes_over: bool) -> str | None:
    if options.router != "model":
        return f"router={options.router!r}"
    if takes_over:
        return "config.output_router_logits=True under tp*cp*pp > 1"
    if options.balances:
        return "aux_losses and z_loss"
    return "bias_update_rate" if options.bias_update_rate else None


def _with_coefficients(options: RouterOptions, core: Any) -> tuple[AuxLoss, ...]:
    said = getattr(getattr(core, "config", None), "router_aux_loss_coef", None)
    if said is None and any(aux.coefficient is None for aux in options.aux_losses):
        raise ValueError(
            f"the formula 'model' has no coefficient, and the config of {type(core).__name__} has "
            "no `router_aux_loss_coef`. Give the coefficient.  Change `router_options`."
        )
    known: Any = said
    return tuple(
        replace(aux, coefficient=float(known)) if aux.coefficient is None else aux
        for aux in options.aux_losses
    )


def _check_taken_over(core: Any, folding: Folding) -> None:
    if getattr(core.config, "router_aux_loss_coef", None) is None:
        raise ValueError(
            f"config.output_router_logits=True cannot be served under tp*cp*pp = {folding.tp}*"
            f"{folding.cp}*{folding.pp}: no rank sees all layers and tokens, and the config of "
            f"{type(core).__name__} has no `router_aux_loss_coef` that would make a loss of it. "
            "Set config.output_router_logits=False.  Change `tensor_parallel_size`, "
            "`context_parallel_size` or `pipeline_parallel_size`."
        )


def _check_balance(routers: Sequence[Router], options: RouterOptions, takes_over: bool) -> None:
    formulas = {aux.formula for aux in options.aux_losses}
    sizes = {router.num_experts for router in routers}
    if "model" in formulas and len(sizes) > 1:
        raise ValueError(
            f"the formula 'model' sums over layers, and their numbers of experts differ: "
            f"{sorted(sizes)}. Legal formula: 'per_layer'.  Change `router_options`."
        )
    for router in routers:
        if takes_over and router.spec.scores != "softmax":
            raise ValueError(
                f"{router.name} routes by {router.spec.scores}, and the model's own aux loss by "
                "softmax: under tp*cp*pp > 1 it cannot be had. Set "
                "config.output_router_logits=False and `router_options` {'aux_losses': "
                "[{'formula': 'model'}]}."
            )
        if not options.bias_update_rate:
            continue
        bias_E = router.bias_E
        if bias_E is None and options.router != "folded":
            raise ValueError(
                f"{router.name} has no expert bias for bias_update_rate: no buffer "
                f"{' or '.join(BIAS_NAMES)} at it or at its block. Set router='folded', which adds "
                "one, or `use_expert_bias=True` in the built-in decoder's config.  Change `router`."
            )
        if bias_E is not None and bias_E.shape != (router.num_experts,):
            raise ValueError(
                f"{router.name}: its bias has shape {tuple(bias_E.shape)}, not "
                f"({router.num_experts},). Leave bias_update_rate out.  Change `router_options`."
            )


def _with_bias(router: Router) -> Router:
    """The router with a bias in at least fp32: in bf16 a step of 1e-3 would be lost."""
    if router.bias_owner is None:
        weight = router.module.weight
        device = "cpu" if weight.is_meta else weight.device
        zeros_E = torch.zeros(router.num_experts, device=device)
        router.module.register_buffer(BIAS_NAMES[0], zeros_E)
        return replace(router, bias_owner=router.module, bias_name=BIAS_NAMES[0])
    bias_E = router.bias_E
    assert bias_E is not None
    wide = torch.promote_types(bias_E.dtype, torch.float32)
    router.bias_owner._buffers[router.bias_name] = bias_E.to(wide)
    return router
