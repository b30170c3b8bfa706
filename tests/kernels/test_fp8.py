"""Blocks of fp8 and their products: kernels equal to the plain forms, which are close to fp64."""

from __future__ import annotations

import pytest
import torch
from kernel_problems import (
    PRODUCT,
    SIZES,
    Problem,
    by_expert,
    error,
    offsets_of,
    plain_layer,
    run_experts,
)
from torch import Tensor

from fold_kernels import ops
from fold_kernels.activation import ACTIVATIONS
from fold_kernels.backend import Request, choose
from fold_kernels.expert_fp8 import fp8_multiply
from fold_kernels.ops.fp8 import fp8_grouped_gemm_ref, quantize_blocks_ref, quantize_rows_ref
from fold_kernels.quantized import BLOCK, FP8, SMALLEST, Quantized

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INTERPRETED = not torch.cuda.is_available()
# Relative errors of a norm. Two operands of 4 significant bits give 3.7e-2 (kernels.md 3.6), two
# products with an activation in between 6.7e-2; gradients of so few routing weights scatter.
GEMM, LAYER, WEIGHTS = 5e-2, 8e-2, 1.1e-1
# A kernel against the plain form: 128 products are added in another order, on Hopper with about
# 14 bits (DeepGEMM #37).
ORDER = 1e-6 if INTERPRETED else 2e-3

every_dtype = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)


def same(got: Quantized, wanted: Quantized) -> bool:
    """Whether all bits agree; one NaN is as good as another."""
    pairs = (got.values.float(), wanted.values.float()), (got.scales, wanted.scales)
    return all(torch.equal(a.nan_to_num(-1e9), b.nan_to_num(-1e9)) for a, b in pairs)


def exact(x: Quantized) -> Tensor:
    """What quantised rows [R, K] or weights [e, N, K] stand for, in fp64."""
    wide = x.scales.double().T if x.scales.dim() == 2 else x.scales.double()
    if x.scales.dim() == 3:
        wide = wide.repeat_interleave(BLOCK, 1)
    return x.values.double() * wide.repeat_interleave(BLOCK, -1)


