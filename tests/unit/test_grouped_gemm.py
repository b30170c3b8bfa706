"""Grouped GEMM: the entry against the loop over experts, and the choice of backend."""

import pytest
import torch

from fold_kernels.grouped_gemm import grouped_gemm, grouped_gemm_ref

# Shapes.  R rows   e experts   I input width   O output width
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
SIZES = [[3, 0, 4], [0, 0, 5], [2, 2, 2], [0, 0, 0]]


def _operands(sizes: list[int], dtype: torch.dtype, *, width: int = 8) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    rows_RI = torch.randn(sum(sizes), width, dtype=dtype, requires_grad=True)
    weight_eOI = torch.randn(len(sizes), 16, width, dtype=dtype, requires_grad=True)
    return rows_RI, weight_eOI


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_entry_equals_the_loop(sizes: list[int], dtype: torch.dtype) -> None:
    rows_RI, weight_eOI = _operands(sizes, dtype)
    out = grouped_gemm(rows_RI, weight_eOI, torch.tensor(sizes), sizes)
    wanted = grouped_gemm_ref(rows_RI, weight_eOI, sizes)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(wanted)
    ours = torch.autograd.grad(out, (rows_RI, weight_eOI), upstream)
    theirs = torch.autograd.grad(wanted, (rows_RI, weight_eOI), upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=8 * tolerance)


def test_the_loop_is_the_definition() -> None:
    rows_RI, weight_eOI = _operands([1, 2], torch.float64)
    out = grouped_gemm_ref(rows_RI, weight_eOI, [1, 2])
    torch.testing.assert_close(out[0], weight_eOI[0] @ rows_RI[0])
    torch.testing.assert_close(out[2], weight_eOI[1] @ rows_RI[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_expert_without_rows_gets_a_gradient_of_zeros(dtype: torch.dtype) -> None:
    for sizes in ([0, 3], [0, 0]):
        rows_RI, weight_eOI = _operands(sizes, dtype)
        out = grouped_gemm(rows_RI, weight_eOI, torch.tensor(sizes), sizes)
        # Not sum().backward(): torch's grouped_mm refuses the expanded gradient of a sum.
        out.backward(torch.ones_like(out))
        assert weight_eOI.grad is not None
        assert torch.equal(weight_eOI.grad[0], torch.zeros(16, 8, dtype=dtype))


def test_counts_that_do_not_fit_are_refused() -> None:
    rows_RI, weight_eOI = _operands([1, 2], torch.float32)
    with pytest.raises(ValueError, match="counts that sum to 4"):
        grouped_gemm(rows_RI, weight_eOI, torch.tensor([2, 2]), [2, 2])
