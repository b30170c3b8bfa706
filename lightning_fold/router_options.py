"""The keys of `router_options`: names, values, and which of them `router` allows.

Owns one table of keys; a feature that needs a key adds a row. Checks values by themselves; whether
a decision fits a model's experts is said where the model is known. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_fold.topology.doctor import nearest

FORMULAS = ("per_sequence", "per_layer", "model", "global_batch")
"""Auxiliary losses; `moe.balance` defines them."""


@dataclass(frozen=True)
class AuxLoss:
    """One auxiliary loss.

    Attributes:
        formula: One of `FORMULAS`.
        coefficient: Multiplies it; None takes `router_aux_loss_coef` of the model's config.
    """

    formula: str
    coefficient: float | None = None


@dataclass(frozen=True)
class RouterOptions:
    """`router` and `router_options`, checked.

    Attributes:
        router: Who routes.
        decision: Keys of the decision that were given, by name.
        aux_losses: Added to the loss.
        z_loss: Coefficient of the mean squared logsumexp of the logits; 0 is none.
        bias_update_rate: Step of the expert bias after every optimizer step; 0 is none.
    """

    router: str = "model"
    decision: Mapping[str, Any] = field(default_factory=dict)
    aux_losses: tuple[AuxLoss, ...] = ()
    z_loss: float = 0.0
    bias_update_rate: float = 0.0

    @property
    def balances(self) -> bool:
        """Whether something is added to the loss."""
        return bool(self.aux_losses) or self.z_loss > 0


@dataclass(frozen=True)
class _Key:
    """One key: which values it takes, in code and in words."""

    holds: Callable[[Any], bool]
    legal: str
    decides: bool = False


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 1


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, str) and value in choices, ", ".join(map(repr, choices))


def _decision(holds: Callable[[Any], bool], legal: str) -> _Key:
    return _Key(holds, legal, decides=True)


def _flag(value: Any) -> bool:
    return type(value) is bool


# Key -> its values. Keys that decide need router='folded'; the others go with any router.
KEYS: dict[str, _Key] = {
    "top_k": _decision(_whole, "an int of at least 1"),
    "scores": _decision(*_one_of("softmax", "sigmoid", "sqrt_softplus")),
    "softmax_after_topk": _decision(_flag, "a bool"),
    "renormalise": _decision(_flag, "a bool"),
    "scaling_factor": _decision(lambda v: _number(v) and v > 0, "a number above 0"),
    "num_groups": _decision(_whole, "an int of at least 1"),
    "top_groups": _decision(_whole, "an int of at least 1"),
    "group_score": _decision(*_one_of("top2_sum", "max")),
    "dtype": _decision(*_one_of("fp32", "fp64")),
    "input_jitter": _decision(lambda v: _number(v) and v < 1, "a number in [0, 1)"),
    "aux_losses": _Key(
        lambda v: isinstance(v, list | tuple) and all(isinstance(item, Mapping) for item in v),
        "a list of {'formula': ..., 'coefficient': ...}",
    ),
    "z_loss": _Key(_number, "a number of at least 0"),
    "bias_update_rate": _Key(_number, "a number of at least 0"),
    # Of the capacity, see `FoldedConfig.capacity_factor`.
    "capacity_scope": _Key(*_one_of("local", "sequence")),
    "pad_to_capacity": _Key(_flag, "a bool"),
}


def parse_options(router: str, options: Mapping[str, Any] | None) -> RouterOptions:
    """Check the options that a user gave and make a value of them.

    Raises:
        ValueError: Names the key, the legal values and the field.
    """
    given = dict(options or {})
    for key, value in given.items():
        _check_key(router, key, value)
    if router == "balanced" and given.get("bias_update_rate"):
        raise ValueError(
            f"router_options['bias_update_rate']={given['bias_update_rate']} moves a bias of the "
            "choice, and router='balanced' deals tokens out in turn, without one. Leave it out, or "
            "set router='folded'.  Change `router_options`."
        )
    return RouterOptions(
        router=router,
        decision={key: value for key, value in given.items() if KEYS[key].decides},
        aux_losses=tuple(_aux_loss(item) for item in given.get("aux_losses", ())),
        z_loss=float(given.get("z_loss", 0.0)),
        bias_update_rate=float(given.get("bias_update_rate", 0.0)),
    )


def _check_key(router: str, key: str, value: Any) -> None:
    if key not in KEYS:
        likely = nearest(str(key), list(KEYS))
        hint = f"Change it to {likely!r}" if likely else f"Legal: {', '.join(KEYS)}"
        raise ValueError(f"{key!r} is no key of router_options. {hint}.  Change `router_options`.")
    if not KEYS[key].holds(value):
        raise ValueError(
            f"router_options[{key!r}]={value!r} is no value of this key "
            f"({type(value).__name__}). Legal {key}: {KEYS[key].legal}.  Change `router_options`."
        )
    if KEYS[key].decides and router != "folded":
        raise ValueError(
            f"router_options[{key!r}] decides which experts a token takes, and with "
            f"router={router!r} this package does not decide. Set router='folded', or the option "
            "in the model's own config.  Change `router`."
        )


def _aux_loss(item: Mapping[str, Any]) -> AuxLoss:
    unknown = [key for key in item if key not in ("formula", "coefficient")]
    formula, coefficient = item.get("formula"), item.get("coefficient")
    if unknown or formula not in FORMULAS:
        what = f"key {unknown[0]!r}" if unknown else f"formula={formula!r}"
        raise ValueError(
            f"router_options['aux_losses'] has {what}. Legal keys: 'formula', 'coefficient'; legal "
            f"formula: {', '.join(map(repr, FORMULAS))}.  Change `router_options`."
        )
    if not (_number(coefficient) or (coefficient is None and formula == "model")):
        raise ValueError(
            f"router_options['aux_losses']: coefficient={coefficient!r} of {formula!r} is no "
            "factor. Legal coefficient: a number of at least 0; 'model' alone may leave it out and "
            "takes `router_aux_loss_coef` of the model's config.  Change `router_options`."
        )
    return AuxLoss(str(formula), None if coefficient is None else float(coefficient))
