"""Experts in batches of a few, in buffers that the next batch takes over.

The form for CPUs, and for every dtype anywhere: gathered rows, activations and outputs of all
experts never exist together. A batch adds its rows to the sums before the next one does, so sums
have a fixed order. An expert without pairs multiplies empty matrices, which gives zeros.
"""

# Shapes.  S rows that arrived   R pairs in expert order   n pairs of one batch   e local experts
#          O = 2F both halves of the first product   D model width   F expert width

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fold_kernels.activation import activate, activate_backward
from fold_kernels.expert_operands import Factors, Gradients, Needs, Operands, zero_sums
from fold_kernels.swiglu import ActivationGradients

# Elements that backward holds for one batch, 24 MiB in fp32. Small batches cost calls and meet the
# source rows out of cache again and again: best of 2**20 to 12 * 2**20 for 64 experts of width 64
# and 8 of width 512 (AMD EPYC, first generation, 2026-11-29).
BATCH_ELEMENTS = 6 << 20


@dataclass(frozen=True)
class Batch:
    """Consecutive experts that are computed together.

    Attributes:
        experts: Which.
        pairs: Where their pairs are.
        sizes: How many pairs each has.
    """

    experts: slice
    pairs: slice
    sizes: list[int]

    @property
    def num_pairs(self) -> int:
        """Pairs of all its experts, n."""
        return self.pairs.stop - self.pairs.start


def cut_batches(sizes: Sequence[int], limit: int) -> list[Batch]:
    """Batches of experts with `limit` pairs at most, or of one expert with more."""
    batches, first, start = [], 0, 0
    while first < len(sizes):
        last, stop = first + 1, start + sizes[first]
        while last < len(sizes) and stop + sizes[last] - start <= limit:
            last, stop = last + 1, stop + sizes[last]
        batches.append(Batch(slice(first, last), slice(start, stop), list(sizes[first:last])))
        first, start = last, stop
    return batches


def loop_forward(x: Operands, *, keep_hidden: bool) -> tuple[Tensor, Tensor | None]:
    """Weighted sums [S, D], and the first product [R, O] of all pairs if it is to be kept."""
    model, depth, width = _widths(x)
    kept_RO = x.source_SD.new_empty(x.origin_R.shape[0], depth) if keep_hidden else None
    sums_SD, batches = zero_sums(x.source_SD), _batches(x)
    room = _room(x.source_SD, batches, model, width, 0 if keep_hidden else depth)
    for batch in batches:
        rows_nD, act_nF, hidden_nO = (buffer[: batch.num_pairs] for buffer in room)
        hidden_nO = hidden_nO if kept_RO is None else kept_RO[batch.pairs]
        origin_n = x.origin_R[batch.pairs]
        torch.index_select(x.source_SD, 0, origin_n, out=rows_nD)
        _multiply(rows_nD, x.gate_up_eOD.mT, batch, out=hidden_nO)
        activate(x.activation, hidden_nO, x.weights_R[batch.pairs], out_RF=act_nF)
        # The rows have been read, and their room takes the results.
        _multiply(act_nF, x.down_eDF.mT, batch, out=rows_nD)
        sums_SD.index_add_(0, origin_n, rows_nD.to(sums_SD.dtype))
    return sums_SD.to(x.source_SD.dtype), kept_RO


def loop_backward(
    x: Operands,
    grad_SD: Tensor,
    kept_RO: Tensor | None,
    needs: Needs,
    factors: Factors | None = None,
) -> Gradients:
    """Gradients; the first product is computed again if it was not kept.

    Args:
        x: As in forward.
        grad_SD: Gradient of the sums.
        kept_RO: The first product.
        needs: Which gradients.
        factors: Filled for `loop_weight_gradients`; None where that does not follow.
    """
    grads = _empty_gradients(x, needs)
    model, depth, width = _widths(x)
    batches = _batches(x)
    again = 0 if kept_RO is not None else depth
    written = (depth, width) if factors is None else (0, 0)
    room = _room(x.source_SD, batches, model, model, *written, width, again)
    for batch in batches:
        rows, grad, grad_hidden, act, grad_act, hidden = (b[: batch.num_pairs] for b in room)
        if factors is not None:
            grad_hidden, act = factors.grad_hidden_RO[batch.pairs], factors.act_RF[batch.pairs]
        origin_n, weights_n = x.origin_R[batch.pairs], x.weights_R[batch.pairs]
        torch.index_select(x.source_SD, 0, origin_n, out=rows)
        torch.index_select(grad_SD, 0, origin_n, out=grad)
        if kept_RO is None:
            _multiply(rows, x.gate_up_eOD.mT, batch, out=hidden)
        else:
            hidden = kept_RO[batch.pairs]
        _multiply(grad, x.down_eDF, batch, out=grad_act)
        out = ActivationGradients(grad_hidden, grads.weights_R[batch.pairs], act)
        activate_backward(x.activation, hidden, weights_n, grad_act, out=out)
        if grads.down_eDF is not None:
            _multiply_transposed(grad, act, batch, out=grads.down_eDF)
        if grads.gate_up_eOD is not None:
            _multiply_transposed(grad_hidden, rows, batch, out=grads.gate_up_eOD)
        if grads.source_SD is not None:
            _multiply(grad_hidden, x.gate_up_eOD, batch, out=rows)
            grads.source_SD.index_add_(0, origin_n, rows.to(grads.source_SD.dtype))
    return grads


