"""Row permutation around the experts: copy rows out in expert order, gather and sum them back.

Both directions are gathers in forward and backward, never scatters: sums have a fixed order and
need no atomics.
"""

# Shapes.  T tokens   K top-k   N = T*K routed rows   D model width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def sort_by_expert(index_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Row order by expert and its inverse.

    Returns:
        order_N: int64, routed row `order_N[i]` (token-major numbering) comes i-th.
        inverse_N: int64, the place of every routed row in that order.
    """
    # Stable: ties keep token order, so a recomputed forward permutes identically.
    order_N = index_TK.reshape(-1).argsort(stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    return order_N, inverse_N


def permute(x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
    """Copy each token's row once per chosen expert, in expert order: [T, D] to [N, D]."""
    out: Tensor = _Permute.apply(x_TD, order_N, inverse_N, top_k)
    return out


def unpermute(rows_ND: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
    """Sum the K rows of every token: [N, D] in expert order to [T, D]."""
    out: Tensor = _Unpermute.apply(rows_ND, order_N, inverse_N, top_k)
    return out


def _copy_out(x_TD: Tensor, order_N: Tensor, top_k: int) -> Tensor:
    return x_TD.index_select(0, order_N // top_k)


def _gather_and_sum(rows_ND: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
    rows_TKD = rows_ND.index_select(0, inverse_N).view(-1, top_k, rows_ND.shape[1])
    return rows_TKD.sum(1)


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.top_k = top_k
        return _copy_out(x_TD, order_N, top_k)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return _gather_and_sum(grad_ND, inverse_N, ctx.top_k), None, None, None


class _Unpermute(Function):
    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int
    ) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.top_k = top_k
        return _gather_and_sum(rows_ND, inverse_N, top_k)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None, None]:
        (order_N,) = ctx.saved_tensors
        return _copy_out(grad_TD, order_N, ctx.top_k), None, None, None
