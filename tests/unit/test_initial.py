"""`init_from`: names, shapes and dtypes of a file against those of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_fold.checkpoint.initial import find_initial, load_initial

State = dict[str, Tensor]


class Module(nn.Module):
    """A core, tied weights, a buffer, and something beside the core."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"inner": nn.Linear(3, 4), "head": nn.Linear(3, 4, bias=False)})
        self.model["head"].weight = self.model["inner"].weight
        self.model["inner"].register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.model["inner"].register_buffer("table", torch.zeros(2), persistent=False)
        self.beside = nn.Linear(2, 2)


def state(**changes: Tensor | None) -> State:
    torch.manual_seed(3)
    full = Module().state_dict()
    named = {name: torch.rand(t.shape).mul(9).to(t.dtype) for name, t in full.items()}
    named["model.head.weight"] = named["model.inner.weight"]
    named |= {key.replace("__", "."): value for key, value in changes.items()}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def loaded(tmp_path: Path, saved: State, module: nn.Module | None = None) -> nn.Module:
    module = Module() if module is None else module
    torch.save(saved, tmp_path / "w.pt")
    weights = find_initial(str(tmp_path / "w.pt"), module, core="model", halved=())
    load_initial(weights, module, halved=())
    return module


def test_every_tensor_is_read(tmp_path: Path) -> None:
    saved = state()
    module = loaded(tmp_path, saved)
    found = module.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    assert module.model["head"].weight is module.model["inner"].weight


def test_floats_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    saved = {n: t.double() if t.is_floating_point() else t for n, t in state().items()}
    found = loaded(tmp_path, saved, Module().bfloat16()).state_dict()
    assert found["beside.weight"].dtype == torch.bfloat16
    assert torch.equal(found["beside.weight"], saved["beside.weight"].bfloat16())
    assert torch.equal(found["model.inner.count"], saved["model.inner.count"])


@pytest.mark.parametrize("missing", ["model.head.weight", "model.inner.weight"])
def test_one_name_of_tied_weights_is_enough(tmp_path: Path, missing: str) -> None:
    saved = state()
    kept = saved.pop(missing)
    assert torch.equal(loaded(tmp_path, saved).model["head"].weight, kept)


def test_names_of_the_core_leave_the_rest_alone(tmp_path: Path) -> None:
    saved = {n.removeprefix("model."): t for n, t in state().items() if n.startswith("model.")}
    module = Module()
    before = module.beside.weight.clone()
    loaded(tmp_path, saved, module)
    assert torch.equal(module.model["inner"].weight, saved["inner.weight"])
    assert torch.equal(module.beside.weight, before)


def test_first_projections_come_in_the_users_form_or_the_live_one(tmp_path: Path) -> None:
    module = nn.Module()
    module.model = nn.Module()
    module.model.w = nn.Parameter(torch.zeros(2, 2, 3, 5))
    users = torch.rand(2, 6, 5)
    for stored in (users, users.unflatten(1, (2, 3))):
        torch.save({"w": stored}, tmp_path / "w.pt")
        weights = find_initial(str(tmp_path / "w.pt"), module, core="model", halved=["model.w"])
        load_initial(weights, module, halved=["model.w"])
        assert torch.equal(module.model.w.flatten(1, 2), users)
        nn.init.zeros_(module.model.w)
    torch.save({"w": torch.rand(2, 4, 5)}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"w has shape \(2, 4, 5\), the model has \(2, 6, 5\)"):
        find_initial(str(tmp_path / "w.pt"), module, core="model", halved=["model.w"])


def apart() -> State:
    experts = {f"layers.0.mlp.experts.{i}.gate_proj.weight": torch.rand(2, 2) for i in range(4)}
    return {"inner.weight": torch.rand(4, 3), **experts}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            state(beside__bias=None, new=torch.zeros(1)),
            r"w\.pt does not fit the model: 1 names are missing \(beside\.bias\) and 1 are unknown "
            r"\(new\)\. It belongs to another model\. Change `init_from`\.$",
        ),
        (
            {"x": torch.zeros(1)},
            r"6 names are missing \(beside\.bias, beside\.weight, .*, \.\.\.\)",
        ),
        ({"epoch": torch.zeros(())}, "1 are unknown"),
        (
            apart(),
            r"4 are unknown .*every expert by itself \(`experts\.0\.gate_proj`\), as Hugging",
        ),
        (
            state(beside__weight=torch.zeros(2, 3)),
            r"beside\.weight has shape \(2, 3\), the model has \(2, 2\)",
        ),
        (
            state(model__inner__count=torch.zeros(2)),
            r"model\.inner\.count is torch\.float32, the model has torch\.int64",
        ),
        ({}, "names are missing"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, saved: State, message: str) -> None:
    module = Module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match=message) as caught:
        loaded(tmp_path, saved, module)
    assert str(caught.value).endswith("Change `init_from`.")
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())


def test_file_that_cannot_be_read_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a\.pt cannot be read: No such .*\. Change `init_from`\.$"
    ):
        find_initial(str(tmp_path / "a.pt"), Module(), core="model", halved=())
