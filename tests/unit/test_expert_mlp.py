"""The experts as one operation: against the plain loop, and what backward keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fold_kernels import expert_loop, expert_mlp
from fold_kernels.expert_forms import form_of
from fold_kernels.expert_grouped import sum_rows
from fold_kernels.expert_loop import cut_batches
from fold_kernels.expert_mlp import Order, expert_mlp_ref
from fold_kernels.expert_mlp import expert_mlp as run
from fold_kernels.swiglu import swiglu

# Shapes.  S rows that arrived   R pairs in expert order   e local experts
#          D model width   F expert width
S, D, F = 7, 8, 4
SIZES = [[2, 0, 3], [0, 5, 0], [0, 0, 6], [1, 1, 1], [0, 0, 0]]
FORMS = ["loop", "torch_grouped_mm"]
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16


def gelu_gated(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return nn.functional.gelu(gate) * up


@pytest.fixture(params=FORMS)
def form(request, monkeypatch) -> str:
    """Every form, on this device; batches of the loop hold one expert or two."""
    monkeypatch.setattr(expert_mlp, "choose_form", lambda *_: form_of(request.param))
    monkeypatch.setattr(expert_loop, "BATCH_ELEMENTS", 3 * (2 * D + 4 * F))
    return request.param


def problem(
    sizes: list[int], dtype: torch.dtype = FP64, width: int = F
) -> tuple[list[Tensor], Order]:
    torch.manual_seed(len(sizes) + sum(sizes))
    pairs, experts = sum(sizes), len(sizes)
    # Rows serve several experts; rows 5 and 6 none.
    origin = torch.arange(pairs) * 3 % 5
    leaves = [
        torch.randn(S, D, dtype=dtype),
        torch.rand(pairs, dtype=torch.promote_types(dtype, FP32)),
        torch.randn(experts, 2, width, D, dtype=dtype),
        torch.randn(experts, D, width, dtype=dtype),
    ]
    return [leaf.requires_grad_() for leaf in leaves], Order(origin, torch.tensor(sizes), sizes)


def gradients(out: Tensor, leaves: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, upstream)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", [swiglu, gelu_gated])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_output_and_gradients_equal_the_loop(sizes, activation, recompute, form) -> None:
    leaves, order = problem(sizes)
    out = run(*leaves, order, activation=activation, recompute=recompute)
    wanted = expert_mlp_ref(*leaves, order, activation=activation)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(S, D, dtype=FP64)
    # The reference has no graph to weights of experts without any pair.
    wanted_grads = torch.autograd.grad(wanted, leaves, upstream, allow_unused=True)
    for got, want, leaf in zip(gradients(out, leaves, upstream), wanted_grads, leaves, strict=True):
        want = torch.zeros_like(leaf) if want is None else want
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_equal_numerical_ones(recompute, form) -> None:
    leaves, order = problem([2, 0, 3])
    assert torch.autograd.gradcheck(
        lambda *x: run(*x, order, activation=swiglu, recompute=recompute), leaves
    )


@pytest.mark.parametrize("upstream", ["expanded", "transposed", "sliced"])
def test_gradients_of_any_layout_come_in(upstream, form) -> None:
    leaves, order = problem([2, 0, 3])
    grads = {
        "expanded": torch.tensor(2.0, dtype=FP64).expand(S, D),
        "transposed": torch.randn(D, S, dtype=FP64).t(),
        "sliced": torch.randn(S, 2 * D, dtype=FP64)[:, ::2],
    }
    got = gradients(run(*leaves, order, activation=swiglu), leaves, grads[upstream])
    dense = grads[upstream].contiguous()
    wanted = gradients(expert_mlp_ref(*leaves, order, activation=swiglu), leaves, dense)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_that_no_expert_takes_may_hold_anything(form) -> None:
    leaves, order = problem([2, 0, 3])
    clean = run(*leaves, order, activation=swiglu)
    upstream = torch.randn(S, D, dtype=FP64)
    wanted = gradients(clean, leaves, upstream)
    leaves[0].data[5:] = torch.nan
    upstream[5:] = torch.nan
    out = run(*leaves, order, activation=swiglu)
    assert torch.equal(out, clean)
    for got, want in zip(gradients(out, leaves, upstream), wanted, strict=True):
        assert torch.equal(got, want)


def test_reruns_are_equal_bit_for_bit(form) -> None:
    leaves, order = problem([9, 20, 4], FP32)
    upstream = torch.randn(S, D)

    def once() -> list[Tensor]:
        out = run(*leaves, order, activation=swiglu)
        return [out, *gradients(out, leaves, upstream)]

    first = once()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_bf16_rows_with_fp32_weights_return_gradients_in_the_weights_dtype(form) -> None:
    leaves, order = problem([5, 0, 8], FP32)
    leaves[0] = leaves[0].detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", BF16):
        out = run(*leaves, order, activation=swiglu)
    assert out.dtype == BF16
    upstream = torch.randn(S, D)
    got = gradients(out, leaves, upstream.bfloat16())
    assert [grad.dtype for grad in got] == [BF16, FP32, FP32, FP32]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = expert_mlp_ref(*wide, order, activation=swiglu)
    wanted = [exact, *gradients(exact, wide, upstream.double())]
    for a, b in zip([out, *got], wanted, strict=True):
        # Three roundings to bf16 in a row, 2**-9 each.
        assert (a.double() - b).norm() / b.norm() < 1e-2


@pytest.mark.parametrize("width", [3, 4])
def test_autocast_does_not_narrow_fp32_rows(width, form) -> None:
    # Width 3 is not aligned: the grouped form then falls back to plain products.
    leaves, order = problem([2, 0, 3], FP32, width)
    plain = run(*leaves, order, activation=swiglu)
    with torch.autocast("cpu", BF16):
        assert torch.equal(run(*leaves, order, activation=swiglu), plain)


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(frozen, form) -> None:
    leaves, order = problem([2, 0, 3])
    upstream = torch.randn(S, D, dtype=FP64)
    wanted = gradients(run(*leaves, order, activation=swiglu), leaves, upstream)
    leaves[frozen].requires_grad_(False)
    rest = [leaf for leaf in leaves if leaf.requires_grad]
    got = gradients(run(*leaves, order, activation=swiglu), rest, upstream)
    kept = [grad for i, grad in enumerate(wanted) if i != frozen]
    assert all(torch.equal(a, b) for a, b in zip(got, kept, strict=True))


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_backward_keeps_rows_first_product_weights_and_order(recompute, dtype, form) -> None:
    leaves, order = problem([6, 0, 9], dtype)
    parameters = {leaf.untyped_storage().data_ptr() for leaf in leaves[2:]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(*leaves, order, activation=swiglu, recompute=recompute)
    pairs, size = sum(order.sizes), dtype.itemsize
    hidden = 0 if recompute else pairs * 2 * F * size
    assert sum(kept.values()) == S * D * size + hidden + pairs * (leaves[1].element_size() + 8)


def test_nothing_is_kept_without_gradients(form) -> None:
    leaves, order = problem([2, 0, 3])
    with torch.no_grad():
        out = run(*leaves, order, activation=swiglu)
    assert out.grad_fn is None
    torch.testing.assert_close(out, run(*leaves, order, activation=swiglu).detach())


def test_shapes_that_do_not_fit_are_refused() -> None:
    leaves, order = problem([2, 0, 3])
    bad = Order(order.origin_R, order.counts_e, [2, 1, 3])
    with pytest.raises(ValueError, match=r"counts \[2, 1, 3\] do not fit"):
        run(*leaves, bad, activation=swiglu)


@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 4, 9, 0, 1, 1], [20], [4, 4, 4]], ids=str)
def test_batches_cut_the_experts_in_order_and_keep_the_limit(sizes: list[int]) -> None:
    batches = cut_batches(sizes, limit=8)
    assert [n for batch in batches for n in batch.sizes] == sizes
    for batch in batches:
        assert batch.num_pairs == sum(batch.sizes)
        assert batch.num_pairs <= 8 or len(batch.sizes) == 1
        assert batch.sizes == sizes[batch.experts]
        assert batch.pairs.start == sum(sizes[: batch.experts.start])


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
def test_rows_sum_to_their_origin(dtype) -> None:
    torch.manual_seed(0)
    rows, origin = torch.randn(9, D, dtype=dtype), torch.tensor([4, 0, 4, 2, 2, 4, 0, 4, 2])
    wanted = torch.zeros(S, D, dtype=FP64).index_add(0, origin, rows.double())
    got = sum_rows(rows, origin, num_sums=S)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted.to(dtype), rtol=2e-2 if dtype == BF16 else 1e-6, atol=0)
    assert torch.equal(sum_rows(rows[:0], origin[:0], num_sums=S), torch.zeros(S, D, dtype=dtype))
