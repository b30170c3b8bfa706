"""The forms of the expert computation, one a backend, and which one a call takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, get_args

from torch import Tensor

from fold_kernels.activation import Activation, name_of
from fold_kernels.backend import Backend, Request, choose_for
from fold_kernels.expert_fp8 import FP8_BLOCK
from fold_kernels.expert_grouped import (
    GROUPED_MM,
    Products,
    grouped_backward,
    grouped_forward,
    grouped_weight_gradients,
)
from fold_kernels.expert_loop import loop_backward, loop_forward, loop_weight_gradients
from fold_kernels.expert_operands import Factors, Gradients, Needs

Precision = Literal["bf16", "fp8_block"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Form:
    """One way to compute the experts.

    Attributes:
        forward: Operands to the weighted sums [S, D], and the first product if it is to be kept.
        backward: Operands, gradient of the sums, kept product, needs and factors to gradients.
        weight_gradients: Factors and needs to the gradients of both weights.
    """

    forward: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., Gradients]
    weight_gradients: Callable[[Factors, Needs], tuple[Tensor | None, Tensor | None]]


def choose_form(
    source_SD: Tensor,
    gate_up_e2FD: Tensor,
    activation: Activation,
    sizes: Sequence[int],
    precision: Precision = "bf16",
) -> Form:
    """Form of one call; see `fold_kernels.backend`.

    Args:
        source_SD: Rows, on the device and in the dtype of the products.
        gate_up_e2FD: First weights.
        activation: Between the products.
        sizes: Pairs of every expert.
        precision: `fp8_block` multiplies in fp8, and each of its ops chooses for itself.

    Raises:
        ValueError: The backend that the user forces cannot serve the call, or there is no such
            precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}.")
    if precision == "fp8_block":
        return FP8_FORM
    experts, _, width, model = gate_up_e2FD.shape
    request = Request.of(
        "experts",
        source_SD,
        (model, width),
        rows=sum(sizes),
        experts=experts,
        obstacle=None if name_of(activation) else "its activation has no kernel",
    )
    return form_of(choose_for(source_SD, request).backend)


@cache
def form_of(backend: Backend) -> Form:
    """The form that a backend computes with."""
    if backend == "loop":
        return Form(loop_forward, loop_backward, loop_weight_gradients)
    if backend == "triton":
        from fold_kernels import expert_triton as kernels

        return Form(
            kernels.triton_forward, kernels.triton_backward, kernels.triton_weight_gradients
        )
    return grouped_form(_te_products() if backend == "te" else GROUPED_MM)


def grouped_form(products: Products) -> Form:
    """The form that multiplies all experts at once by the products of some library."""
    return Form(
        partial(grouped_forward, products=products),
        partial(grouped_backward, products=products),
        partial(grouped_weight_gradients, products=products),
    )


FP8_FORM = grouped_form(FP8_BLOCK)


def _te_products() -> Products:
    from fold_kernels.te import te_grouped_gemm, te_weight_gradient

    return Products(
        lambda rows, weight, _, sizes: te_grouped_gemm(rows, weight, sizes),
        lambda grad, rows, _, sizes: te_weight_gradient(grad, rows, sizes),
    )
