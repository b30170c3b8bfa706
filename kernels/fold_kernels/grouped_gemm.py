"""Grouped GEMM: consecutive groups of rows, each with its own weight, and its weight gradient.

`grouped_gemm` and `grouped_weight_gradient` are the checked entries, the `_ref` functions the
plain forms. A group without rows contributes nothing and its weight still gets a gradient of
zeros, never None: optimizers and collectives meet the same parameters on all ranks.
"""

# Shapes.  R rows   e experts   I input width   O output width

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fold_kernels.backend import grouped_mm_serves


def grouped_gemm(
    rows_RI: Tensor, weight_eOI: Tensor, counts_e: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Multiply each group of rows by the transpose of its weight: [R, I] to [R, O].

    Args:
        rows_RI: Rows in expert order.
        weight_eOI: One weight an expert, the dtype of the rows.
        counts_e: Rows of each expert, integer, on the device of the rows.
        sizes: The same counts on the host.

    Raises:
        ValueError: The widths or the counts do not fit.
    """
    if rows_RI.shape[1] != weight_eOI.shape[2] or sum(sizes) != rows_RI.shape[0]:
        raise ValueError(
            f"grouped_gemm: rows {tuple(rows_RI.shape)} with counts that sum to {sum(sizes)} do "
            f"not fit weights {tuple(weight_eOI.shape)}, which are [experts, out, in]"
        )
    if not grouped_mm_serves(rows_RI, weight_eOI.shape[2], weight_eOI.shape[1]):
        return grouped_gemm_ref(rows_RI, weight_eOI, sizes)
    return F.grouped_mm(rows_RI, weight_eOI.transpose(-2, -1), offs=_ends(counts_e))


def grouped_gemm_ref(rows_RI: Tensor, weight_eOI: Tensor, sizes: Sequence[int]) -> Tensor:
    """The loop over experts, an expert without rows included."""
    parts = rows_RI.split(list(sizes))
    return torch.cat([part @ weight.T for part, weight in zip(parts, weight_eOI, strict=True)])


def grouped_weight_gradient(
    grad_RO: Tensor, rows_RI: Tensor, counts_e: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Gradient of `grouped_gemm` to its weights, [e, O, I]. Arguments as there."""
    if not grouped_mm_serves(rows_RI, rows_RI.shape[1], grad_RO.shape[1]):
        return grouped_weight_gradient_ref(grad_RO, rows_RI, sizes)
    return F.grouped_mm(grad_RO.t(), rows_RI, offs=_ends(counts_e))


def grouped_weight_gradient_ref(grad_RO: Tensor, rows_RI: Tensor, sizes: Sequence[int]) -> Tensor:
    """The loop over experts, an expert without rows included."""
    parts = zip(grad_RO.split(list(sizes)), rows_RI.split(list(sizes)), strict=True)
    return torch.stack([grad.T @ rows for grad, rows in parts])


def _ends(counts_e: Tensor) -> Tensor:
    return counts_e.cumsum(0).to(torch.int32)
