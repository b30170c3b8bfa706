"""The interpreter rounds as a GPU does, and refuses arithmetic that it would get wrong."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU needs no interpreter", allow_module_level=True)

with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
    import triton
    import triton.language as tl

    @triton.jit
    def cast_kernel(source_ptr, out_ptr, N: tl.constexpr):
        place = tl.arange(0, N)
        value = tl.load(source_ptr + place).to(tl.float32)
        tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty))

    @triton.jit
    def dot_kernel(left_ptr, right_ptr, out_ptr, N: tl.constexpr):
        place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        acc = tl.zeros((N, N), tl.float32)
        acc = tl.dot(tl.load(left_ptr + place), tl.load(right_ptr + place), acc)
        tl.store(out_ptr + place, acc)

    @triton.jit
    def add_kernel(source_ptr, out_ptr, N: tl.constexpr):
        place = tl.arange(0, N)
        value = tl.load(source_ptr + place)
        tl.store(out_ptr + place, value + value)

    @triton.jit
    def sum_kernel(source_ptr, out_ptr, N: tl.constexpr):
        tl.store(out_ptr, tl.sum(tl.load(source_ptr + tl.arange(0, N)), 0))


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    source = torch.randn(512) * torch.logspace(-30, 30, 512)
    out = torch.empty(512, dtype=torch.bfloat16)
    cast_kernel[(1,)](source, out, 512)
    assert torch.equal(out, source.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rounding_to_fp8_is_to_nearest_and_saturates(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    source = torch.cat([torch.randn(504) * 30, torch.tensor([limit * 3, -limit * 3] * 4)])
    out = torch.empty(512, dtype=dtype)
    cast_kernel[(1,)](source, out, 512)
    assert torch.equal(out.float(), source.clamp(-limit, limit).to(dtype).float())
    back = torch.empty(512)
    cast_kernel[(1,)](out, back, 512)
    assert torch.equal(back, out.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_dot_multiplies_numbers_and_not_bit_patterns(dtype: torch.dtype) -> None:
    left, right = (torch.randn(32, 32).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    dot_kernel[(1,)](left, right, out, 32)
    torch.testing.assert_close(out, left.float() @ right.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [add_kernel, sum_kernel])
def test_other_arithmetic_on_bf16_is_refused(kernel) -> None:
    """triton #11584: the stock interpreter adds the bit patterns and says nothing."""
    source = torch.randn(16).bfloat16()
    with pytest.raises(Exception, match="arithmetic on bf16"):
        kernel[(1,)](source, torch.empty_like(source), 16)
