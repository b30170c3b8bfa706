"""Row permutation around the experts: copy rows out in expert order, gather and sum them back.

Both directions are gathers in forward and backward, never scatters: sums have a fixed order and
need no atomics. Places without a row (static shapes) are written as zeros, never left as found.
"""

# Shapes.  T tokens   K top-k   N = T*K routed rows   M rows sent, N without holes   D model width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fold_kernels.backend import runs_triton


def sort_by_expert(index_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Row order by expert and its inverse, by a stable sort.

    Returns:
        order_N: int64, routed row `order_N[i]` (token-major numbering) comes i-th.
        inverse_N: int64, the place of every routed row in that order.
    """
    # Stable: ties keep token order, so a recomputed forward permutes identically.
    order_N = index_TK.reshape(-1).argsort(stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    return order_N, inverse_N


def order_of_chunks(counts_Ce: Tensor, num_rows: int) -> Tensor:
    """Order by expert of rows that arrive in chunks, each of them by expert: int64 [num_rows].

    Equal to a stable sort by expert, without one; nothing synchronises.

    Args:
        counts_Ce: Rows of every chunk for every expert, in the order of arrival.
        num_rows: Their sum.
    """
    starts_Ce = counts_Ce.reshape(-1).cumsum(0).view_as(counts_Ce) - counts_Ce
    counts_eC, starts_eC = counts_Ce.T.reshape(-1), starts_Ce.T.reshape(-1)
    ends_eC = counts_eC.cumsum(0)
    places_R = torch.arange(num_rows, device=counts_Ce.device)
    chunk_R = torch.searchsorted(ends_eC, places_R, right=True)
    return places_R + (starts_eC - ends_eC + counts_eC).index_select(0, chunk_R)


def permute(
    x_TD: Tensor, order_M: Tensor, inverse_N: Tensor, top_k: int, *, holes: bool = False
) -> Tensor:
    """Copy each token's row once per chosen expert, in the order given: [T, D] to [M, D].

    Args:
        x_TD: Rows of the tokens.
        order_M: int64, routed row that comes i-th.
        inverse_N: int64, place of every routed row.
        top_k: K.
        holes: Whether N in `order_M` means a row of zeros and M in `inverse_N` no place. Costs a
            copy of the input.
    """
    out: Tensor = _Permute.apply(x_TD, order_M, inverse_N, top_k, holes)
    return out


def unpermute(
    rows_MD: Tensor, order_M: Tensor, inverse_N: Tensor, top_k: int, *, holes: bool = False
) -> Tensor:
    """Sum the K rows of every token: [M, D] in the order given to [T, D]; see `permute`."""
    out: Tensor = _Unpermute.apply(rows_MD, order_M, inverse_N, top_k, holes)
    return out


def _copy_out(x_TD: Tensor, order_M: Tensor, top_k: int, holes: bool) -> Tensor:
    if runs_triton(x_TD, "gather_rows"):
        from fold_kernels.gpu.combine import gather

        origin_M = order_M // top_k
        return gather(x_TD.contiguous(), origin_M.where(origin_M < x_TD.shape[0], -1))
    # Row N // K = T is the row of zeros.
    return _with_zeros(x_TD, holes).index_select(0, order_M // top_k)


def _gather_and_sum(rows_MD: Tensor, inverse_N: Tensor, top_k: int, holes: bool) -> Tensor:
    if runs_triton(rows_MD, "combine_rows"):
        from fold_kernels.gpu.combine import combine

        pairs_N = inverse_N.where(inverse_N < rows_MD.shape[0], -1)
        starts = torch.arange(0, pairs_N.shape[0] + 1, top_k, device=pairs_N.device)
        return combine(rows_MD.contiguous(), pairs_N, starts)
    rows_ND = _with_zeros(rows_MD, holes).index_select(0, inverse_N)
    return rows_ND.view(-1, top_k, rows_MD.shape[1]).sum(1)


def _with_zeros(rows: Tensor, wanted: bool) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]) if wanted else rows


class _Permute(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, order_M: Tensor, inverse_N: Tensor, top_k: int, holes: bool
    ) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.options = top_k, holes
        return _copy_out(x_TD, order_M, top_k, holes)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return _gather_and_sum(grad_MD, inverse_N, *ctx.options), None, None, None, None


class _Unpermute(Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, order_M: Tensor, inverse_N: Tensor, top_k: int, holes: bool
    ) -> Tensor:
        ctx.save_for_backward(order_M)
        ctx.options = top_k, holes
        return _gather_and_sum(rows_MD, inverse_N, top_k, holes)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None, None, None]:
        (order_M,) = ctx.saved_tensors
        return _copy_out(grad_TD, order_M, *ctx.options), None, None, None, None
