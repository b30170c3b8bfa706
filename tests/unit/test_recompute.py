"""Activation checkpointing: the same gradients, less kept, and no second routing decision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_fold.model import decoder, recompute
from lightning_fold.model.inspect import ModelParts, find_parts
from lightning_fold.model.recompute import apply_recompute, check_recompute
from lightning_fold.model.swap import swap_experts
from lightning_fold.moe.tokens import RunningTokens, TokenLayout, in_backward
from lightning_fold.telemetry import RoutingCounts, Telemetry
from lightning_fold.verify import cases

MODELS = ["decoder", "mixtral", "qwen3_moe", "deepseek_v3"]
# Expert width and routed rows of `cases`: 24, and 2 sequences of 13 tokens.
WIDTH, TOKENS = 24, 26


class OneRank:
    """All that a layer asks of a Comm where its experts are whole."""

    global_rank = 0

    def __init__(self) -> None:
        self.telemetry = Telemetry()

    def size(self, axis: str) -> int:
        return 1

    def to_host(self, tensor: Tensor, *, why: str) -> list[int]:
        return tensor.tolist()


class Wrapped(nn.Module):
    """What a LightningModule is to the strategy: its core under one name."""

    def __init__(self, name: str, **options: object) -> None:
        super().__init__()
        self.model = cases.build_model(name, decoder=decoder).double()
        for key, value in options.items():
            setattr(self.model.config, key, value)
        self.comm, self.tokens = OneRank(), RunningTokens()

    def fold(self, mode: str) -> ModelParts:
        parts = find_parts(self)
        swap_experts(parts.experts, comm=self.comm, dispatcher="auto", tokens=self.tokens)
        check_recompute(parts, mode)
        apply_recompute(parts, mode, self.tokens)
        return parts

    def loss(self, index: int = 0) -> Tensor:
        return self.model(**cases.sub_batch(index, 0)).loss

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.named_parameters() if p.grad is not None}


def trained(name: str, mode: str, **options: object) -> dict[str, Tensor]:
    module = Wrapped(name, **options)
    module.fold(mode)
    torch.manual_seed(3)
    # The second batch has padding, hence a mask as long as the sequence.
    module.loss(1).backward()
    return module.gradients()


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        error = (got[name] - want).norm() / want.norm()
        assert error <= tolerance, f"{name}: {error}"


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_run_that_keeps_all(name: str, mode: str) -> None:
    assert_equal(trained(name, mode), trained(name, "none"), 1e-14)


def test_dropout_draws_the_same_masks_again(monkeypatch) -> None:
    rate = {"hidden_dropout": 0.3, "attention_dropout": 0.2}
    monkeypatch.setitem(
        cases.MODELS, "decoder", cases.ModelCase("decoder", cases._DENSE_AND_MOE | rate)
    )
    plain = trained("decoder", "none")
    assert_equal(trained("decoder", "full"), plain, 1e-14)


def test_a_cache_is_not_written_twice() -> None:
    assert_equal(trained("mixtral", "full", use_cache=True), trained("mixtral", "none"), 1e-14)


# ------------------------------------------------------------ decisions


def disturb(module: Wrapped, *, ties: bool) -> None:
    """Make a repeated router see other numbers, enough to decide otherwise."""
    for name, router in module.named_modules():
        if name.endswith("mlp.gate"):
            if ties:
                router.weight.data.zero_()
            router.register_forward_pre_hook(add_noise)


def add_noise(router: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
    if not in_backward():
        return None
    router.weight.data.add_(torch.randn_like(router.weight), alpha=1e-9)
    return (args[0] + 1e-4 * torch.randn_like(args[0]),)


def disturbed_error(name: str, *, ties: bool) -> float:
    """Largest relative error of a gradient whose recompute meets other logits."""
    gradients = []
    for mode in ("none", "full"):
        module = Wrapped(name)
        module.fold(mode)
        disturb(module, ties=ties)
        module.loss().backward()
        gradients.append(module.gradients())
    plain, repeated = gradients
    return max(float((repeated[key] - want).norm() / want.norm()) for key, want in plain.items())


@pytest.mark.parametrize("ties", [False, True], ids=["near", "ties"])
@pytest.mark.parametrize("name", MODELS)
def test_other_logits_in_backward_decide_nothing(name: str, ties: bool) -> None:
    # What is left is the noise itself, in the routing weights.
    assert disturbed_error(name, ties=ties) < 1e-2


def test_without_the_kept_decisions_a_gradient_is_silently_wrong(monkeypatch) -> None:
    monkeypatch.setattr(recompute, "CHOICES", frozenset())
    assert disturbed_error("decoder", ties=True) > 0.1


def test_choices_that_differ_are_told(monkeypatch) -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            order = x.argmax(-1) if in_backward() else x.topk(2).indices[:, 0]
            return x.exp().sin() * order.unsqueeze(1)

    layer = Layer()
    apply_recompute(SimpleNamespace(layers=[("layer", layer)]), "full", RunningTokens())
    out = layer(torch.randn(3, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"argmax.* where aten\.topk"):
        out.sum().backward()


def test_two_backwards_through_one_forward() -> None:
    module = Wrapped("mixtral")
    module.fold("full")
    loss = module.loss()
    loss.backward(retain_graph=True)
    once = {name: grad.clone() for name, grad in module.gradients().items()}
    loss.backward()
    assert_equal(module.gradients(), {name: 2 * grad for name, grad in once.items()}, 1e-14)


# ------------------------------------------------------------ what layers see


def test_a_repeated_layer_sees_the_tokens_of_its_own_forward() -> None:
    tokens, seen = RunningTokens(), []

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((in_backward(), tokens.attention, tokens.moe))
            return x.exp().sin()

    layer = Layer()
    apply_recompute(SimpleNamespace(layers=[("layer", layer)]), "full", tokens)
    outs, layouts = [], [TokenLayout(1, n, torch.arange(n)) for n in (3, 4)]
    for layout in layouts:
        tokens.attention = tokens.moe = layout
        outs.append(layer(torch.randn(2, requires_grad=True)))
    outs[0].sum().backward()
    assert seen[-1] == (True, layouts[0], layouts[0])
    assert tokens.moe is layouts[1]
    outs[1].sum().backward()
    assert seen[-1] == (True, layouts[1], layouts[1])


def test_routed_rows_are_counted_once() -> None:
    module, events = Wrapped("decoder"), []
    module.comm.telemetry.subscribe(RoutingCounts, events.append)
    module.fold("full")
    module.loss().backward()
    assert len(events) == 2


def test_without_gradients_nothing_is_repeated(monkeypatch) -> None:
    monkeypatch.setattr(recompute, "checkpoint", None)
    module = Wrapped("decoder")
    module.fold("full")
    with torch.no_grad():
        module.loss()


# ------------------------------------------------------------ memory


def kept_bytes(mode: str) -> int:
    """Bytes that autograd keeps of one forward, each storage once, parameters aside."""
    module = Wrapped("decoder")
    module.fold(mode)
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module.loss()
    assert loss.requires_grad
    return sum(kept.values())


def test_selective_keeps_less_by_the_first_products_and_full_only_the_layers_inputs() -> None:
    none, selective, full = (kept_bytes(mode) for mode in ("none", "selective", "full"))
    top_k, moe_layers, itemsize = 3, 2, 8
    assert none - selective == moe_layers * TOKENS * top_k * 2 * WIDTH * itemsize
    assert full < selective / 3


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_model_that_checkpoints_by_itself_is_refused(mode: str) -> None:
    module = Wrapped("mixtral")
    # transformers renames the method in 5.23 and keeps what it sets.
    enable = "activation_checkpointing_enable"
    if not hasattr(module.model, enable):
        enable = "gradient_checkpointing_enable"
    getattr(module.model, enable)()
    with pytest.raises(ValueError, match=r"of its own switched on.*Change `activation_checkp"):
        module.fold(mode)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_decoder_that_checkpoints_by_itself_is_refused(mode: str) -> None:
    module = Wrapped("decoder")
    module.model.model.gradient_checkpointing = True
    check_recompute(find_parts(module), "none")
    with pytest.raises(ValueError, match=r"model\.model has gradient checkpointing of its own"):
        check_recompute(find_parts(module), mode)


def test_selective_is_refused_where_experts_are_not_folded() -> None:
    module = Wrapped("mixtral")
    module.model.model.layers[0].mlp.experts.extra = nn.Parameter(torch.zeros(1))
    parts = find_parts(module)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts computes its own experts"):
        check_recompute(parts, "selective")
    check_recompute(parts, "full")