def awkward_rows(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Magnitudes that a block cannot hold all, zeros, tiny numbers, NaN and both Inf."""
    rows = torch.randn(41, 384) * torch.logspace(-5, 4, 384)
    rows[3, :128] = 0
    rows[4, 128:256] = 1e-7
    rows[5, 7], rows[6, 200], rows[7, 383] = torch.nan, torch.inf, -torch.inf
    return rows.to(dtype).to(device)


# ------------------------------------------------------------ quantisation


@every_dtype
def test_rows_are_quantised_as_by_the_plain_form(dtype, device) -> None:
    rows = awkward_rows(dtype, device)
    got = ops.quantize_rows(rows)
    assert same(got, quantize_rows_ref(rows))
    broken = got.scales.T.isnan()
    assert broken.sum() == 3
    assert broken[5, 0]
    assert torch.equal(got.values.float().isnan(), broken.repeat_interleave(BLOCK, 1))
    # Rows of a wider matrix, and rows of one that is stored by columns.
    for other in (torch.cat([rows, rows], 1)[:, :384], rows.T.contiguous().T):
        assert same(ops.quantize_rows(other), got)


@every_dtype
def test_weights_are_quantised_as_by_the_plain_form(dtype, device) -> None:
    weight = torch.randn(3, 256, 384)
    weight[0, :128, :128], weight[1, 130, 5] = 0, torch.inf
    weight = weight.to(dtype).to(device)
    got = ops.quantize_blocks(weight)
    assert same(got, quantize_blocks_ref(weight))
    assert got.scales.isnan().sum() == 1
    # Blocks of the transposed weight are the transposed blocks, in the layout of a product.
    other = ops.quantize_blocks(weight.mT)
    assert other.values.is_contiguous()
    assert same(other, Quantized(got.values.mT, got.scales.mT))


def test_numbers_that_fp8_has_are_kept(device) -> None:
    # 448 is the largest and takes the place of the two NaN, so a block is scaled by one.
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    rows = codes.nan_to_num(448).view(2, BLOCK).to(device)
    got = ops.quantize_rows(rows)
    assert torch.equal(got.scales, torch.ones_like(got.scales))
    assert torch.equal(got.values.float(), rows)


def test_rounding_is_to_nearest_and_to_even_between_two(device) -> None:
    row = torch.zeros(1, BLOCK, device=device)
    # Steps of 32 below 448, of 1 below 16, of 2**-9 at zero.
    row[0, :6] = torch.tensor([448.0, 432.0, 433.0, 15.5, 14.5, 2**-10])
    values = ops.quantize_rows(row).values.float()
    assert values[0, :6].tolist() == [448.0, 448.0, 448.0, 16.0, 14.0, 0.0]
    assert ops.quantize_rows(-row).values.float()[0, 1] == -448.0


def test_a_block_of_zeros_has_a_scale_and_gives_zeros(device) -> None:
    rows, weight = torch.zeros(5, 256, device=device), torch.zeros(1, 128, 256, device=device)
    left, right = ops.quantize_rows(rows), ops.quantize_blocks(weight)
    for x in (left, right):
        assert not x.values.float().any()
        assert torch.equal(x.scales, torch.full_like(x.scales, SMALLEST) / 448.0)
    out = ops.fp8_grouped_gemm(left, right, offsets_of([5]).to(device), dtype=FP32)
    assert not out.any()


# ------------------------------------------------------------ products


def operands(sizes: list[int], *, k: int = 256, n: int = 256, tail: int = 0, device) -> tuple:
    """Rows with a tail of NaN behind the last offset, weights of unit gain, offsets."""
    rows = torch.randn(sum(sizes) + tail, k, device=device)
    rows[sum(sizes) :] = torch.nan
    weight = torch.randn(len(sizes), n, k, device=device) * k**-0.5
    return rows, weight, offsets_of(sizes).to(device)


def plain(rows: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    return by_expert(rows.double(), sizes, lambda x, e: x @ weight[e].double().T)


@pytest.mark.parametrize("empty", SIZES)
@every_dtype
def test_a_product_is_that_of_the_plain_form(empty: str, dtype, device) -> None:
    sizes = SIZES[empty]
    rows, weight, offsets = operands(sizes, tail=5, device=device)
    left, right = ops.quantize_rows(rows), ops.quantize_blocks(weight)
    out = ops.fp8_grouped_gemm(left, right, offsets, dtype=dtype)
    assert out.dtype == dtype
    count = sum(sizes)
    out = out[:count]
    wanted = fp8_grouped_gemm_ref(left, right, offsets)[:count]
    assert error(out, wanted) <= max(ORDER, PRODUCT[dtype])
    assert error(out, plain(rows[:count], weight, sizes)) <= GEMM
    again = ops.fp8_grouped_gemm(left, right, offsets, dtype=dtype, sizes=sizes)
    assert torch.equal(out, again[:count])


@pytest.mark.parametrize("empty", SIZES)
def test_the_plain_form_is_the_same_with_sizes(empty: str, device) -> None:
    sizes = SIZES[empty]
    rows, weight, offsets = operands(sizes, tail=3, device=device)
    left, right = quantize_rows_ref(rows), quantize_blocks_ref(weight)
    got = fp8_grouped_gemm_ref(left, right, offsets, sizes)
    assert error(got, fp8_grouped_gemm_ref(left, right, offsets)) <= 1e-6
    assert not got[sum(sizes) :].any()


def test_what_is_no_number_stays_in_its_row_and_its_columns(device) -> None:
    sizes = [20, 9]
    rows, weight, offsets = operands(sizes, device=device)
    clean = fp8_multiply(rows, weight, torch.tensor(sizes, device=device), sizes)
    rows[4, 77], weight[1, 130, 3] = torch.nan, torch.inf
    out = ops.fp8_grouped_gemm(
        ops.quantize_rows(rows), ops.quantize_blocks(weight), offsets, dtype=FP32
    )
    spoiled = torch.zeros_like(out, dtype=torch.bool)
    spoiled[4], spoiled[20:, 128:] = True, True
    assert torch.equal(out.isnan(), spoiled)
    assert torch.equal(out[~spoiled], clean[~spoiled])


@pytest.mark.parametrize("k", [128, 1024])
def test_promotion_keeps_long_sums_as_exact_as_short_ones(k: int, device) -> None:
    """Positive numbers: a sum outgrows its terms, which an accumulator of 14 bits would drop."""
    sizes = [17, 0, 30]
    rows, weight, offsets = operands(sizes, k=k, n=128, device=device)
    rows, weight = rows.abs() + 0.5, weight.abs()
    left, right = ops.quantize_rows(rows), ops.quantize_blocks(weight)
    out = ops.fp8_grouped_gemm(left, right, offsets, dtype=FP32)
    assert error(out, plain(exact(left), exact(right), sizes)) <= ORDER
    rows, weight, offsets = operands(sizes, k=k, n=128, device=device)
    out = fp8_multiply(rows, weight, torch.tensor(sizes, device=device), sizes)
    assert error(out, plain(rows, weight, sizes)) <= GEMM


# ------------------------------------------------------------ experts


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_FOLD_MOE_BACKEND")


@pytest.mark.parametrize(
    ("empty", "dtype", "activation"),
    [("first", BF16, "swiglu"), ("middle", FP32, "geglu_tanh"), ("last", FP16, "swiglu")],
)
def test_a_layer_and_its_gradients(empty: str, dtype, activation: str, device) -> None:
    p = Problem.draw(SIZES[empty], dtype=dtype, model=128, width=128, device=device)
    out, grads = run_experts(p, activation, precision="fp8_block")
    wanted, wanted_grads = plain_layer(p, ACTIVATIONS[activation])
    assert 1e-2 < error(out, wanted) <= LAYER
    for name, grad in grads.items():
        assert error(grad, wanted_grads[name]) <= (WEIGHTS if name == "scale" else LAYER), name
    for e, size in enumerate(p.sizes):
        assert size or not (grads["first"][e].any() or grads["second"][e].any())
    assert not out[-1].any(), "the last row has no expert"


def test_the_emulation_of_a_layer_is_its_kernels(device, monkeypatch) -> None:
    p = Problem.draw(SIZES["first"], model=128, width=128, device=device)
    out, grads = run_experts(p, precision="fp8_block")
    forget(monkeypatch)
    emulated, emulated_grads = run_experts(p, precision="fp8_block")
    # A number at the edge of two codes may take the other one after a sum in another order.
    bound = 1e-3 if INTERPRETED else 2e-2
    assert error(out, emulated) <= bound
    for name, grad in grads.items():
        assert error(grad, emulated_grads[name]) <= bound, name


# ------------------------------------------------------------ entries


def test_ops_are_registered_as_torch_asks(device) -> None:
    rows, weight, offsets = operands([3, 0, 2], device=device)
    left, right = ops.quantize_rows(rows), ops.quantize_blocks(weight)
    space = torch.ops.fold_kernels
    both = "test_schema", "test_faketensor"
    torch.library.opcheck(space.quantize_rows.default, (rows,), test_utils=both)
    torch.library.opcheck(space.quantize_blocks.default, (weight.mT,), test_utils=both)
    pair = left.values, left.scales, right.values, right.scales
    for sizes in (None, [3, 0, 2]):
        arguments = (*pair, offsets, BF16, sizes)
        # The check of the schema compares inputs by arithmetic, which torch has not for fp8.
        torch.library.opcheck(space.fp8_grouped_gemm.default, arguments, test_utils=both[1])


def test_nothing_comes_of_nothing(device) -> None:
    rows, weight, offsets = operands([0, 0], device=device)
    left = ops.quantize_rows(rows)
    assert left.values.shape == (0, 256)
    assert left.scales.shape == (2, 0)
    out = ops.fp8_grouped_gemm(left, ops.quantize_blocks(weight), offsets, dtype=BF16)
    assert out.shape == (0, 256)


def test_what_does_not_fit_is_refused(device) -> None:
    rows, weight, offsets = operands([3, 2], device=device)
    left, right = ops.quantize_rows(rows), ops.quantize_blocks(weight)
    with pytest.raises(ValueError, match=r"quantize_rows: 128 does not divide widths \[200\]"):
        ops.quantize_rows(rows[:, :200])
    with pytest.raises(ValueError, match=r"quantize_blocks: 128 does not divide widths \[192\]"):
        ops.quantize_blocks(weight[:, :192])
    with pytest.raises(ValueError, match=r"no form for torch\.float64\. Legal: torch\.bfloat16"):
        ops.quantize_rows(rows.double())
    with pytest.raises(ValueError, match=r"fp8_grouped_gemm: rows .* and 2 offsets do not fit"):
        ops.fp8_grouped_gemm(left, right, offsets[:2], dtype=BF16)


def test_a_gpu_needs_no_measurement_and_other_libraries_are_refused() -> None:
    request = Request("fp8_grouped_gemm", "cuda", FP8, (2048, 768), 1 << 17, 128, (9, 0))
    assert choose(request).backend == "triton"
    ampere = Request("fp8_grouped_gemm", "cuda", FP8, (2048, 768), 1 << 17, 128, (8, 0))
    choice = choose(ampere)
    assert choice.backend == "loop"
    assert "emulated in fp32; no triton: capability" in choice.reason
    for forced in ("torch_grouped_mm", "te"):
        with pytest.raises(ValueError, match=f"{forced} cannot serve fp8_grouped_gemm: it has no"):
            choose(request, forced=forced)
