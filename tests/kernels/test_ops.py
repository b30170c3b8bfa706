"""Every op against fp64, its gradient, its fake form and its reruns."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from kernel_problems import PRODUCT, SIZES, Problem, by_expert, error, offsets_of
from torch import Tensor

from fold_kernels import ops
from fold_kernels.activation import ACTIVATIONS, GATED
from fold_kernels.gpu import combine, index, router
from fold_kernels.gpu.tiles import tile_map, tile_map_ref
from fold_kernels.ops.activations import down_backward_ref, up_projection_ref
from fold_kernels.ops.products import grouped_gemm_ref, weight_gradient_ref
from fold_kernels.ops.rows import expert_index_ref, pairs_of
from fold_kernels.permute import permute, sort_by_expert, unpermute
from fold_kernels.router import RouterSpec

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CASES = [("first", FP32), ("middle", BF16), ("last", FP16), ("one", BF16), ("none", FP32)]
every_case = pytest.mark.parametrize(("empty", "dtype"), CASES)


def grads_of(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("empty", SIZES)
@pytest.mark.parametrize("block", [16, 64])
def test_tile_map_equals_its_plain_form(empty: str, block: int, device) -> None:
    offsets = offsets_of(SIZES[empty]).to(device)
    (tiles, count), (wanted, wanted_count) = (
        form(offsets, sum(SIZES[empty]), block) for form in (tile_map, tile_map_ref)
    )
    assert torch.equal(count, wanted_count)
    assert torch.equal(tiles[: int(count)], wanted[: int(count)])


@every_case
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_gemm(empty: str, dtype, transposed: bool, device) -> None:
    p = Problem.draw(SIZES[empty], dtype=dtype, device=device)
    rows = torch.randn(sum(p.sizes), 48, device=device).to(dtype)
    weight = p.first.mT.contiguous() if transposed else p.first
    out = ops.grouped_gemm(rows, weight, p.offsets, transposed=transposed)
    wanted = by_expert(rows.double(), p.sizes, lambda x, e: x @ p.first[e].double().T)
    assert error(out, wanted) <= PRODUCT[dtype]
    assert torch.equal(out, ops.grouped_gemm(rows, weight, p.offsets, transposed=transposed))


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_gemm_has_the_gradients_of_its_reference(transposed: bool, device) -> None:
    p = Problem.draw(SIZES["middle"], device=device)
    weight = p.first.mT.contiguous() if transposed else p.first
    leaves = [
        torch.randn(27, 48, device=device),
        weight,
        torch.randn(4, 80, device=device),
        torch.rand(27, device=device),
    ]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    rows, weight, bias, scale = leaves
    out = ops.grouped_gemm(
        rows, weight, p.offsets, transposed=transposed, bias_eN=bias, scale_R=scale
    )
    wanted = grouped_gemm_ref(rows, weight, p.offsets, transposed, bias, scale)
    assert error(out, wanted) <= PRODUCT[FP32]
    for got, want in zip(grads_of(out, *leaves), grads_of(wanted, *leaves), strict=True):
        assert error(got, want) <= 1e-5


@every_case
@pytest.mark.parametrize("gather", ["", "left", "right"])
def test_weight_gradient(empty: str, dtype, gather: str, device) -> None:
    p = Problem.draw(SIZES[empty], dtype=dtype, device=device)
    pairs = sum(p.sizes)
    left = torch.randn(13 if gather == "left" else pairs, 40, device=device).to(dtype)
    right = torch.randn(13 if gather == "right" else pairs, 48, device=device).to(dtype)
    origin = p.origin if gather else None
    out = ops.weight_gradient(left, right, p.offsets, origin_R=origin, gather=gather, dtype=FP32)
    wanted = weight_gradient_ref(left.double(), right.double(), p.offsets, origin, gather)
    assert error(out, wanted) <= 1e-5
    assert all(not out[e].any() for e, size in enumerate(p.sizes) if size == 0)
    into = torch.ones_like(out)
    added = ops.weight_gradient(left, right, p.offsets, origin_R=origin, gather=gather, into=into)
    assert added is into
    torch.testing.assert_close(into - 1, out, rtol=1e-4, atol=1e-4)


@every_case
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_up_projection_and_its_backward(empty: str, dtype, activation: str, device) -> None:
    halves = 2 if activation in GATED else 1
    p = Problem.draw(SIZES[empty], dtype=dtype, halves=halves, device=device)
    # Wide pre-activations reach the limits of the clamped form.
    p.first *= 4
    hidden, act = ops.up_projection(
        p.source, p.first, p.scale, p.offsets, activation=activation, origin_R=p.origin
    )
    rows = p.source[p.origin].double()
    wanted = by_expert(rows, p.sizes, lambda x, e: x @ p.first[e].double().T)
    assert error(hidden, wanted) <= PRODUCT[dtype]
    wanted_act = ACTIVATIONS[activation](hidden.double()) * p.scale.double().unsqueeze(1)
    assert error(act, wanted_act) <= PRODUCT[dtype]
    options = {"activation": activation, "origin_R": p.origin}
    results = ops.down_backward(p.upstream, p.second, hidden, p.scale, p.offsets, **options)
    wide = (x.double() for x in (p.upstream, p.second, hidden, p.scale))
    wanted_results = down_backward_ref(*wide, p.offsets, activation, p.origin)
    for got, want in zip(results, wanted_results, strict=True):
        assert error(got, want) <= PRODUCT[dtype]


def test_rows_in_expert_order_need_no_origin(device) -> None:
    p = Problem.draw(SIZES["last"], rows=sum(SIZES["last"]) + 1, device=device)
    p.origin = torch.arange(sum(p.sizes), device=device)
    with_origin = ops.up_projection(p.source, p.first, p.scale, p.offsets, origin_R=p.origin)
    without = ops.up_projection(p.source[:-1], p.first, p.scale, p.offsets)
    for got, want in zip(without, with_origin, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_up_projection_has_the_gradients_of_its_reference(activation: str, device) -> None:
    p = Problem.draw(SIZES["first"], device=device)
    leaves = [p.source, p.first, p.scale, torch.randn(4, 80, device=device)]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    source, weight, scale, bias = leaves
    options = {"activation": activation, "origin_R": p.origin}
    _, act = ops.up_projection(source, weight, scale, p.offsets, bias_eO=bias, **options)
    _, wanted = up_projection_ref(source, weight, scale, p.offsets, activation, p.origin, bias)
    assert error(act, wanted) <= PRODUCT[FP32]
    for got, want in zip(grads_of(act, *leaves), grads_of(wanted, *leaves), strict=True):
        assert error(got, want) <= 1e-5


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("width", [8, 40, 72])
def test_gather_and_combine(dtype, width: int, device) -> None:
    source = torch.randn(9, width, device=device).to(dtype).requires_grad_()
    origin = torch.tensor([3, -1, 0, 3, 8, -1, 3], device=device)
    rows = ops.gather_rows(source, origin)
    assert torch.equal(rows[origin < 0], torch.zeros(2, width, dtype=dtype, device=device))
    assert torch.equal(rows[origin >= 0], source[origin[origin >= 0]])
    upstream = torch.randn(7, width, device=device).to(dtype)
    (grad,) = torch.autograd.grad(rows, source, upstream)
    wanted = torch.zeros(9, width, device=device, dtype=torch.float64)
    wanted.index_add_(0, origin.clamp(0), upstream.double() * (origin >= 0).unsqueeze(1))
    assert error(grad, wanted) <= PRODUCT[dtype]
    assert not grad[1].any()


def test_combine_scales_and_leaves_out_rows_that_nobody_names(device) -> None:
    rows = torch.randn(6, 24, device=device)
    rows[4] = torch.nan
    rows.requires_grad_()
    pairs = torch.tensor([5, 0, -1, 1, 3], device=device)
    starts = torch.tensor([0, 2, 2, 5], device=device)
    scale = torch.rand(5, device=device)
    out = ops.combine_rows(rows, pairs, starts, scale)
    first = rows[5] * scale[0] + rows[0] * scale[1]
    wanted = torch.stack([first, torch.zeros_like(first), rows[1] * scale[3] + rows[3] * scale[4]])
    torch.testing.assert_close(out, wanted)
    upstream = torch.randn(3, 24, device=device)
    (grad,) = torch.autograd.grad(out, rows, upstream)
    (want,) = torch.autograd.grad(wanted, rows, upstream)
    torch.testing.assert_close(grad, want)
    assert not grad[[2, 4]].any()


@pytest.mark.parametrize(("rows", "experts"), [(0, 3), (1, 3), (128, 1), (300, 7), (777, 64)])
def test_expert_index_is_the_stable_sort(rows: int, experts: int, device) -> None:
    ids = torch.randint(-1, experts + 1, (rows,), device=device)
    for got, want in zip(
        ops.expert_index(ids.unsqueeze(1), experts), expert_index_ref(ids, experts), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("holes", [False, True])
def test_rows_of_the_dispatchers_go_out_and_back(holes: bool, device, monkeypatch) -> None:
    x = torch.randn(6, 24, device=device, requires_grad=True)
    order, inverse = sort_by_expert(torch.randint(0, 4, (6, 2), device=device))
    if holes:
        # Places 3 and 12 hold nothing, and the row that comes first is sent to no place.
        order = torch.cat([order[1:4], order.new_tensor([12]), order[4:], order.new_tensor([12])])
        inverse = torch.full((13,), 13, device=device).scatter(0, order, torch.arange(13))[:12]
    upstream = torch.randn(6, 24, device=device)
    results = []
    for backend in ("triton", "loop"):
        monkeypatch.setenv("LIGHTNING_FOLD_MOE_BACKEND", backend)
        rows = permute(x, order, inverse, 2, holes=holes)
        out = unpermute(rows * 2, order, inverse, 2, holes=holes)
        results.append([rows, out, *torch.autograd.grad(out, x, upstream)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("module", "function", "call"),
    [
        (index, "expert_index", lambda: ops.expert_index(torch.tensor([[1], [0]]), 2)),
        (router, "router_topk", lambda: ops.router_topk(torch.randn(3, 4), RouterSpec(2))),
        (combine, "gather", lambda: ops.gather_rows(torch.randn(3, 8), torch.tensor([1]))),
    ],
    ids=["index", "router", "rows"],
)
def test_ops_around_the_products_run_their_kernels(module, function, call, monkeypatch) -> None:
    """Else a comparison with the plain form would compare that with itself."""
    kernel = mock.Mock(wraps=getattr(module, function))
    monkeypatch.setattr(module, function, kernel)
    call()
    kernel.assert_called_once()


def test_every_op_is_registered_as_torch_asks(device) -> None:
    p = Problem.draw(SIZES["first"], model=16, width=16, device=device)
    source, first, second, scale = (
        x.clone().requires_grad_() for x in (p.source, p.first, p.second, p.scale)
    )
    space = torch.ops.fold_kernels
    hidden, act = ops.up_projection(p.source, p.first, p.scale, p.offsets, origin_R=p.origin)
    pairs, starts = pairs_of(p.origin, 13)
    rows = torch.randn(32, 16, device=device)
    bias = torch.zeros(4, device=device)
    decision = (2, "sigmoid", False, True, 1.0, 1, 1, "max")
    logits = torch.randn(5, 4, device=device, requires_grad=True)
    index = torch.tensor([[0, 1]] * 5, device=device)
    calls = [
        (space.expert_index, (p.origin, 4)),
        (space.gather_rows, (source, p.origin)),
        (space.combine_rows, (rows.requires_grad_(), pairs, starts, None)),
        (space.grouped_gemm, (act.detach().requires_grad_(), second, p.offsets, False, None, None)),
        (space.weight_gradient, (act.detach(), act.detach(), p.offsets, None, "", FP32)),
        (space.up_projection, (source, first, scale, p.offsets, "swiglu", p.origin, None)),
        (
            space.down_backward,
            (p.upstream, p.second, hidden, p.scale, p.offsets, "swiglu", p.origin),
        ),
        (space.router_topk, (logits, bias, *decision)),
        (space.router_topk_backward, (logits.detach(), index, torch.rand(5, 2), *decision)),
    ]
    for op, arguments in calls:
        # Poisoned memory differs between two fake runs, which this comparison takes for a fault.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op.default, arguments, test_utils=checks)


def test_a_compiled_function_sees_ops_as_one_node(device) -> None:
    p = Problem.draw(SIZES["first"], device=device)

    def layer(source: Tensor, first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
        _, act = ops.up_projection(source, first, scale, p.offsets, origin_R=p.origin)
        rows = ops.grouped_gemm(act, second, p.offsets)
        return ops.combine_rows(rows, *pairs_of(p.origin, 13))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for form in (layer, compiled):
        leaves = [x.clone().requires_grad_() for x in (p.source, p.first, p.second, p.scale)]
        out = form(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, p.upstream)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_shapes_that_do_not_fit_are_refused(device) -> None:
    p = Problem.draw(SIZES["first"], device=device)
    with pytest.raises(ValueError, match="grouped_gemm: rows"):
        ops.grouped_gemm(p.source, p.second, p.offsets)
    with pytest.raises(ValueError, match="up_projection: activation='silu' must be one of swiglu"):
        ops.up_projection(p.source, p.first, p.scale, p.offsets, activation="silu")
    with pytest.raises(ValueError, match="goes with origin_R"):
        ops.weight_gradient(p.source, p.source, p.offsets, gather="left")
    with pytest.raises(ValueError, match="go together"):
        ops.grouped_gemm(p.source, p.first, p.offsets, bias_eN=F.relu(p.first[..., 0]))
