"""The registry of dispatchers: names, refusals, and a user's own dispatcher in a folded layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lightning_fold
from lightning_fold import dispatchers
from lightning_fold.config import FoldedConfig
from lightning_fold.moe.dispatch import LocalDispatcher, PaddedDispatcher, choose_dispatcher
from lightning_fold.moe.dispatch.dedup import destinations
from lightning_fold.moe.layer import FoldedExperts
from lightning_fold.moe.routing import Routing
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.telemetry import Telemetry


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatchers, "_REGISTERED", {})
    return


class Alone:
    """A `Comm` without peers."""

    host_syncs = 0

    def size(self, axis: str) -> int:
        return 1

    def to_host(self, tensor: torch.Tensor, *, why: str) -> list[int]:
        self.host_syncs += 1
        values: list[int] = tensor.tolist()
        return values


def comm() -> Any:
    return Alone()


@pytest.mark.parametrize(
    ("name", "likely"), [("all_to_al", "all_to_all"), ("deepep", None), ("dedupe", "dedup")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, likely: str | None) -> None:
    with pytest.raises(ValueError, match="Legal dispatcher: 'auto', 'local', 'all_to_all'") as e:
        FoldedConfig(dispatcher=name).check()
    assert (f"Did you mean {likely!r}? " in str(e.value)) is (likely is not None)
    assert str(e.value).endswith("Change `dispatcher`.")


@pytest.mark.parametrize("name", ["all_gather", "dedup"])
def test_static_shapes_need_a_dispatcher_that_has_them(name: str) -> None:
    options = {"pad_to_capacity": True}
    config = FoldedConfig(dispatcher=name, capacity_factor=1.0, router_options=options)
    with pytest.raises(ValueError, match=r"static shapes. Legal dispatcher: 'auto', 'local', "):
        config.check()


@pytest.mark.parametrize("name", ["auto", "local", "all_to_all"])
def test_static_shapes_choose_the_padded_form(name: str) -> None:
    assert isinstance(choose_dispatcher(name, comm(), pads=True), PaddedDispatcher)
    assert isinstance(choose_dispatcher("auto", comm()), LocalDispatcher)


def test_built_in_names_are_taken() -> None:
    for name in ("auto", "dedup"):
        with pytest.raises(ValueError, match="is built in and cannot be replaced"):
            lightning_fold.register_dispatcher(name, LocalDispatcher)
    with pytest.raises(TypeError, match="must be callable, not str"):
        lightning_fold.register_dispatcher("mine", "local")


def test_a_registered_dispatcher_serves_a_layer() -> None:
    class Mine(LocalDispatcher):
        calls = 0

        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            Mine.calls += 1
            return super().dispatch(*args, **kwargs)

    lightning_fold.register_dispatcher("mine", Mine)
    FoldedConfig(dispatcher="mine").check()
    container = nn.Module()
    container.gate_up_proj = nn.Parameter(torch.randn(2, 2, 3, 4))
    container.down_proj = nn.Parameter(torch.randn(2, 4, 3))
    experts = FoldedExperts(
        container,
        name="experts",
        num_experts=2,
        dispatcher=choose_dispatcher("mine", comm()),
        activation=lambda x: x.chunk(2, -1)[0],
        telemetry=Telemetry(),
        tokens=RunningTokens(),
    )
    out = experts(torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert (out.shape, Mine.calls) == ((3, 4), 1)
    with pytest.raises(ValueError, match="static shapes"):
        choose_dispatcher("mine", comm(), pads=True)
    lightning_fold.register_dispatcher("mine", Mine, pads=True)
    assert isinstance(choose_dispatcher("mine", comm(), pads=True), Mine)


def test_a_token_goes_once_to_each_rank_that_it_needs() -> None:
    # Experts 0-3 are on rank 0, 4-7 on rank 1.
    index_TK = torch.tensor([[0, 5, 1], [7, 6, 4], [3, 2, 0]])
    routing = Routing(index_TK, torch.ones(3, 3), 8)
    goes = destinations(routing, 2)
    assert goes.rank_TJ.tolist() == [[0, 1], [1, 2], [0, 2]]
    assert goes.rows_P.tolist() == [2, 2]
    dropped = Routing(index_TK, torch.ones(3, 3), 8, kept_TK=index_TK > 2)
    assert destinations(dropped, 2).rank_TJ.tolist() == [[1, 2], [1, 2], [0, 2]]
    assert destinations(routing, 1).rank_TJ.tolist() == [[0]] * 3


def test_nan_weights_on_one_rank_name_layer_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    lonely = comm()
    lonely.global_rank = 3
    weights = torch.tensor([[0.5, float("nan")]])
    routing = Routing(torch.tensor([[0, 1]]), weights, 2, layer="model.layers.4.mlp.experts")
    match = r"model\.layers\.4\.mlp\.experts: NaN routing weights on rank 3\."
    with pytest.raises(ValueError, match=match):
        LocalDispatcher(lonely).dispatch(torch.randn(1, 4), routing)
