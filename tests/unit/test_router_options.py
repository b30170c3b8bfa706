"""Keys of `router_options`: what passes, and what each refusal says."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from fold_kernels.router import RouterSpec
from lightning_fold.config import FoldedConfig
from lightning_fold.router_options import KEYS, AuxLoss, parse_options


def test_nothing_given_changes_nothing() -> None:
    options = parse_options("model", None)
    assert not options.balances
    assert options.bias_update_rate == 0
    assert not options.decision
    assert options == parse_options("model", {})


def test_values_arrive() -> None:
    given: dict[str, Any] = {
        "scores": "sigmoid",
        "num_groups": 4,
        "z_loss": 1,
        "bias_update_rate": 0.001,
        "aux_losses": [{"formula": "per_layer", "coefficient": 0.01}, {"formula": "model"}],
    }
    options = parse_options("folded", given)
    assert options.decision == {"scores": "sigmoid", "num_groups": 4}
    assert options.aux_losses == (AuxLoss("per_layer", 0.01), AuxLoss("model", None))
    assert (options.z_loss, options.bias_update_rate) == (1.0, 0.001)
    assert FoldedConfig(router="folded", router_options=given).routing == options


def test_every_field_of_the_decision_has_a_key() -> None:
    assert {field.name for field in fields(RouterSpec)} <= set(KEYS)


@pytest.mark.parametrize("key", ["top_k", "scores", "dtype", "input_jitter"])
@pytest.mark.parametrize("router", ["model", "balanced"])
def test_a_decision_needs_the_folded_router(router: str, key: str) -> None:
    value = {"top_k": 2, "scores": "sigmoid", "dtype": "fp32", "input_jitter": 0.1}[key]
    with pytest.raises(ValueError, match=rf"'{key}'.*router='{router}'.*Change `router`"):
        parse_options(router, {key: value})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"aux_loss": []}, r"no key of router_options. Change it to 'aux_losses'"),
        ({"zz": 1}, r"'zz' is no key of router_options. Legal: top_k, "),
        ({"z_loss": "0.1"}, r"\['z_loss'\]='0.1' is no value .*\(str\).*a number of at least 0"),
        ({"z_loss": -0.1}, r"\['z_loss'\]=-0.1"),
        ({"z_loss": float("nan")}, r"\['z_loss'\]=nan"),
        ({"z_loss": True}, r"\['z_loss'\]=True .*\(bool\)"),
        ({"top_k": 2.0}, r"\['top_k'\]=2.0 .*an int of at least 1"),
        ({"top_k": 0}, r"\['top_k'\]=0"),
        ({"renormalise": 1}, r"\['renormalise'\]=1 .*a bool"),
        ({"scores": "tanh"}, r"\['scores'\]='tanh' .*'softmax', 'sigmoid', 'sqrt_softplus'"),
        ({"input_jitter": 1.0}, r"\['input_jitter'\]=1.0"),
        ({"scaling_factor": 0}, r"\['scaling_factor'\]=0"),
        ({"aux_losses": "per_layer"}, r"\['aux_losses'\]='per_layer'"),
        ({"aux_losses": [{"formula": "switch"}]}, r"formula='switch'.*'per_sequence', 'per_l"),
        ({"aux_losses": [{"formula": "model", "weight": 1}]}, r"key 'weight'.*'coefficient'"),
        ({"aux_losses": [{"formula": "per_layer"}]}, r"coefficient=None of 'per_layer'"),
        ({"aux_losses": [{"formula": "model", "coefficient": -1}]}, r"coefficient=-1"),
    ],
)
def test_refusals(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        FoldedConfig(router="folded", router_options=options).check()
    assert str(caught.value).endswith("Change `router_options`.")


def test_a_forced_even_load_has_no_bias_to_move() -> None:
    with pytest.raises(ValueError, match="deals tokens out in turn"):
        parse_options("balanced", {"bias_update_rate": 0.1})


@pytest.mark.parametrize("options", [{1: 2}, {"aux_losses": [{1: 2, "a": 3}]}])
def test_keys_that_are_no_words_are_refused_like_others(options: dict[Any, Any]) -> None:
    with pytest.raises(ValueError, match="Change `router_options`"):
        parse_options("model", options)
