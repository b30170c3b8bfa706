"""Experts in fp8 by the emulation: recomputed and put off, the same bits; every layout served."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fold_kernels import expert_fp8
from fold_kernels.expert_mlp import Order, expert_mlp
from fold_kernels.grouped_gemm import grouped_weight_gradient
from fold_kernels.swiglu import swiglu
from fold_kernels.weight_store import WeightStore, deferring

# Shapes.  S rows   R pairs in expert order   e experts   D model width   F expert width
S, D, F = 7, 128, 256
FP32, BF16 = torch.float32, torch.bfloat16
SIZES = [[2, 0, 9], [0, 0, 0]]


def problem(sizes: list[int], dtype: torch.dtype) -> tuple[list[Tensor], Order]:
    torch.manual_seed(0)
    pairs, e = sum(sizes), len(sizes)
    shapes = (S, D), (pairs,), (e, 2, F, D), (e, D, F)
    leaves = [torch.randn(shape) for shape in shapes]
    leaves[0] = leaves[0].to(dtype)
    order = Order(torch.arange(pairs) * 3 % 5, torch.tensor(sizes), sizes)
    return [leaf.requires_grad_() for leaf in leaves], order


def gradients(
    sizes: list[int], dtype: torch.dtype, store: WeightStore | None = None, **options: object
) -> list[Tensor]:
    leaves, order = problem(sizes, dtype)
    with deferring(store):
        out = expert_mlp(*leaves, order, activation=swiglu, precision="fp8_block", **options)
    # An expanded scalar: gradients of any layout come in.
    out.float().sum().backward()
    if store is not None:
        assert leaves[2].grad is None
        store.take()()
    assert all(leaf.grad.dtype == leaf.dtype for leaf in leaves)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_recomputed_or_put_off_they_are_the_same_bits(sizes: list[int], dtype) -> None:
    plain = gradients(sizes, dtype)
    for options in ({"recompute": True}, {"store": WeightStore()}):
        for got, wanted in zip(gradients(sizes, dtype, **options), plain, strict=True):
            assert torch.equal(got, wanted)


def test_five_products_are_quantised_and_no_weight_gradient(monkeypatch) -> None:
    shapes: list[tuple[int, ...]] = []
    stock = expert_fp8.quantize_rows
    monkeypatch.setattr(
        expert_fp8, "quantize_rows", lambda rows: shapes.append(tuple(rows.shape)) or stock(rows)
    )
    gradients([2, 0, 9], BF16, recompute=True)
    pairs, first, second = 11, (11, D), (11, F)
    # Forward; the first product again; the gradients through the second and the first weight.
    assert shapes == [first, second, first, first, (pairs, 2 * F)]
    assert expert_fp8.FP8_BLOCK.weight_gradient is grouped_weight_gradient


def test_what_fp8_cannot_serve_is_refused() -> None:
    leaves, order = problem([2, 0, 9], FP32)
    with pytest.raises(ValueError, match="precision='fp8' must be one of bf16, fp8_block"):
        expert_mlp(*leaves, order, activation=swiglu, precision="fp8")
    leaves[0] = leaves[0].detach().double()
    with pytest.raises(ValueError, match=r"no form for torch\.float64"):
        expert_mlp(*leaves, order, activation=swiglu, precision="fp8_block")
