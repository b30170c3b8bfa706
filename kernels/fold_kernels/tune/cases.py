"""What is timed: each op of a layer as its kernel computes it, beside what it replaces.

Nothing here times anything.
"""

# Shapes.  T tokens of a rank   K top-k   R = T*K pairs in expert order   e local experts
#          D model width   F expert width   O = 2F both halves of the first product

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fold_kernels.activation import activate, activate_backward
from fold_kernels.expert_forms import Form
from fold_kernels.expert_grouped import GROUPED_MM
from fold_kernels.expert_operands import Needs
from fold_kernels.ops.router import router_topk_backward_ref
from fold_kernels.ops.rows import combine_rows_ref, expert_index_ref, gather_rows_ref, pairs_of
from fold_kernels.router import RouterSpec, route_ref
from fold_kernels.swiglu import ActivationGradients, swiglu
from fold_kernels.tables import Tile, kind_of
from fold_kernels.tune.layers import Inputs

# Op and variant of every product of a layer, in the order of a step.
CALLS = (
    ("up", ""),
    ("gemm", "NT"),
    ("down_backward", ""),
    ("wgrad", "left"),
    ("gemm", "NN"),
    ("wgrad", "right"),
)
Results = tuple[Tensor, ...]
Run = Callable[[], Results]


@dataclass(frozen=True)
class Case:
    """One op on one routing.

    Attributes:
        op: As tables spell it.
        variant: Which of the calls that a layer makes; empty where there is one.
        kind: Of its shape, as tables spell it.
        kernel: The op with a tile, or with None where it has none.
        baselines: `replaced`: what runs without the kernel, and gives the same results. Of
            products also `grouped_mm`: torch's, operands in place; `dense`: one plain product of
            equal FLOPs.
        flop: Of its product; 0 where memory bounds it.
        moved: Bytes it must read and write; 0 where arithmetic bounds it.
    """

    op: str
    variant: str
    kind: str
    kernel: Callable[[Tile | None], Results]
    baselines: dict[str, Run]
    flop: int = 0
    moved: int = 0


def product_cases(inputs: Inputs) -> Iterator[Case]:
    """The six grouped products of a layer, each as its kernel computes it."""
    yield _up_case(inputs)
    yield _gemm_case(inputs, "NT", inputs.act_RF, inputs.x.down_eDF)
    yield _down_backward_case(inputs)
    yield _wgrad_case(inputs, "left")
    yield _gemm_case(inputs, "NN", inputs.grad_RO, inputs.x.gate_up_eOD)
    yield _wgrad_case(inputs, "right")


def row_cases(inputs: Inputs) -> Iterator[Case]:
    """The ops around the products, which have no tiles."""
    yield _router_case(inputs)
    yield _index_case(inputs)
    yield _gather_case(inputs)
    yield _combine_case(inputs)


def expert_pass(inputs: Inputs, form: Form) -> Results:
    """Forward and backward of all experts in one form: output, then all gradients."""
    x, needs = inputs.x, Needs(source=True, gate_up=True, down=True)
    sums_TD, hidden_RO = form.forward(x, keep_hidden=True)
    grads = form.backward(x, inputs.upstream_TD, hidden_RO, needs)
    assert grads.source_SD is not None
    assert grads.gate_up_eOD is not None
    assert grads.down_eDF is not None
    return sums_TD, grads.source_SD, grads.weights_R, grads.gate_up_eOD, grads.down_eDF


def experts_case(inputs: Inputs, kernels: Form, grouped: Form) -> Case:
    """All experts, forward and backward; tiles are the table's."""
    return Case(
        "experts",
        "",
        _kind(inputs, inputs.width),
        lambda _: expert_pass(inputs, kernels),
        {"replaced": lambda: expert_pass(inputs, grouped)},
        flop=inputs.layer.flop,
    )


