"""Rows around the experts as ops: order by expert, copies out, sums back."""

# Shapes.  T tokens   K top-k   N = T*K routed rows   S source rows or sums   R pairs   E experts
#          D width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fold_kernels.backend import runs_triton
from fold_kernels.ops import checks
from fold_kernels.permute import sort_by_expert


def expert_index(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order of routed rows by expert, stable. Without a host synchronisation.

    Args:
        ids_TK: Integer; an id outside of [0, E) is no expert, and its row comes last.
        num_experts: E.

    Returns:
        order_N: int64, routed row (token-major numbering) that comes i-th.
        inverse_N: int64, the place of every routed row.
        counts_E: int64, rows of every expert.
    """
    order_N, inverse_N, counts_E = _expert_index(ids_TK.reshape(-1).long(), num_experts)
    return order_N, inverse_N, counts_E


def gather_rows(source_SD: Tensor, origin_R: Tensor) -> Tensor:
    """Copy row `origin_R[i]` to place i, [R, D]; zeros where the origin is negative.

    The gradient sums the copies of every row in their order, in fp32, rounded once.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    checks.matrix("gather_rows", "source_SD", source_SD)
    origin_R = checks.indices("gather_rows", "origin_R", origin_R)
    out: Tensor = _gather_rows(source_SD.contiguous(), origin_R)
    return out


def combine_rows(
    rows_RD: Tensor, pairs_P: Tensor, starts_S1: Tensor, scale_P: Tensor | None = None
) -> Tensor:
    """Sum rows, [S, D]: in a fixed order, fp32 inside, rounded once; zeros where there are none.

    Args:
        rows_RD: Any floating dtype. A row that no pair names has no part in anything.
        pairs_P: int64, the rows of the first sum, then of the second, and so on; negative for none.
            A row may be named once: its gradient is one gather.
        starts_S1: int64, where each sum's rows begin in `pairs_P`, and the end of the last.
        scale_P: fp32, factor of every pair. Carries no gradient.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    op = "combine_rows"
    checks.matrix(op, "rows_RD", rows_RD)
    pairs_P = checks.indices(op, "pairs_P", pairs_P)
    starts_S1 = checks.indices(op, "starts_S1", starts_S1)
    if scale_P is not None:
        scale_P = checks.factors(op, "scale_P", scale_P.detach(), pairs_P.shape[0])
    out: Tensor = _combine_rows(rows_RD.contiguous(), pairs_P, starts_S1, scale_P)
    return out


@torch.library.custom_op("fold_kernels::expert_index", mutates_args=())
def _expert_index(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if runs_triton(ids, "expert_index", dtypes=(torch.int64,)):
        from fold_kernels.gpu.index import expert_index as run

        return run(ids.contiguous(), num_experts)
    return expert_index_ref(ids, num_experts)


def expert_index_ref(ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stable sort, and where in it each expert begins."""
    outside_N = (ids_N < 0) | (ids_N >= num_experts)
    known_N = ids_N.masked_fill(outside_N, num_experts)
    order_N, inverse_N = sort_by_expert(known_N)
    edges = torch.arange(num_experts + 1, device=ids_N.device)
    starts = torch.searchsorted(known_N.index_select(0, order_N), edges)
    return order_N, inverse_N, starts.diff()


@torch.library.custom_op("fold_kernels::gather_rows", mutates_args=())
def _gather_rows(source: Tensor, origin: Tensor) -> Tensor:
    if runs_triton(source, "gather_rows"):
        from fold_kernels.gpu.combine import gather as run

        return run(source, origin)
    return gather_rows_ref(source, origin)


def gather_rows_ref(source_SD: Tensor, origin_R: Tensor) -> Tensor:
    """An index with a row of zeros for what is missing."""
    padded = torch.cat([source_SD, source_SD.new_zeros(1, source_SD.shape[1])])
    missing = source_SD.shape[0]
    return padded.index_select(0, origin_R.masked_fill(origin_R < 0, missing))


@torch.library.custom_op("fold_kernels::combine_rows", mutates_args=())
def _combine_rows(rows: Tensor, pairs: Tensor, starts: Tensor, scale: Tensor | None) -> Tensor:
    if runs_triton(rows, "combine_rows"):
        from fold_kernels.gpu.combine import combine as run

        return run(rows, pairs, starts, scale)
    return combine_rows_ref(rows, pairs, starts, scale)


def combine_rows_ref(
    rows_RD: Tensor, pairs_P: Tensor, starts_S1: Tensor, scale_P: Tensor | None
) -> Tensor:
    """Copies of all rows, then one sum an owner."""
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    copies = gather_rows_ref(rows_RD, pairs_P).to(wide)
    if scale_P is not None:
        copies = copies * scale_P.unsqueeze(1)
    sums_SD = copies.new_zeros(starts_S1.shape[0] - 1, rows_RD.shape[1])
    places = torch.arange(pairs_P.shape[0], device=rows_RD.device)
    owner_P = torch.searchsorted(starts_S1, places, right=True) - 1
    # Pairs before the first sum and behind the last belong to nobody.
    kept = (owner_P >= 0) & (owner_P < sums_SD.shape[0])
    copies = copies.where(kept.unsqueeze(1), 0)
    return sums_SD.index_add(0, owner_P.where(kept, 0), copies).to(rows_RD.dtype)


@_expert_index.register_fake
def _(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids), ids.new_empty(num_experts)


@_gather_rows.register_fake
def _(source: Tensor, origin: Tensor) -> Tensor:
    return source.new_empty(origin.shape[0], source.shape[1])


@_combine_rows.register_fake
def _(rows: Tensor, pairs: Tensor, starts: Tensor, scale: Tensor | None) -> Tensor:
    return rows.new_empty(starts.shape[0] - 1, rows.shape[1])


def _setup_gather(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.num_sources = inputs[0].shape[0]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (origin,) = ctx.saved_tensors
    pairs, starts = pairs_of(origin, ctx.num_sources)
    return combine_rows(grad, pairs, starts), None


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.num_rows = inputs[0].shape[0]


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    pairs, starts, scale = ctx.saved_tensors
    places = torch.arange(pairs.shape[0], device=pairs.device)
    owner = torch.searchsorted(starts, places, right=True) - 1
    owner = owner.masked_fill((owner >= grad.shape[0]) | (pairs < 0), -1)
    # Each row was named once, so the way back is a permutation: from row to owner and factor.
    owner_of_row = pairs.new_full((ctx.num_rows + 1,), -1)
    slot = pairs.masked_fill(pairs < 0, ctx.num_rows)
    owner_of_row.scatter_(0, slot, owner)
    rows = gather_rows(grad, owner_of_row[:-1])
    if scale is not None:
        factor = scale.new_zeros(ctx.num_rows + 1).scatter_(0, slot, scale)[:-1]
        rows = (rows * factor.unsqueeze(1)).to(grad.dtype)
    return rows, None, None, None


def pairs_of(origin_R: Tensor, num_sums: int) -> tuple[Tensor, Tensor]:
    """Rows of every sum one after the other, in their order, and where each sum's begin.

    Args:
        origin_R: int64, the sum that each row belongs to; negative for none.
        num_sums: S.
    """
    sorted_R, pairs_R = origin_R.sort(stable=True)
    edges = torch.arange(num_sums + 1, device=origin_R.device)
    # Rows of no sum sort to the front, before the first start.
    return pairs_R, torch.searchsorted(sorted_R, edges)


_gather_rows.register_autograd(_gather_backward, setup_context=_setup_gather)
_combine_rows.register_autograd(_combine_backward, setup_context=_setup_combine)
