"""The experts of one rank as one differentiable operation on rows that have arrived.

Kept for backward: the source rows, the first product, the routing weights and the order. Not
kept: gathered rows, activations, outputs. Backward needs no expert output, since with dA' =
gather(dO) W2 the routing weight's gradient is <dA', A>; A comes from the first product, which
`recompute` drops as well. Sums over an origin have a fixed order; nothing here synchronises.
Weight gradients that are put off (`weight_store`) keep what they are made of instead of the first
product: its gradient, the weighted activation and the rows.
"""

# Shapes.  S rows that arrived   R pairs in expert order   e local experts
#          O = 2F both halves of the first product   D model width   F expert width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fold_kernels.activation import Activation
from fold_kernels.expert_forms import Form, Precision, choose_form
from fold_kernels.expert_operands import Factors, Needs, Operands, empty_factors
from fold_kernels.weight_store import PutOff, delay


@dataclass(frozen=True)
class Order:
    """Which expert takes which row.

    Attributes:
        origin_R: int64, row of every pair, in expert order.
        counts_e: int64, pairs per expert, on the device of the rows.
        sizes: The same counts on the host.
    """

    origin_R: Tensor
    counts_e: Tensor
    sizes: Sequence[int]


def expert_mlp(
    source_SD: Tensor,
    weights_R: Tensor,
    gate_up_e2FD: Tensor,
    down_eDF: Tensor,
    order: Order,
    *,
    activation: Activation,
    recompute: bool = False,
    precision: Precision = "bf16",
    put_off: PutOff | None = None,
) -> Tensor:
    """Sum over its experts of every row, weighted, [S, D].

    Args:
        source_SD: Rows, each once; their dtype is the compute dtype.
        weights_R: Routing weight of every pair, any floating dtype.
        gate_up_e2FD: First weights, gate then up, any floating dtype.
        down_eDF: Second weights.
        order: Rows of every expert.
        activation: Maps [R, 2F] to [R, F] row by row, without parameters. `swiglu` is computed by
            its own kernels.
        recompute: Whether to compute the first product again in backward instead of keeping it.
        precision: Of the products: `bf16` is the compute dtype, whatever it is; `fp8_block` is
            that of `expert_fp8`, for widths that 128 divides and a compute dtype below fp64.
        put_off: Where backward leaves the gradients of these two weights; None is the active
            store, and where there is none they come at once.

    Raises:
        ValueError: Widths, counts or precision do not fit.
    """
    _check(source_SD, weights_R, gate_up_e2FD, down_eDF, order)
    # Kernels address what is one number a pair by its place.
    weights_R, origin_R = weights_R.contiguous(), order.origin_R.contiguous()
    keeps = torch.is_grad_enabled() and not recompute
    put_off, anchor = put_off or delay(gate_up_e2FD, down_eDF), None
    if put_off is not None:
        anchor = put_off.anchor()
        gate_up_e2FD, down_eDF = gate_up_e2FD.detach(), down_eDF.detach()
    form = choose_form(source_SD, gate_up_e2FD, activation, order.sizes, precision)
    call = _Call(order.counts_e.contiguous(), tuple(order.sizes), activation, keeps, put_off, form)
    # Inside, every product has the dtype of the rows, whatever autocast says of products.
    with torch.autocast(source_SD.device.type, enabled=False):
        out: Tensor = _ExpertMlp.apply(
            source_SD, weights_R, gate_up_e2FD, down_eDF, origin_R, anchor, call
        )
    return out


def expert_mlp_ref(
    source_SD: Tensor,
    weights_R: Tensor,
    gate_up_e2FD: Tensor,
    down_eDF: Tensor,
    order: Order,
    *,
    activation: Activation,
) -> Tensor:
    """The plain form: a loop over experts, differentiated by autograd."""
    out_SD = torch.zeros_like(source_SD)
    starts = [sum(order.sizes[:e]) for e in range(len(order.sizes))]
    for e, (start, size) in enumerate(zip(starts, order.sizes, strict=True)):
        origin, weights = order.origin_R[start : start + size], weights_R[start : start + size]
        hidden = source_SD[origin] @ gate_up_e2FD[e].flatten(0, 1).to(source_SD.dtype).T
        act = (activation(hidden) * weights.unsqueeze(1)).to(source_SD.dtype)
        out_SD = out_SD.index_add(0, origin, act @ down_eDF[e].to(source_SD.dtype).T)
    return out_SD


@dataclass(frozen=True)
class _Call:
    counts_e: Tensor
    sizes: tuple[int, ...]
    activation: Activation
    keep_hidden: bool
    put_off: PutOff | None
    form: Form

    def operands(
        self, source: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, origin: Tensor
    ) -> Operands:
        """Weights are cast here, twice a step: a kept copy would live from forward to backward."""
        return Operands(
            source,
            weights.to(torch.promote_types(source.dtype, torch.float32)),
            gate_up.to(source.dtype).flatten(1, 2),
            down.to(source.dtype),
            origin,
            self.counts_e,
            self.sizes,
            self.activation,
        )


class _ExpertMlp(Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        origin: Tensor,
        anchor: Tensor | None,
        call: _Call,
    ) -> Tensor:
        x = call.operands(source, weights, gate_up, down, origin)
        out, hidden = call.form.forward(x, keep_hidden=call.keep_hidden)
        ctx.save_for_backward(source, weights, gate_up, down, origin, hidden)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Any, ...]:
        *inputs, origin, hidden = ctx.saved_tensors
        source, weights, gate_up, down = inputs
        needs = Needs(*(ctx.needs_input_grad[i] for i in (0, 2, 3)))
        with torch.autocast(grad_SD.device.type, enabled=False):
            x = ctx.call.operands(*inputs, origin)
            form = ctx.call.form
            # Upstream gradients may be expanded scalars; gathers want rows.
            grad_SD = grad_SD.contiguous()
            factors = None if ctx.call.put_off is None else empty_factors(x, grad_SD)
            grads = form.backward(x, grad_SD, hidden, needs, factors)
        if factors is not None:
            late = partial(_late_gradients, form, factors, ctx.call.put_off.weights)
            ctx.call.put_off.leave(late)
        return (
            _as(grads.source_SD, source),
            _as(grads.weights_R, weights),
            _as(grads.gate_up_eOD, gate_up),
            _as(grads.down_eDF, down),
            None,
            None,
            None,
        )


def _late_gradients(
    form: Form, factors: Factors, weights: tuple[Tensor, ...]
) -> tuple[Tensor | None, Tensor | None]:
    gate_up, down = weights
    needs = Needs(source=False, gate_up=gate_up.requires_grad, down=down.requires_grad)
    grad_eOD, grad_eDF = form.weight_gradients(factors, needs)
    return _as(grad_eOD, gate_up), _as(grad_eDF, down)


def _as(grad: Tensor | None, like: Tensor) -> Tensor | None:
    # Autograd itself casts to the dtype of the input.
    return None if grad is None else grad.view(like.shape)


def _check(source: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, order: Order) -> None:
    experts, halves, width, model = gate_up.shape
    fits = (
        halves == 2
        and down.shape == (experts, model, width)
        and source.shape[1] == model
        and len(order.sizes) == experts
        and sum(order.sizes) == order.origin_R.shape[0] == weights.shape[0]
    )
    if not fits:
        raise ValueError(
            f"expert_mlp: rows {tuple(source.shape)}, {weights.shape[0]} weights and counts "
            f"{list(order.sizes)} do not fit weights {tuple(gate_up.shape)}, which are [experts, "
            f"2, width, model], and {tuple(down.shape)}, [experts, model, width]"
        )
