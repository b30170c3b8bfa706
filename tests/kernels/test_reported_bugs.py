"""Faults that others reported of such kernels, each a case here. Numbers are kernels.md's rows.

What a CPU cannot show is named at the end with the place that shows it on a GPU.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_problems import PRODUCT, Problem, error, offsets_of

from fold_kernels import backend, ops, tables
from fold_kernels.backend import Request, choose, why_not_grouped_mm
from fold_kernels.gpu.combine import combine
from fold_kernels.gpu.gemm import gemm
from fold_kernels.gpu.wgrad import wgrad
from fold_kernels.measured import Table
from fold_kernels.tables import Tile

OVERFLOW = Path(__file__).with_name("overflow.py")
FAR = ("rows", "experts", "combine", "gather", "wgrad", "up", "down", "fp8", "quantize")
interpreted_only = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU has less virtual memory; benchmarks/kernels_h200.py"
)


@pytest.fixture(scope="module")
def far_accesses() -> subprocess.CompletedProcess[str]:
    """All cases of `overflow.py` in one process, which the first wrong one ends."""
    return run_overflow(*FAR)


def run_overflow(*cases: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(OVERFLOW), *cases]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@interpreted_only
@pytest.mark.parametrize("case", FAR)
def test_1_and_2_offsets_past_two_to_the_31(case: str, far_accesses) -> None:
    """Liger #1246, #1296; megablocks #185; DeepSpeed #8261: int32 products of row and stride."""
    ended = f"ended with {far_accesses.returncode}\n{far_accesses.stderr[-2000:]}"
    assert f"{case} equal\n" in far_accesses.stdout, ended


@interpreted_only
def test_1_the_overflow_cases_tell_a_32_bit_kernel() -> None:
    """The cases above can fail: the same access with int32 arithmetic leaves the memory."""
    done = run_overflow("broken")
    assert done.returncode == -signal.SIGSEGV, done.stderr[-2000:]


@pytest.mark.parametrize("sizes", [[0, 5], [5, 0], [3, 0, 2], [0, 0]], ids=str)
def test_3_weight_gradients_of_experts_without_rows_are_zero(sizes: list[int], device) -> None:
    """grouped_gemm #36, pytorch #174314: uninitialised or non-zero."""
    rows = torch.randn(sum(sizes), 24, device=device)
    grad = ops.weight_gradient(rows, rows, offsets_of(sizes).to(device))
    assert torch.isfinite(grad).all()
    assert all(not grad[e].any() for e, size in enumerate(sizes) if size == 0)


def test_4_more_experts_than_rows_and_one_taking_all(device) -> None:
    """torchtitan #1166: grouped_mm hung with groups of no rows."""
    for sizes in ([0] * 20 + [3] + [0] * 20, [1] + [0] * 40):
        p = Problem.draw(sizes, model=16, width=16, device=device)
        rows = torch.randn(sum(sizes), 16, device=device)
        out = ops.grouped_gemm(rows, p.first, p.offsets)
        owner = next(e for e, size in enumerate(sizes) if size)
        assert error(out, rows.double() @ p.first[owner].double().T) <= 1e-6


def test_5_rows_behind_the_last_offset_reach_nothing(device) -> None:
    """transformers #45621, TE #3116, Primus #397."""
    offsets = offsets_of([3, 0, 5]).to(device)
    rows = torch.randn(12, 24, device=device)
    rows[8:] = torch.nan
    weight = torch.randn(3, 40, 24, device=device)
    out = ops.grouped_gemm(rows, weight, offsets)
    assert torch.isfinite(out[:8]).all()
    grad = ops.weight_gradient(rows, rows, offsets)
    assert torch.isfinite(grad).all()
    scale = torch.ones(12, device=device)
    first = torch.randn(3, 2 * 16, 24, device=device)
    hidden, _ = ops.up_projection(rows, first, scale, offsets)
    assert torch.isfinite(hidden[:8]).all()
    second = torch.randn(3, 24, 16, device=device)
    hidden = hidden.nan_to_num()
    hidden[8:] = torch.nan
    grads = ops.down_backward(rows, second, hidden, scale, offsets)
    assert all(torch.isfinite(grad[:8]).all() for grad in grads)


# 6, upstream gradients of any layout: tests/kernels/test_expert_kernels.py.


def test_7_sums_of_copies_are_rounded_once_and_repeat(device) -> None:
    """torchtitan #1974, vllm #53440: index_add by atomics, 3 to 4 times the error in bf16."""
    copies = torch.randn(64, 40, device=device).bfloat16()
    pairs = torch.randperm(64, device=device)
    starts = torch.arange(0, 65, 8, device=device)
    runs = [ops.combine_rows(copies, pairs, starts) for _ in range(10)]
    assert all(torch.equal(runs[0], other) for other in runs)
    wanted = copies[pairs].double().unflatten(0, (8, 8)).sum(1)
    assert error(runs[0], wanted) <= PRODUCT[torch.bfloat16]


