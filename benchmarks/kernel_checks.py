"""Whether the kernels compute what they should on this machine, before anybody times them.

Odd sizes with empty experts, each tile alone, against fp64; poisoned memory and poisoned rows
behind the last expert; reruns bit for bit; no rows at all; more elements than 2**31. A part of
`kernels_h200.py`; the suite behind it is `tests/kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from fold_kernels.expert_forms import form_of
from fold_kernels.expert_mlp import Order, expert_mlp_ref
from fold_kernels.ops.activations import down_backward_ref, up_projection_ref
from fold_kernels.ops.products import grouped_gemm_ref, weight_gradient_ref
from fold_kernels.swiglu import swiglu
from fold_kernels.tables import Tile
from fold_kernels.tune.cases import Case, Results, expert_pass, product_cases, row_cases
from fold_kernels.tune.layers import Inputs, Layer, draw_inputs
from fold_kernels.tune.machine import Tiles, poisoned
from fold_kernels.tune.report import spell
from fold_kernels.tune.sweep import error_of

# Relative error of a norm against fp64: one rounding of the result (kernels.md 3.6).
PRODUCT = {torch.bfloat16: 2.5e-3, torch.float16: 5e-4}
# The activation is rounded before the second product too.
EXPERTS = 6e-3
# Sums in fp32 that differ in their order alone, rounded once.
ROWS = 2.5e-3
NO_EXPERT = -1e4


@dataclass(frozen=True)
class Check:
    """One comparison."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether it is close enough; NaN never is."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks: odd ones, and rows that make more than `big` elements."""

    odd: Layer
    big: int


GPU = Sizes(Layer("odd", 96, 80, 6, 2, 217), 1 << 31)
DRY = Sizes(Layer("odd", 48, 32, 6, 2, 27), 1 << 12)


def all_checks(device: torch.device, tiles: Tiles, sizes: Sizes) -> Iterator[Check]:
    """Everything, cheapest first."""
    torch.manual_seed(1)
    for dtype in PRODUCT:
        inputs = with_poisoned_tail(odd_inputs(sizes.odd, device, dtype))
        # Other dtypes are other kernels, which compile anew: one tile is enough.
        tried = tiles if dtype == torch.bfloat16 else lambda op: tiles(op)[:1]
        yield from product_checks(inputs, tried, PRODUCT[dtype])
    inputs = odd_inputs(sizes.odd, device, torch.bfloat16)
    yield from row_checks(inputs)
    yield experts_check(inputs)
    yield from empty_checks(inputs, tiles)
    yield from big_checks(device, tiles, sizes.big)


def product_checks(inputs: Inputs, tiles: Tiles, bound: float) -> Iterator[Check]:
    """Every product with every tile."""
    dtype = str(inputs.x.source_SD.dtype).removeprefix("torch.")
    for case in product_cases(inputs):
        for tile in tiles(case.op):
            name = f"{case.op} {case.variant} {dtype} {spell(tile)}"
            yield Check(name, _error(inputs, case, tile), bound)


def row_checks(inputs: Inputs) -> Iterator[Check]:
    """The ops around the products."""
    for case in row_cases(inputs):
        with poisoned():
            got, again = case.kernel(None), case.kernel(None)
        error = error_of(got, case.baselines["replaced"]())
        yield Check(case.op, error if _equal(got, again) else inf, ROWS)


def experts_check(inputs: Inputs) -> Check:
    """All experts, forward and backward, with the tiles of the table."""
    with poisoned():
        got = expert_pass(inputs, form_of("triton"))
        again = expert_pass(inputs, form_of("triton"))
    x = inputs.x
    leaves = [x.source_SD, x.weights_R, x.gate_up_eOD.unflatten(1, (2, -1)), x.down_eDF]
    leaves = [leaf.double().detach().requires_grad_() for leaf in leaves]
    out = expert_mlp_ref(*leaves, Order(x.origin_R, x.counts_e, x.sizes), activation=swiglu)
    grads = torch.autograd.grad(out, leaves, inputs.upstream_TD.double(), materialize_grads=True)
    wanted = out.detach(), *(grad.view(g.shape) for grad, g in zip(grads, got[1:], strict=True))
    return Check("experts", error_of(got, wanted) if _equal(got, again) else inf, EXPERTS)


def empty_checks(inputs: Inputs, tiles: Tiles) -> Iterator[Check]:
    """No rows at all: weight gradients are zeros, everything else is empty."""
    x = inputs.x
    none = replace(
        inputs,
        layer=replace(inputs.layer, tokens=1),
        x=replace(
            x,
            weights_R=x.weights_R[:0],
            origin_R=x.origin_R[:0],
            counts_e=torch.zeros_like(x.counts_e),
            sizes=[0] * len(x.sizes),
        ),
        offsets_e1=torch.zeros_like(inputs.offsets_e1),
        hidden_RO=inputs.hidden_RO[:0],
        act_RF=inputs.act_RF[:0],
        grad_RO=inputs.grad_RO[:0],
    )
    for case in product_cases(none):
        with poisoned():
            got = case.kernel(tiles(case.op)[0])
        sums = [part.double().abs().sum().item() for part in got]
        yield Check(f"{case.op} {case.variant} without rows", max(sums), 0.0)


def big_checks(device: torch.device, tiles: Tiles, elements: int) -> Iterator[Check]:
    """More elements than an int32 counts: the rows of the last expert against a plain product."""
    width, depth, last = (16384, 64, 300) if elements > 1 << 30 else (64, 32, 9)
    rows = elements // (2 * width) + 4 * last
    layer = Layer("big", depth, width, 2, 1, rows)
    logits_TE = torch.tensor([1.0, 0.0], device=device).repeat(rows, 1)
    logits_TE[-last:, 1] = 2.0
    inputs = draw_inputs(layer, "uniform", device, logits_TE=logits_TE)
    tail = slice(rows - last, rows)
    x = inputs.x
    source, weight = x.source_SD[x.origin_R[tail]].float(), x.gate_up_eOD[1].float()
    grad = inputs.grad_RO[tail].float()
    wanted: dict[str, Callable[[Results], tuple[Tensor, Tensor]]] = {
        "up": lambda got: (got[0][tail].float(), source @ weight.T),
        "gemm NN": lambda got: (got[0][tail].float(), grad @ weight),
        "wgrad right": lambda got: (got[0][1].float(), grad.T @ source),
    }
    for case in product_cases(inputs):
        name = f"{case.op} {case.variant}".strip()
        if name in wanted:
            with poisoned():
                pair = wanted[name](case.kernel(tiles(case.op)[0]))
            yield Check(f"{name} of {elements} elements", error_of(*((t,) for t in pair)), ROWS)


def odd_inputs(layer: Layer, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Operands whose first, last and a middle expert have no rows."""
    logits_TE = torch.randn(layer.tokens, layer.experts, device=device)
    logits_TE[:, [0, layer.experts // 2, layer.experts - 1]] = NO_EXPERT
    return draw_inputs(layer, "random", device, dtype=dtype, logits_TE=logits_TE)


def with_poisoned_tail(inputs: Inputs) -> Inputs:
    """The same with rows of NaN behind the last expert."""
    x, tail = inputs.x, 5

    def cut(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_full((tail, rows.shape[1]), torch.nan)])

    zeros = x.weights_R.new_zeros(tail)
    return replace(
        inputs,
        x=replace(
            x,
            weights_R=torch.cat([x.weights_R, zeros]),
            origin_R=torch.cat([x.origin_R, zeros.long()]),
        ),
        hidden_RO=cut(inputs.hidden_RO),
        act_RF=cut(inputs.act_RF),
        grad_RO=cut(inputs.grad_RO),
    )


def _error(inputs: Inputs, case: Case, tile: Tile | None) -> float:
    with poisoned():
        got, again = case.kernel(tile), case.kernel(tile)
    kept = [_kept(inputs, part) for part in got]
    if not _equal(kept, [_kept(inputs, part) for part in again]):
        return inf
    wanted = [_kept(inputs, part) for part in exact(inputs, case, got)]
    return error_of(tuple(kept), tuple(wanted))


def _kept(inputs: Inputs, part: Tensor) -> Tensor:
    """Rows of experts; weight gradients whole."""
    is_rows = part.shape[0] == inputs.x.weights_R.shape[0]
    return part[: sum(inputs.x.sizes)] if is_rows else part


def exact(inputs: Inputs, case: Case, got: Results) -> Results:
    """What a product should be, in fp64; the activation is that of the rounded product."""
    x, offsets_e1 = inputs.x, inputs.offsets_e1
    scale, gate_up, down = (t.double() for t in (x.weights_R, x.gate_up_eOD, x.down_eDF))
    source, upstream, act, grad = (
        t.double() for t in (x.source_SD, inputs.upstream_TD, inputs.act_RF, inputs.grad_RO)
    )
    call = f"{case.op} {case.variant}".strip()
    if call == "up":
        hidden = up_projection_ref(source, gate_up, scale, offsets_e1, "swiglu", x.origin_R)[0]
        return hidden, swiglu(got[0].double()) * scale.unsqueeze(1)
    if call == "down_backward":
        return down_backward_ref(
            upstream, down, inputs.hidden_RO.double(), scale, offsets_e1, "swiglu", x.origin_R
        )
    if case.op == "gemm":
        nt = case.variant == "NT"
        operands = (act, down) if nt else (grad, gate_up)
        return (grouped_gemm_ref(*operands, offsets_e1, not nt),)
    pair = (upstream, act) if case.variant == "left" else (grad, source)
    return (weight_gradient_ref(*pair, offsets_e1, x.origin_R, case.variant),)


def _equal(first: Results | list[Tensor], second: Results | list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