def _up_case(inputs: Inputs) -> Case:
    x, layer = inputs.x, inputs.layer

    def kernel(tile: Tile | None) -> Results:
        from fold_kernels.gpu.up import up

        operands = x.source_SD, x.gate_up_eOD, x.weights_R, inputs.offsets_e1
        return up(*operands, _needed(tile), gate="swiglu", origin_R=x.origin_R)

    def product(rows_RD: Tensor) -> Tensor:
        return GROUPED_MM.multiply(rows_RD, x.gate_up_eOD, x.counts_e, x.sizes)

    def replaced() -> Results:
        hidden_RO = product(x.source_SD.index_select(0, x.origin_R))
        act_RF = hidden_RO.new_empty(layer.pairs, layer.width)
        activate(swiglu, hidden_RO, x.weights_R, out_RF=act_RF)
        return hidden_RO, act_RF

    rows_RD = x.source_SD.index_select(0, x.origin_R)
    return Case(
        "up",
        "",
        _kind(inputs, layer.width),
        kernel,
        {
            "replaced": replaced,
            "grouped_mm": lambda: (product(rows_RD),),
            "dense": lambda: (rows_RD @ x.gate_up_eOD[0].T,),
        },
        flop=4 * layer.pairs * layer.model * layer.width,
    )


def _gemm_case(inputs: Inputs, variant: str, rows: Tensor, weight: Tensor) -> Case:
    x, transposed = inputs.x, variant == "NN"

    def kernel(tile: Tile | None) -> Results:
        from fold_kernels.gpu.gemm import gemm

        return (gemm(rows, weight, inputs.offsets_e1, _needed(tile), transposed=transposed),)

    def product() -> Results:
        operand = weight.mT if transposed else weight
        return (GROUPED_MM.multiply(rows, operand, x.counts_e, x.sizes),)

    model = inputs.layer.model
    dense = weight[0] if transposed else weight[0].T
    return Case(
        "gemm",
        variant,
        _kind(inputs, model),
        kernel,
        {"replaced": product, "grouped_mm": product, "dense": lambda: (rows @ dense,)},
        flop=2 * rows.shape[0] * rows.shape[1] * model,
    )


def _down_backward_case(inputs: Inputs) -> Case:
    x, layer, hidden_RO = inputs.x, inputs.layer, inputs.hidden_RO

    def kernel(tile: Tile | None) -> Results:
        from fold_kernels.gpu.down_backward import down_backward

        operands = inputs.upstream_TD, x.down_eDF, hidden_RO, x.weights_R, inputs.offsets_e1
        return down_backward(*operands, _needed(tile), gate="swiglu", origin_R=x.origin_R)

    def product(grad_RD: Tensor) -> Tensor:
        return GROUPED_MM.multiply(grad_RD, x.down_eDF.mT, x.counts_e, x.sizes)

    def replaced() -> Results:
        grad_RF = product(inputs.upstream_TD.index_select(0, x.origin_R))
        empty = (torch.empty_like(t) for t in (hidden_RO, x.weights_R, inputs.act_RF))
        out = ActivationGradients(*empty)
        activate_backward(swiglu, hidden_RO, x.weights_R, grad_RF, out=out)
        return out.hidden_R2F, out.weighted_RF, out.weights_R

    grad_RD = inputs.upstream_TD.index_select(0, x.origin_R)
    return Case(
        "down_backward",
        "",
        _kind(inputs, layer.width),
        kernel,
        {
            "replaced": replaced,
            "grouped_mm": lambda: (product(grad_RD),),
            "dense": lambda: (grad_RD @ x.down_eDF[0],),
        },
        flop=2 * layer.pairs * layer.model * layer.width,
    )


