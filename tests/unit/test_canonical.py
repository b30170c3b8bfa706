"""Between live tensors and the user's: shapes of the first projection, moments, misfits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_fold.checkpoint import Canonical

NAME = "experts.gate_up_proj"


def _user(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Module()
    module.experts = nn.Module()
    module.experts.gate_up_proj = nn.Parameter(torch.randn(2, 6, 4))
    module.norm = nn.LayerNorm(4)
    return module


def _live(seed: int = 0) -> nn.Module:
    module = _user(seed)
    halves = module.experts.gate_up_proj.detach().unflatten(1, (2, -1))
    module.experts.gate_up_proj = nn.Parameter(halves)
    return module


def _canonical(module: nn.Module, *, is_writer: bool = True) -> Canonical:
    return Canonical(module, halved=[NAME], is_writer=is_writer)


def _load(live: nn.Module, state: dict[str, torch.Tensor], *, strict: bool = True) -> None:
    canonical, tensors = _canonical(live), live.state_dict()
    shapes = {name: (canonical.live_shape(name, t), t.dtype) for name, t in state.items()}
    canonical.check("x.ckpt", shapes, live=tensors, strict=strict)
    canonical.load_model(state, live=tensors)


def _train(module: nn.Module, kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = kind(module.parameters(), lr=0.1)
    for param in module.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    return optimizer


def test_weights_are_those_of_the_users_module() -> None:
    state = _canonical(_live()).consolidate(_live().state_dict())
    wanted = _user().state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(state[name], value)


def test_only_the_writer_keeps_tensors() -> None:
    live = _live()
    assert _canonical(live, is_writer=False).consolidate(live.state_dict()) == {}


def test_consolidated_tensors_are_copies() -> None:
    live = _live()
    state = _canonical(live).consolidate(live.state_dict())
    state[NAME].zero_()
    assert bool(live.experts.gate_up_proj.any())


def test_weights_return_to_the_live_shape() -> None:
    live = _live(seed=5)
    _load(live, _user().state_dict())
    assert torch.equal(live.experts.gate_up_proj, _live().experts.gate_up_proj)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_moments_are_those_of_the_users_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    live, user = _live(), _user()
    ours = _canonical(live).optimizer_state(_train(live, kind))
    theirs = _train(user, kind).state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(ours["state"][index][key], value)


def test_moments_return_to_the_live_shape() -> None:
    live = _live()
    optimizer = torch.optim.AdamW(live.parameters(), lr=0.7)
    _canonical(live).load_optimizer(optimizer, _train(_user(), torch.optim.AdamW).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    state = optimizer.state[live.experts.gate_up_proj]
    assert state["exp_avg"].shape == (2, 2, 3, 4)
    assert float(state["step"]) == 1.0


def test_a_checkpoint_of_another_model_is_refused() -> None:
    live, state = _live(), _user().state_dict()
    with pytest.raises(ValueError, match=r"1 names are missing \(norm.bias\) and 1 are unknown"):
        _load(live, {k.replace("norm.bias", "norm.shift"): v for k, v in state.items()})
    with pytest.raises(ValueError, match=r"norm.weight has shape \(5,\) there and \(4,\) here"):
        _load(live, {**state, "norm.weight": torch.ones(5)})


def test_a_misfit_leaves_the_module_as_it_was() -> None:
    live = _live(seed=5)
    before = {name: value.clone() for name, value in live.state_dict().items()}
    with pytest.raises(ValueError, match="Another model wrote it"):
        _load(live, {**_user().state_dict(), "norm.bias": torch.ones(5)})
    for name, value in live.state_dict().items():
        assert torch.equal(value, before[name])


def test_names_may_miss_when_loading_is_not_strict() -> None:
    live = _live()
    _load(live, {"norm.weight": torch.full((4,), 3.0)}, strict=False)
    assert live.norm.weight.tolist() == [3.0] * 4


def test_state_of_more_parameters_than_there_are_is_refused() -> None:
    live = _live()
    state = _train(_user(), torch.optim.AdamW).state_dict()
    optimizer = torch.optim.AdamW(list(live.parameters())[:1])
    with pytest.raises(ValueError, match="state for parameter 2, this one has 1 parameters"):
        _canonical(live).load_optimizer(optimizer, state)