def loop_weight_gradients(factors: Factors, needs: Needs) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the first weights, [e, O, D], and of the second, [e, D, F]."""
    source_SD, experts = factors.source_SD, len(factors.sizes)
    depth, width = factors.grad_hidden_RO.shape[1], factors.act_RF.shape[1]
    model = source_SD.shape[1]
    gate_up_eOD = source_SD.new_empty(experts, depth, model) if needs.gate_up else None
    down_eDF = source_SD.new_empty(experts, model, width) if needs.down else None
    batches = _cut(factors.sizes, model, depth, width)
    (room,) = _room(source_SD, batches, model)
    for batch in batches:
        rows, origin_n = room[: batch.num_pairs], factors.origin_R[batch.pairs]
        if down_eDF is not None:
            torch.index_select(factors.grad_SD, 0, origin_n, out=rows)
            _multiply_transposed(rows, factors.act_RF[batch.pairs], batch, out=down_eDF)
        if gate_up_eOD is not None:
            torch.index_select(source_SD, 0, origin_n, out=rows)
            grad_hidden = factors.grad_hidden_RO[batch.pairs]
            _multiply_transposed(grad_hidden, rows, batch, out=gate_up_eOD)
    return gate_up_eOD, down_eDF


def _widths(x: Operands) -> tuple[int, int, int]:
    return x.source_SD.shape[1], x.gate_up_eOD.shape[1], x.down_eDF.shape[2]


def _batches(x: Operands) -> list[Batch]:
    return _cut(x.sizes, *_widths(x))


def _cut(sizes: Sequence[int], model: int, depth: int, width: int) -> list[Batch]:
    return cut_batches(sizes, BATCH_ELEMENTS // max(1, 2 * (model + width) + depth))


def _room(like: Tensor, batches: Iterable[Batch], *widths: int) -> list[Tensor]:
    """Buffers for the rows of any batch."""
    rows = max((batch.num_pairs for batch in batches), default=0)
    # One allocation: a C library keeps what was one piece for the next call, but returns many
    # small ones to the system, and pages that come back fresh cost more than all the sums.
    flat = like.new_empty(rows * sum(widths))
    parts = flat.split([rows * width for width in widths])
    return [part.view(rows, width) for part, width in zip(parts, widths, strict=True)]


def _empty_gradients(x: Operands, needs: Needs) -> Gradients:
    return Gradients(
        zero_sums(x.source_SD) if needs.source else None,
        torch.empty_like(x.weights_R),
        x.gate_up_eOD.new_empty(x.gate_up_eOD.shape) if needs.gate_up else None,
        x.down_eDF.new_empty(x.down_eDF.shape) if needs.down else None,
    )


# Views of all experts of a batch are cut in one call: for small experts calls are what costs.


def _multiply(rows_nI: Tensor, weight_eIO: Tensor, batch: Batch, *, out: Tensor) -> None:
    """Each expert's rows times its weight: [n, I] to [n, O]."""
    parts = rows_nI.split(batch.sizes), weight_eIO[batch.experts].unbind(0), out.split(batch.sizes)
    for rows, weight, result in zip(*parts, strict=True):
        torch.mm(rows, weight, out=result)


def _multiply_transposed(left_nO: Tensor, right_nI: Tensor, batch: Batch, *, out: Tensor) -> None:
    """Each expert's weight gradient, into its place in `out` [e, O, I]."""
    lefts = left_nO.t().split(batch.sizes, dim=1)
    parts = lefts, right_nI.split(batch.sizes), out[batch.experts].unbind(0)
    for left, right, result in zip(*parts, strict=True):
        torch.mm(left, right, out=result)