def test_8_every_tile_alone_gives_the_same_numbers(device) -> None:
    """triton #3004, #9230: several configurations writing one output hid each other's faults."""
    offsets = offsets_of([7, 0, 30]).to(device)
    rows, weight = torch.randn(37, 64, device=device), torch.randn(3, 72, 64, device=device)
    wanted = torch.cat([rows[:7] @ weight[0].T, rows[7:] @ weight[2].T])
    into = torch.zeros(3, 64, 64, device=device)
    for tile in (Tile(16, 16, 16, 2, 4), Tile(32, 64, 16, 2, 4, group=1), Tile(64, 16, 32, 2, 4)):
        assert error(gemm(rows, weight, offsets, tile), wanted) <= 1e-6
        into.zero_()
        wgrad(rows, rows, offsets, tile, into=into)
        assert error(into[2], rows[7:].T @ rows[7:]) <= 1e-6


def test_9_a_choice_is_a_pure_function() -> None:
    """Megatron-LM #6966, sonic-moe #73: ranks took different kernels."""
    request = Request("experts", "cuda", torch.bfloat16, (4096, 1536), 1 << 17, 128, (9, 0))
    table = Table(gains={"experts/many": 1.2})
    assert len({choose(request, table=table) for _ in range(5)}) == 1
    assert choose(request, table=table).backend == "triton"
    assert dataclasses.is_dataclass(Table)
    names = vars(tables).keys() | vars(backend).keys()
    assert not any("autotune" in name or "do_bench" in name for name in names)


@pytest.mark.slow
def test_10_more_rows_than_the_second_axis_of_a_grid_has(device) -> None:
    """triton #3299, vllm #52381: y and z end at 65535."""
    rows = torch.randn((1 << 16) + 3, 8, device=device)
    pairs = torch.arange(rows.shape[0], device=device)
    starts = torch.arange(rows.shape[0] + 1, device=device)
    assert torch.equal(combine(rows, pairs, starts), rows)


@pytest.mark.parametrize("width", [40, 48, 72, 96])
@pytest.mark.parametrize("model", [40, 72])
def test_11_widths_that_divide_no_block(width: int, model: int, device) -> None:
    """kernels-community #1153, stk #12: a tail overwrote the rows behind it."""
    p = Problem.draw([5, 0, 9], model=model, width=width, device=device)
    rows = torch.randn(14, model, device=device)
    for weight, transposed in ((p.first, False), (p.second, True)):
        given = rows
        out = ops.grouped_gemm(given, weight, p.offsets, transposed=transposed)
        parts = given.double().split(p.sizes)
        wide = weight.double() if transposed else weight.double().mT
        assert error(out, torch.cat([x @ w for x, w in zip(parts, wide, strict=True)])) <= 1e-6


def test_12_nothing_is_written_beside_the_result(device) -> None:
    """triton #10931: descriptor stores passed the inner extent. Ours are masked stores."""
    rows, weight = torch.randn(20, 24, device=device), torch.randn(2, 40, 24, device=device)
    offsets = offsets_of([3, 10]).to(device)
    tile = Tile(16, 32, 32, 2, 4)
    out = gemm(rows, weight, offsets, tile)
    assert torch.isfinite(out[:13]).all()
    # Poison stays where no expert has a row.
    assert out[13:].isnan().all()


# 13, descriptors are made on the host: no kernel of this package calls make_tensor_descriptor.


def test_13_no_kernel_makes_a_descriptor() -> None:
    """triton #10474: misaligned inside a pipelined loop."""
    folder = Path(backend.__file__).with_name("gpu")
    assert not [f.name for f in folder.glob("*.py") if "make_tensor_descriptor" in f.read_text()]


# 14, NaN, ties and many experts in the router: tests/kernels/test_router_kernel.py.
# 15 and 16, FP8 accumulation and padding: tests/kernels/test_fp8.py.


def test_17_few_rows_an_expert_take_smaller_tiles() -> None:
    """DeepGEMM #98: padding to 128 wastes a fifth at small groups."""
    few = tables.kind_of(rows=128 * 100, experts=128, width=1536)
    many = tables.kind_of(rows=128 * 1000, experts=128, width=1536)
    assert tables.BUILT_IN[f"gemm/{few}"].m < tables.BUILT_IN[f"gemm/{many}"].m


def test_18_blackwell_runs_no_kernel_unmeasured() -> None:
    """Liger #1294: Triton 3.7.1 miscompiled for sm_103, silently."""
    request = Request("experts", "cuda", torch.bfloat16, (4096, 1536), 1 << 17, 128, (10, 3))
    assert choose(request, table=Table()).backend == "torch_grouped_mm"


# 19, bf16 in the interpreter: tests/kernels/test_interpreter.py.


def test_20_strides_that_grouped_mm_refuses_are_not_given_to_it() -> None:
    """transformers #48644."""
    for dtype, width in ((torch.bfloat16, 60), (torch.bfloat16, 4), (torch.float32, 6)):
        assert why_not_grouped_mm(Request("gemm", "cpu", dtype, (width, 64), 8)) is not None
        rows, weight = torch.zeros(8, width, dtype=dtype), torch.zeros(1, 64, width, dtype=dtype)
        with pytest.raises(RuntimeError, match="strides should be multiple of 16"):
            torch.nn.functional.grouped_mm(rows, weight.mT, offs=torch.tensor([8]).int())


# 21, routing weights in the weight gradients with K > 1: `test_expert_kernels.py` shares rows among
# experts with weights that differ. 22, nothing is tuned at run time: case 9.
