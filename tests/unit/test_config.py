"""The config's refusals: unknown keys, wrong types, values that exclude each other."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, fields

import pytest

from lightning_fold import config as module
from lightning_fold.config import FoldedConfig

BUILT = {
    "tensor_parallel_size": 2,
    "expert_parallel_size": 4,
    "expert_tensor_parallel_size": 2,
    "dispatcher": "all_to_all",
    "data_parallel_shard": "full",
    "save_distributed_checkpoint": False,
    "async_save": True,
    "meta_init": True,
    "init_from": "run/checkpoint",
    "activation_checkpointing": "selective",
    "capacity_factor": 1.25,
    "token_drop": "position",
    "collective_timeout_s": 60.0,
    "router": "balanced",
    "router_options": {"z_loss": 0.1},
    "context_parallel_size": 2,
    "context_parallel_method": "ring",
    "moe_layers": {"0-3": {"etp": 2}},
    "sentinel_every": 10,
    "expert_precision": "fp8_block",
}
# With pipelines only.
PIPELINES = {
    "pipeline_schedule": "interleaved_1f1b",
    "virtual_pipeline_size": 2,
    "num_microbatches": 4,
    "microbatch_size": 1,
    "pipeline_layout": "Et|tL",
    "pipeline_overlap": True,
}
NAMES = [field.name for field in fields(FoldedConfig)]


def refusal(**arguments):
    with pytest.raises(ValueError, match="Change `") as caught:
        FoldedConfig(**arguments).check()
    return str(caught.value)


def test_every_field_is_tried():
    known = [*BUILT, *PIPELINES, "pipeline_parallel_size"]
    assert sorted(known) == sorted(NAMES)
    assert len(NAMES) < 30


def test_defaults_pass():
    FoldedConfig().check()


def test_every_built_value_passes():
    FoldedConfig(**BUILT).check()
    for name, value in BUILT.items():
        FoldedConfig(**{name: value}).check()
    FoldedConfig(dispatcher="local").check()


@pytest.mark.parametrize(("name", "value"), PIPELINES.items())
def test_what_says_how_a_pipeline_works_needs_one(name, value):
    FoldedConfig(pipeline_parallel_size=2, **{name: value}).check()
    message = refusal(**{name: value})
    assert message.startswith(f"{name}={value!r} says how a pipeline works")
    assert message.endswith(f"Change `{name}` or `pipeline_parallel_size`.")


@pytest.mark.parametrize("name", ["virtual_pipeline_size", "num_microbatches", "microbatch_size"])
def test_numbers_of_things_are_positive(name):
    assert f"{name}=0 is no number of things" in refusal(pipeline_parallel_size=2, **{name: 0})


def test_a_batch_is_cut_in_one_way():
    both = {"num_microbatches": 4, "microbatch_size": 2}
    assert "both say how a batch is cut" in refusal(pipeline_parallel_size=2, **both)


def test_full_shards_are_refused_under_pipelines():
    message = refusal(pipeline_parallel_size=2, data_parallel_shard="full")
    assert message.endswith("Change `data_parallel_shard`.")


def test_checks_between_a_negative_number_of_steps_are_refused():
    assert "sentinel_every=-1 is no number of steps" in refusal(sentinel_every=-1)


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("tensor_parallel_size", "2", "an int"),
        ("tensor_parallel_size", True, "an int"),
        ("expert_parallel_size", 2.0, "an int"),
        ("expert_parallel_size", None, "an int"),
        ("save_distributed_checkpoint", 1, "a bool"),
        ("save_distributed_checkpoint", "no", "a bool"),
        ("dispatcher", None, "a str"),
        ("token_drop", "random", "'probability', 'position'"),
        ("expert_precision", "fp8", "'bf16', 'fp8_block'"),
        ("num_microbatches", "4", "an int or None"),
        ("capacity_factor", "1.0", "a float or None"),
        ("moe_layers", ["a"], "a dict or None"),
        ("pipeline_schedule", 1, "a str"),
    ],
)
def test_wrong_type_or_choice_is_refused(name, value, legal):
    message = refusal(**{name: value})
    assert message.startswith(f"{name}={value!r} is not a value of this field")
    assert message.endswith(f"Legal {name}: {legal}.  Change `{name}`.")


@pytest.mark.parametrize("degree", [0, -4])
def test_degree_below_one_is_refused(degree):
    assert "must be at least 1" in refusal(context_parallel_size=degree)
    assert refusal(expert_parallel_size=degree).endswith("Change `expert_parallel_size`.")


def test_int_serves_where_a_float_is_asked():
    FoldedConfig(capacity_factor=1).check()


@pytest.mark.parametrize("axis", ["expert_parallel_size", "expert_tensor_parallel_size"])
def test_local_dispatcher_is_refused_where_experts_are_spread(axis):
    message = refusal(dispatcher="local", **{axis: 2})
    assert re.search(r"etp\*ep = \d\*\d = 2 ranks", message)
    legal = "'auto', 'all_to_all', 'all_gather', 'dedup'"
    assert message.endswith(f"Legal dispatcher: {legal}.  Change `dispatcher`.")


def test_from_mapping_takes_every_field():
    arguments = {**BUILT, **PIPELINES, "pipeline_parallel_size": 2}
    built = FoldedConfig.from_mapping(arguments)
    assert {name: getattr(built, name) for name in NAMES} == arguments
    assert FoldedConfig.from_mapping({}) == FoldedConfig()


@pytest.mark.parametrize(
    ("key", "likely"),
    [
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("expert_model_parallel_size", "expert_parallel_size"),
        ("dispatchr", "dispatcher"),
        ("microbatches", "num_microbatches"),
        ("tp", "tensor_parallel_size"),
        ("etp", "expert_tensor_parallel_size"),
    ],
)
def test_unknown_key_names_the_nearest(key, likely):
    expected = f"^`{key}` is not an argument of FoldedMoEStrategy. Change it to `{likely}`.$"
    with pytest.raises(ValueError, match=expected):
        FoldedConfig.from_mapping({"dispatcher": "auto", key: 1})


def test_unknown_key_unlike_any_lists_all():
    with pytest.raises(ValueError, match=r"`zz` is not an argument.*Legal: tensor_par.*sentinel"):
        FoldedConfig.from_mapping({"zz": 1})


@pytest.mark.parametrize("key", ["dp", "edp", "data_parallel_size", "expert_data_parallel_size"])
def test_derived_degree_is_explained(key):
    with pytest.raises(ValueError, match=r"it is derived from world = pp\*tp\*cp\*dp"):
        FoldedConfig.from_mapping({key: 2})


def test_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        FoldedConfig().tensor_parallel_size = 2


def test_every_field_is_followed_by_its_docstring():
    source = inspect.getsource(module.FoldedConfig)
    for name in NAMES:
        assert re.search(rf'\n    {name}: [^\n]+\n    """', source), name
