"""The strategy's constructor: names, positions, defaults."""

import copy
import inspect
from dataclasses import fields

import pytest

from lightning_fold import FoldedMoEStrategy
from lightning_fold.config import FoldedConfig


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("expert_parallel", "expert_parallel_size"),
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("dispatch", "dispatcher"),
    ],
)
def test_misspelt_argument_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"`{nearest}`"):
        FoldedMoEStrategy(**{name: 2})


def test_degrees_are_named_never_positional() -> None:
    with pytest.raises(TypeError, match="positional"):
        FoldedMoEStrategy(2, 2)  # type: ignore[misc]


def test_arguments_and_defaults_are_those_of_the_config() -> None:
    parameters = inspect.signature(FoldedMoEStrategy.__init__).parameters
    found = {name: p.default for name, p in parameters.items() if name != "self"}
    assert found == {field.name: field.default for field in fields(FoldedConfig)}


def test_strategy_can_be_copied_before_it_runs() -> None:
    strategy = copy.deepcopy(FoldedMoEStrategy(expert_parallel_size=2))
    assert strategy.config.expert_parallel_size == 2
