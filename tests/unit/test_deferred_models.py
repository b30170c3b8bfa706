"""Whole models with their weight gradients put off, under every way of activation checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fold_kernels.weight_store import WeightStore, deferring
from lightning_fold.model import decoder
from lightning_fold.model.inspect import find_parts
from lightning_fold.model.linear import defer_linears
from lightning_fold.model.recompute import apply_recompute
from lightning_fold.model.swap import swap_experts
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.telemetry import Telemetry
from lightning_fold.verify import cases

MODES = ["none", "selective", "full"]
MODELS = ["decoder", "decoder-tied", "mixtral", "qwen3_moe-bias", "deepseek_v3"]
ONE_RANK = SimpleNamespace(
    global_rank=0,
    telemetry=Telemetry(),
    size=lambda axis: 1,
    to_host=lambda tensor, why: tensor.tolist(),
)


class Wrapped(nn.Module):
    """What a LightningModule is to the strategy, folded on one rank."""

    def __init__(self, name: str, mode: str, *, defers: bool) -> None:
        super().__init__()
        self.model = cases.build_model(name, decoder=decoder).double()
        tokens, parts = RunningTokens(), find_parts(self)
        swap_experts(parts.experts, comm=ONE_RANK, dispatcher="auto", tokens=tokens)
        self.num_moe_layers = len(parts.experts)
        if defers:
            defer_linears(self.model)
        apply_recompute(parts, mode, tokens)

    def loss(self, index: int) -> Tensor:
        return self.model(**cases.sub_batch(index, 0)).loss

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.named_parameters() if p.grad is not None}

    def late_names(self) -> set[str]:
        linears = {id(m.weight) for m in self.modules() if isinstance(m, nn.Linear)}
        return {n for n, p in self.named_parameters() if id(p) in linears or p.dim() > 2}


def in_thread(loss: Tensor) -> None:
    """Backward where a CUDA graph's runs: not in the thread of the forward."""
    thread = Thread(target=loss.backward)
    thread.start()
    thread.join()


def plain_gradients(name: str, mode: str, batches: Sequence[int]) -> dict[str, Tensor]:
    module = Wrapped(name, mode, defers=False)
    for index in batches:
        module.loss(index).backward()
    return module.gradients()


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        error = (got[name] - want).norm() / want.norm()
        assert error <= tolerance, f"{name}: {error}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_an_ordinary_backward(name: str, mode: str) -> None:
    module, store = Wrapped(name, mode, defers=True), WeightStore()
    with deferring(store):
        loss = module.loss(1)
    in_thread(loss)
    linears = sum(isinstance(m, nn.Linear) for m in module.modules())
    assert store.num_left == linears + module.num_moe_layers
    # An embedding has its own part at once, the head's comes later.
    tied = {"model.model.embed_tokens.weight"} if name.endswith("tied") else set()
    assert module.gradients().keys() & module.late_names() == tied
    store.take()()
    assert_equal(module.gradients(), plain_gradients(name, mode, [1]), 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_microbatches_in_flight_add_up_in_any_order(mode: str) -> None:
    module, stores = Wrapped("mixtral", mode, defers=True), {i: WeightStore() for i in range(3)}
    losses, late = {}, {}
    for index, store in stores.items():
        with deferring(store):
            losses[index] = module.loss(index)
    for index in (1, 0, 2):
        losses[index].backward()
        late[index] = stores[index].take()
    for index in (2, 1, 0):
        late[index]()
    assert_equal(module.gradients(), plain_gradients("mixtral", mode, [0, 1, 2]), 1e-12)


def test_experts_without_tokens_get_zeros() -> None:
    module, store = Wrapped("mixtral", "none", defers=True), WeightStore()
    experts = module.model.model.layers[0].mlp.experts
    for name, router in module.named_modules():
        if name.endswith("mlp.gate"):
            # Two experts, the first and the second, for all tokens.
            router.register_forward_hook(lambda router, args, out: (*out[:2], first_two(out[2])))
    with deferring(store):
        loss = module.loss(0)
    loss.backward()
    assert experts.down_proj.grad is None
    store.take()()
    for weight in (experts.gate_up_proj, experts.down_proj):
        assert weight.grad[:2].abs().amax() > 0
        assert torch.equal(weight.grad[2:], torch.zeros_like(weight.grad[2:]))


def first_two(index_TK: Tensor) -> Tensor:
    return torch.arange(2).expand_as(index_TK)


@pytest.mark.parametrize("mode", MODES)
def test_without_a_store_a_deferring_model_is_an_ordinary_one(mode: str) -> None:
    module = Wrapped("qwen3_moe-bias", mode, defers=True)
    module.loss(0).backward()
    got, wanted = module.gradients(), plain_gradients("qwen3_moe-bias", mode, [0])
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