def _wgrad_case(inputs: Inputs, side: str) -> Case:
    """Gradient of the second weight gathers its left rows, that of the first its right ones."""
    x = inputs.x
    is_left = side == "left"
    left, right = (inputs.upstream_TD, inputs.act_RF) if is_left else (inputs.grad_RO, x.source_SD)

    def kernel(tile: Tile | None) -> Results:
        from fold_kernels.gpu.wgrad import wgrad

        options: dict[str, Any] = {"origin_R": x.origin_R, "gather": side}
        return (wgrad(left, right, inputs.offsets_e1, _needed(tile), **options),)

    def gathered() -> tuple[Tensor, Tensor]:
        if is_left:
            return left.index_select(0, x.origin_R), right
        return left, right.index_select(0, x.origin_R)

    def product(pair: tuple[Tensor, Tensor]) -> Results:
        return (GROUPED_MM.weight_gradient(*pair, x.counts_e, x.sizes),)

    pair = gathered()
    return Case(
        "wgrad",
        side,
        _kind(inputs, right.shape[1]),
        kernel,
        {
            "replaced": lambda: product(gathered()),
            "grouped_mm": lambda: product(pair),
            "dense": lambda: (pair[0].T @ pair[1],),
        },
        flop=2 * inputs.layer.pairs * left.shape[1] * right.shape[1],
    )


def _router_case(inputs: Inputs) -> Case:
    spec, logits_TE = RouterSpec(inputs.layer.top_k), inputs.logits_TE
    grad_TK = torch.ones(logits_TE.shape[0], spec.top_k, device=logits_TE.device)
    grad_TK = grad_TK * torch.arange(spec.top_k, device=logits_TE.device)

    def kernel(_: Tile | None) -> Results:
        from fold_kernels.gpu.router import router_topk, router_topk_backward

        weights_TK, index_TK = router_topk(logits_TE, spec, None)
        return weights_TK, index_TK, router_topk_backward(logits_TE, index_TK, grad_TK, spec)

    def replaced() -> Results:
        weights_TK, index_TK, _ = route_ref(logits_TE, spec)
        return weights_TK, index_TK, router_topk_backward_ref(logits_TE, index_TK, grad_TK, spec)

    return _row_case("router_topk", kernel, replaced, moved=3 * logits_TE.nbytes)


def _index_case(inputs: Inputs) -> Case:
    experts = inputs.layer.experts

    def kernel(_: Tile | None) -> Results:
        from fold_kernels.gpu.index import expert_index

        return expert_index(inputs.ids_N, experts)

    moved = 4 * inputs.ids_N.nbytes
    return _row_case(
        "expert_index", kernel, lambda: expert_index_ref(inputs.ids_N, experts), moved=moved
    )


def _gather_case(inputs: Inputs) -> Case:
    source_TD, origin_R = inputs.x.source_SD, inputs.x.origin_R

    def kernel(_: Tile | None) -> Results:
        from fold_kernels.gpu.combine import gather

        return (gather(source_TD, origin_R),)

    rows = inputs.layer.pairs * inputs.layer.model * source_TD.element_size()
    return _row_case(
        "gather_rows",
        kernel,
        lambda: (gather_rows_ref(source_TD, origin_R),),
        moved=rows + source_TD.nbytes,
    )


def _combine_case(inputs: Inputs) -> Case:
    source_TD, origin_R = inputs.x.source_SD, inputs.x.origin_R
    rows_RD = source_TD.index_select(0, origin_R)
    pairs_R, starts_T1 = pairs_of(origin_R, inputs.layer.tokens)

    def kernel(_: Tile | None) -> Results:
        from fold_kernels.gpu.combine import combine

        return (combine(rows_RD, pairs_R, starts_T1),)

    return _row_case(
        "combine_rows",
        kernel,
        lambda: (combine_rows_ref(rows_RD, pairs_R, starts_T1, None),),
        moved=rows_RD.nbytes + source_TD.nbytes,
    )


def _row_case(
    op: str, kernel: Callable[[Tile | None], Results], replaced: Run, *, moved: int
) -> Case:
    # Ops without a product are looked up without widths (`backend.runs_triton`).
    kind = kind_of(rows=0, experts=1, width=0)
    return Case(op, "", kind, kernel, {"replaced": replaced}, moved=moved)


def _kind(inputs: Inputs, width: int) -> str:
    return kind_of(rows=inputs.layer.pairs, experts=inputs.layer.experts, width=width)


def _needed(tile: Tile | None) -> Tile:
    assert tile is not None, "a product is cut into tiles"
    return tile
