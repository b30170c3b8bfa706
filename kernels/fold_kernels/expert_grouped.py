"""All experts at once, by grouped GEMMs: the form for GPUs, where calls cost more than memory.

Which library multiplies is a value, `Products`. Rows are summed by `sum_rows`, a gather: no
atomics, so reruns are equal bit for bit.
"""

# Shapes.  S rows that arrived   R pairs in expert order   e local experts
#          O = 2F both halves of the first product   D model width   F expert width

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fold_kernels.activation import activate, activate_backward
from fold_kernels.expert_operands import Factors, Gradients, Needs, Operands, empty_factors
from fold_kernels.grouped_gemm import grouped_gemm, grouped_weight_gradient
from fold_kernels.swiglu import ActivationGradients

Product = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Products:
    """The two products of a library.

    Attributes:
        multiply: Rows, weights [e, out, in], counts and sizes to the rows of the product.
        weight_gradient: Gradients of those rows, rows, counts and sizes to [e, out, in].
    """

    multiply: Product
    weight_gradient: Product


GROUPED_MM = Products(grouped_gemm, grouped_weight_gradient)


def grouped_forward(
    x: Operands, *, keep_hidden: bool, products: Products = GROUPED_MM
) -> tuple[Tensor, Tensor | None]:
    """Weighted sums [S, D], and the first product [R, O] if it is to be kept."""
    rows_RD = x.source_SD.index_select(0, x.origin_R)
    hidden_RO = products.multiply(rows_RD, x.gate_up_eOD, x.counts_e, x.sizes)
    act_RF = hidden_RO.new_empty(hidden_RO.shape[0], x.down_eDF.shape[2])
    activate(x.activation, hidden_RO, x.weights_R, out_RF=act_RF)
    out_RD = products.multiply(act_RF, x.down_eDF, x.counts_e, x.sizes)
    sums_SD = sum_rows(out_RD, x.origin_R, num_sums=x.source_SD.shape[0])
    return sums_SD, hidden_RO if keep_hidden else None


def grouped_backward(
    x: Operands,
    grad_SD: Tensor,
    kept_RO: Tensor | None,
    needs: Needs,
    factors: Factors | None = None,
    *,
    products: Products = GROUPED_MM,
) -> Gradients:
    """Gradients; the first product is computed again if it was not kept.

    Args:
        x: As in forward.
        grad_SD: Gradient of the sums.
        kept_RO: The first product.
        needs: Which gradients.
        factors: Filled for `grouped_weight_gradients`; None where that does not follow.
        products: What multiplies.
    """
    counts = (x.counts_e, x.sizes)
    rows_RD = x.source_SD.index_select(0, x.origin_R)
    grad_RD = grad_SD.index_select(0, x.origin_R)
    hidden_RO = products.multiply(rows_RD, x.gate_up_eOD, *counts) if kept_RO is None else kept_RO
    grad_RF = products.multiply(grad_RD, x.down_eDF.mT, *counts)
    factors = factors or empty_factors(x, grad_SD)
    grad_RO, act_RF, grad_R = factors.grad_hidden_RO, factors.act_RF, torch.empty_like(x.weights_R)
    out = ActivationGradients(grad_RO, grad_R, act_RF)
    activate_backward(x.activation, hidden_RO, x.weights_R, grad_RF, out=out)
    source_SD = None
    if needs.source:
        rows = products.multiply(grad_RO, x.gate_up_eOD.mT, *counts)
        source_SD = sum_rows(rows, x.origin_R, num_sums=x.source_SD.shape[0])
    return Gradients(
        source_SD,
        grad_R,
        products.weight_gradient(grad_RO, rows_RD, *counts) if needs.gate_up else None,
        products.weight_gradient(grad_RD, act_RF, *counts) if needs.down else None,
    )


def grouped_weight_gradients(
    factors: Factors, needs: Needs, *, products: Products = GROUPED_MM
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the first weights, [e, O, D], and of the second, [e, D, F]."""
    gate_up_eOD, down_eDF = None, None
    counts = (factors.counts_e, factors.sizes)
    if needs.gate_up:
        rows_RD = factors.source_SD.index_select(0, factors.origin_R)
        gate_up_eOD = products.weight_gradient(factors.grad_hidden_RO, rows_RD, *counts)
    if needs.down:
        grad_RD = factors.grad_SD.index_select(0, factors.origin_R)
        down_eDF = products.weight_gradient(grad_RD, factors.act_RF, *counts)
    return gate_up_eOD, down_eDF


def sum_rows(rows_RD: Tensor, origin_R: Tensor, *, num_sums: int) -> Tensor:
    """Sum of the rows of every origin, [num_sums, D]; zeros where there are none.

    Args:
        rows_RD: Any floating dtype; sums of 16-bit rows are made in fp32 and rounded once.
        origin_R: int64, the sum that each row belongs to.
        num_sums: How many sums.
    """
    if rows_RD.shape[0] == 0:
        return rows_RD.new_zeros(num_sums, rows_RD.shape[1])
    # Stable: rows of one sum keep their order. Each sum is then one bag of rows, without atomics.
    sorted_R, order_R = origin_R.sort(stable=True)
    starts = torch.searchsorted(sorted_R, torch.arange(num_sums, device=origin_R.device))
    wide = rows_RD.to(torch.promote_types(rows_RD.dtype, torch.float32))
    return F.embedding_bag(order_R, wide, starts, mode="sum").to(rows_RD.dtype)
