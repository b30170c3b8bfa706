"""The products of the experts in fp8: both of forward, and those for the rows in backward.

Every product quantises its operands anew: rows, or gradients of rows, by 1 x 128 along the width
that is summed, weights by 128 x 128. Backward multiplies by the transposed weight, whose blocks are
the transposed blocks, so the values are those of forward in another layout. Weight gradients sum
over rows, along which these scales change from one to the next; they stay in the compute dtype, of
operands that were never quantised.
"""

# Shapes.  R rows in expert order   e experts   K input width   N output width

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fold_kernels.expert_grouped import Products
from fold_kernels.grouped_gemm import grouped_weight_gradient
from fold_kernels.ops.fp8 import fp8_grouped_gemm, quantize_blocks, quantize_rows


def fp8_multiply(
    rows_RK: Tensor, weight_eNK: Tensor, counts_e: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Each expert's rows times the transpose of its weight, [R, N], in the dtype of the rows.

    Args:
        rows_RK: Rows in expert order.
        weight_eNK: One weight an expert, of any strides.
        counts_e: Rows of each expert, integer, on the device of the rows.
        sizes: The same counts on the host.
    """
    offsets_e1 = F.pad(counts_e.cumsum(0), (1, 0)).int()
    rows, weight = quantize_rows(rows_RK), quantize_blocks(weight_eNK)
    return fp8_grouped_gemm(rows, weight, offsets_e1, dtype=rows_RK.dtype, sizes=sizes)


FP8_BLOCK = Products(fp8_multiply, grouped_weight_gradient)
