"""Weight gradients put off: the same bits later, of linears and of experts, and nothing kept after.

Whole models, with each way of activation checkpointing, are in `test_deferred_models.py`.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fold_kernels import expert_loop, expert_mlp
from fold_kernels.expert_forms import form_of
from fold_kernels.expert_mlp import Order
from fold_kernels.expert_mlp import expert_mlp as run_experts
from fold_kernels.swiglu import swiglu
from fold_kernels.weight_store import WeightNode, WeightStore, active_store, deferring
from lightning_fold.model.linear import apply_linear, defer_linears

# Shapes.  S rows   R pairs in expert order   e experts   D model width   W expert width
S, D, W = 7, 8, 4
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
SIZES = [[2, 0, 3], [0, 5, 0], [0, 0, 0]]


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=FP64)


def leaves(*shapes: Sequence[int], dtype: torch.dtype = FP64) -> list[Tensor]:
    torch.manual_seed(len(shapes))
    return [torch.randn(tuple(shape), dtype=dtype).requires_grad_() for shape in shapes]


def gradients(
    run: Callable[[], Tensor], inputs: Sequence[Tensor], store: WeightStore | None
) -> list[Tensor | None]:
    """Gradients of all inputs, with what the store has got."""
    for x in inputs:
        x.grad = None
    with deferring(store):
        out = run()
    torch.manual_seed(9)
    out.backward(torch.randn_like(out))
    if store is not None:
        store.take()()
    return [x.grad for x in inputs]


def assert_same(got: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


# ------------------------------------------------------------ linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, D), (S, D), (D,), (0, D)], ids=str)
def test_a_linear_gives_the_same_bits_later(shape, dtype, bias) -> None:
    inputs = leaves(shape, (5, D), *[(5,)] * bias, dtype=dtype)
    plain = gradients(lambda: F.linear(*inputs), inputs, None)
    assert_same(gradients(lambda: apply_linear(*inputs), inputs, WeightStore()), plain)


def test_backward_leaves_the_weight_and_nothing_else() -> None:
    x, weight, bias = leaves((S, D), (5, D), (5,))
    store = WeightStore()
    with deferring(store):
        out = apply_linear(x, weight, bias)
    out.sum().backward()
    assert x.grad is not None
    assert bias.grad is not None
    assert weight.grad is None
    assert store.num_left == 1
    run = store.take()
    assert store.num_left == 0
    run()
    once = weight.grad.clone()
    run()
    assert torch.equal(weight.grad, once)


def test_gradients_come_at_once_outside() -> None:
    x, weight = leaves((S, D), (5, D))
    store = WeightStore()
    with deferring(store):
        assert active_store() is store
        with deferring(None):
            inner = apply_linear(x, weight)
        with torch.no_grad():
            assert apply_linear(x, weight).grad_fn is None
    assert active_store() is None
    (inner + apply_linear(x, weight)).sum().backward()
    assert weight.grad is not None
    assert store.num_left == 0


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(frozen) -> None:
    inputs = leaves((S, D), (5, D), (5,))
    inputs[frozen].requires_grad_(False)
    store = WeightStore()
    plain = gradients(lambda: F.linear(*inputs), inputs, None)
    assert_same(gradients(lambda: apply_linear(*inputs), inputs, store), plain)
    with deferring(store):
        apply_linear(*inputs).sum().backward()
    assert store.num_left == (0 if frozen == 1 else 1)


def test_autocast_gives_the_same_bits_in_the_weights_dtype() -> None:
    inputs = leaves((2, 3, D), (5, D), (5,), dtype=FP32)

    def under(linear: Callable[..., Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.autocast("cpu", BF16):
                out: Tensor = linear(*inputs)
            assert out.dtype == BF16
            return out

        return run

    plain = gradients(under(F.linear), inputs, None)
    with torch.autocast("cpu", BF16, enabled=False):
        assert_same(gradients(under(apply_linear), inputs, WeightStore()), plain)
    assert plain[1].dtype == FP32


def test_autocast_around_backward_narrows_nothing() -> None:
    inputs = leaves((S, D), (5, D), dtype=FP32)
    store = WeightStore()
    plain = gradients(lambda: F.linear(*inputs), inputs, None)
    with deferring(store):
        out = apply_linear(*inputs)
    for x in inputs:
        x.grad = None
    torch.manual_seed(9)
    upstream = torch.randn_like(out)
    with torch.autocast("cpu", BF16):
        out.backward(upstream)
        store.take()()
    assert_same([x.grad for x in inputs], plain)


def test_dtypes_that_do_not_fit_are_refused_as_ever() -> None:
    (x,), (weight,) = leaves((S, D), dtype=FP32), leaves((5, D))
    for store in (None, WeightStore()):
        with deferring(store), pytest.raises(RuntimeError, match="same dtype"):
            apply_linear(x, weight)


def test_what_was_made_of_a_parameter_passes_its_gradient_on() -> None:
    x, weight = leaves((S, D), (9, D))
    store = WeightStore()
    plain = gradients(lambda: F.linear(x, (2 * weight)[3:5]), [x, weight], None)
    assert_same(gradients(lambda: apply_linear(x, (2 * weight)[3:5]), [x, weight], store), plain)


def test_a_weight_used_twice_and_as_an_embedding_sums_all_uses() -> None:
    (weight,) = leaves((D, D))
    ids = torch.tensor([3, 1, 3])

    def forward(linear: Callable[..., Tensor]) -> Tensor:
        return linear(linear(F.embedding(ids, weight), weight), weight)

    plain = gradients(lambda: forward(F.linear), [weight], None)
    store = WeightStore()
    got = gradients(lambda: forward(apply_linear), [weight], store)
    torch.testing.assert_close(got, plain, rtol=1e-14, atol=1e-14)


def test_microbatches_are_taken_in_any_order() -> None:
    layer = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, D)).double()
    inputs = [double(S, D), double(3, D)]
    for x in inputs:
        layer(x).square().sum().backward()
    plain = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    defer_linears(layer)
    stores = [WeightStore(), WeightStore()]
    losses = []
    for x, store in zip(inputs, stores, strict=True):
        with deferring(store):
            losses.append(layer(x).square().sum())
    losses[1].backward()
    losses[0].backward()
    assert [store.num_left for store in stores] == [2, 2]
    late = [store.take() for store in stores]
    assert layer[0].weight.grad is None
    late[1]()
    half = layer[0].weight.grad.clone()
    late[0]()
    assert not torch.equal(half, layer[0].weight.grad)
    got = [p.grad for p in layer.parameters()]
    torch.testing.assert_close(got, plain, rtol=1e-13, atol=1e-13)


def test_one_store_serves_backwards_one_after_another() -> None:
    layer, store = nn.Linear(D, 5, bias=False).double(), WeightStore()
    defer_linears(layer)
    inputs, taken = [double(S, D), double(3, D)], []
    with deferring(store):
        outs = [layer(x) for x in inputs]
    for out in outs:
        out.sum().backward()
        taken.append(store.take())
    for x, run in zip(reversed(inputs), reversed(taken), strict=True):
        layer.zero_grad()
        run()
        torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(5, D))


def test_hooks_on_the_parameter_run_when_its_gradient_comes() -> None:
    x, weight = leaves((S, D), (5, D))
    seen: list[Tensor] = []
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    store = WeightStore()
    with deferring(store):
        out = apply_linear(x, weight)
    out.sum().backward()
    assert seen == []
    store.take()()
    assert [torch.equal(grad, weight.grad) for grad in seen] == [True, True]


def test_a_parameter_takes_its_gradient_over_without_a_copy() -> None:
    (weight,) = leaves((5, D))
    store, made = WeightStore(), []

    def noted(product: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
        def run() -> Sequence[Tensor]:
            grads = product()
            made.append(grads[0].data_ptr())
            return grads

        return run

    store.put((weight,), noted(lambda: (torch.ones(5, D, dtype=FP64),)))
    store.take()()
    assert made == [weight.grad.data_ptr()]


def test_all_that_was_kept_is_freed_use_by_use() -> None:
    layers = nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(3))).double()
    defer_linears(layers)
    store, kept, alive = WeightStore(), [], []
    for layer in layers:
        layer.register_forward_hook(lambda module, args, out: kept.append(weakref.ref(args[0])))
        layer.weight.register_hook(lambda grad: alive.append(sum(r() is not None for r in kept)))
    with deferring(store):
        out = layers(double(S, D).tanh())
    out.sum().backward()
    del out
    gc.collect()
    assert all(ref() is not None for ref in kept)
    run = store.take()
    run()
    # The last layer's backward came first; its input is gone when its gradient arrives.
    assert alive == [2, 1, 0]
    assert all(ref() is None for ref in kept)


def test_backward_may_run_in_another_thread() -> None:
    layer, store = nn.Linear(D, 5).double(), WeightStore()
    defer_linears(layer)
    x = double(S, D)
    with deferring(store):
        loss = layer(x).square().sum()
    thread = Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert layer.weight.grad is None
    store.take()()
    got = layer.weight.grad
    layer.zero_grad()
    layer(x).square().sum().backward()
    assert torch.equal(got, layer.weight.grad)


def test_a_backward_made_twice_counts_twice() -> None:
    x, weight = leaves((S, D), (5, D))
    store = WeightStore()
    with deferring(store):
        loss = apply_linear(x, weight).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    store.take()()
    torch.testing.assert_close(weight.grad, 2 * x.detach().sum(0).expand(5, D))


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_only_plain_linears_are_taken_over_and_copies_use_their_own_weights() -> None:
    model = nn.ModuleDict({"plain": nn.Linear(D, D), "scaled": Scaled(D, D), "other": nn.Tanh()})
    replaced = nn.Linear(D, D)
    replaced.forward = torch.zeros_like
    model["replaced"] = replaced
    defer_linears(model)
    defer_linears(model)
    assert replaced.forward is torch.zeros_like
    assert [name for name, m in model.items() if "forward" in m.__dict__] == ["plain", "replaced"]
    twin = copy.deepcopy(model)
    twin["plain"].weight.data.zero_()
    x = torch.randn(S, D)
    assert torch.equal(twin["plain"](x), twin["plain"].bias.expand(S, D))
    assert not torch.equal(model["plain"](x), twin["plain"](x))


# ------------------------------------------------------------ experts


@pytest.fixture(params=["loop", "torch_grouped_mm"])
def form(request, monkeypatch) -> str:
    """Every form, on this device; batches of the loop hold one expert or two."""
    monkeypatch.setattr(expert_mlp, "choose_form", lambda *_: form_of(request.param))
    monkeypatch.setattr(expert_loop, "BATCH_ELEMENTS", 3 * (2 * D + 4 * W))
    return request.param


def gelu_gated(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return F.gelu(gate) * up


def experts(sizes: list[int], dtype: torch.dtype = FP64) -> tuple[list[Tensor], Order]:
    pairs, e = sum(sizes), len(sizes)
    inputs = leaves((S, D), (pairs,), (e, 2, W, D), (e, D, W), dtype=dtype)
    return inputs, Order(torch.arange(pairs) * 3 % 5, torch.tensor(sizes), sizes)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", [swiglu, gelu_gated])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts_give_the_same_bits_later(sizes, activation, recompute, form) -> None:
    inputs, order = experts(sizes)

    def run() -> Tensor:
        return run_experts(*inputs, order, activation=activation, recompute=recompute)

    plain = gradients(run, inputs, None)
    assert all(grad is not None for grad in plain)
    assert_same(gradients(run, inputs, WeightStore()), plain)


def test_experts_of_16_bits_give_the_same_bits_in_the_weights_dtype(form) -> None:
    inputs, order = experts([5, 0, 8], FP32)
    inputs[0] = inputs[0].detach().bfloat16().requires_grad_()

    def run() -> Tensor:
        with torch.autocast("cpu", BF16):
            return run_experts(*inputs, order, activation=swiglu)

    plain = gradients(run, inputs, None)
    got = gradients(run, inputs, WeightStore())
    assert [grad.dtype for grad in got] == [BF16, FP32, FP32, FP32]
    assert_same(got, plain)


@pytest.mark.parametrize("frozen", [(), (0, 1), (2,), (3,)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_node_gives_the_same_bits_where_it_was_made(sizes, frozen, form) -> None:
    inputs, order = experts(sizes)
    for i in frozen:
        inputs[i].requires_grad_(False)
    events: list[str] = []

    def run(between: bool) -> Tensor:
        source, *rest = inputs
        node = WeightNode(*inputs[2:]) if between else None
        later = source.clone() if source.requires_grad else source
        if later is not source:
            later.register_hook(lambda _: events.append("rows"))
        return run_experts(later, *rest, order, activation=swiglu, put_off=node)

    plain = gradients(lambda: run(False), inputs, None)
    hooks = [x.register_hook(lambda _: events.append("w")) for x in inputs[2:] if x.requires_grad]
    events.clear()
    assert_same(gradients(lambda: run(True), inputs, None), plain)
    # The clone is younger than the node, so it goes first.
    assert events == ["rows"] * (0 not in frozen) + ["w"] * len(hooks)


def test_a_node_is_part_of_the_graph() -> None:
    inputs, order = experts([2, 0, 3])

    def out(**options) -> Tensor:
        return run_experts(*inputs, order, activation=swiglu, **options).square().sum()

    plain = torch.autograd.grad(out(), inputs[2:])
    late = out(put_off=WeightNode(*inputs[2:]))
    for _ in range(2):
        assert_same(torch.autograd.grad(late, inputs[2:], retain_graph=True), plain)
    assert all(x.grad is None for x in inputs)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (2, 3), (0, 1)], ids=str)
def test_frozen_expert_inputs_get_no_gradient_and_change_no_other(frozen, form) -> None:
    inputs, order = experts([2, 0, 3])
    for i in frozen:
        inputs[i].requires_grad_(False)
    store = WeightStore()

    def run() -> Tensor:
        return run_experts(*inputs, order, activation=swiglu)

    plain = gradients(run, inputs, None)
    assert_same(gradients(run, inputs, store), plain)
    with deferring(store):
        run().sum().backward()
    assert store.num_left == (0 if frozen == (2, 3) else 1)


@pytest.mark.parametrize("recompute", [False, True])
def test_no_product_of_the_experts_is_made_twice(recompute, monkeypatch) -> None:
    calls = {"_multiply": 0, "_multiply_transposed": 0}

    def counted(name: str) -> None:
        own = getattr(expert_loop, name)

        def call(*args: object, **kwargs: object) -> None:
            calls[name] += 1
            own(*args, **kwargs)

        monkeypatch.setattr(expert_loop, name, call)

    for name in calls:
        counted(name)
    inputs, order = experts([2, 0, 3])
    store = WeightStore()
    with deferring(store):
        out = run_experts(*inputs, order, activation=swiglu, recompute=recompute)
    out.sum().backward()
    before = dict(calls)
    store.take()()
    assert before == {"_multiply": 5 if recompute else 4, "_multiply_transposed": 0}
    assert calls == before | {"_multiply_transposed": 2}


def test_experts_keep_what_weight_gradients_need_until_they_are_made(form) -> None:
    inputs, order = experts([2, 0, 3])
    source = inputs[0].detach().clone().requires_grad_()
    ref, store = weakref.ref(source), WeightStore()
    with deferring(store):
        run_experts(source, *inputs[1:], order, activation=swiglu).sum().backward()
    del source
    gc.collect()
    assert ref() is not None
    store.take()()
    assert ref() is None
