"""Accesses past 2**31 elements, in a process of their own: a kernel of 32 bits ends it.

    python overflow.py rows experts combine gather wgrad up down fp8 quantize | broken
    python overflow.py fp8 | quantize

Virtual memory only: pages that nobody touches cost nothing.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from torch import Tensor

from fold_kernels.gpu.combine import combine, gather
from fold_kernels.gpu.down_backward import down_backward
from fold_kernels.gpu.fp8_gemm import INTERPRETED_TILE, fp8_gemm
from fold_kernels.gpu.gemm import gemm
from fold_kernels.gpu.quantize import quantize_rows
from fold_kernels.gpu.up import up
from fold_kernels.gpu.wgrad import wgrad
from fold_kernels.interpreter import install
from fold_kernels.quantized import FP8, Quantized
from fold_kernels.tables import Tile

# Wide rows: a tile map of 2**25 narrow ones would take the interpreter minutes.
WIDTH, LAST = 4096, 8
ROWS = (1 << 31) // WIDTH + 1024
TILE = Tile(16, 32, 32, stages=2, warps=4)


@triton.jit
def broken_kernel(source_ptr, out_ptr, first, WIDTH: tl.constexpr, LAST: tl.constexpr):
    row = first + tl.arange(0, LAST)
    column = tl.arange(0, WIDTH)
    value = tl.load(source_ptr + row[:, None] * WIDTH + column[None, :])
    tl.store(out_ptr + tl.arange(0, LAST)[:, None] * WIDTH + column[None, :], value)


def far_rows() -> Tensor:
    """Rows of which only the last exist."""
    rows = torch.empty(ROWS, WIDTH, dtype=torch.float16)
    rows[-LAST:] = torch.randn(LAST, WIDTH) * WIDTH**-0.5
    return rows


def offsets_to_the_end() -> Tensor:
    """One expert without rows up to the last ones, then one that has those."""
    return torch.tensor([ROWS - LAST, ROWS - LAST, ROWS], dtype=torch.int32)


def rows_case() -> tuple[Tensor, Tensor]:
    rows, weight = far_rows(), torch.randn(2, 32, WIDTH).half()
    out = gemm(rows, weight, offsets_to_the_end(), TILE)
    return out[-LAST:], rows[-LAST:].float() @ weight[1].float().T


def experts_case() -> tuple[Tensor, Tensor]:
    # One expert more than 2**31 elements hold, of which the last is used.
    experts = 1025
    weight = torch.empty(experts, 2048, 1024, dtype=torch.float16)
    weight[-1, :32] = torch.randn(32, 1024)
    rows = torch.randn(LAST, 1024).half()
    offsets = torch.zeros(experts + 1, dtype=torch.int32)
    offsets[-1] = LAST
    # One tile of columns: the others would touch what nobody wrote.
    narrow = weight.as_strided((experts, 32, 1024), (2048 * 1024, 1024, 1))
    out = gemm(rows, narrow, offsets, TILE)
    return out, rows.float() @ weight[-1, :32].float().T


def combine_case() -> tuple[Tensor, Tensor]:
    rows = far_rows()
    pairs = torch.arange(ROWS - LAST, ROWS)
    return combine(rows, pairs, torch.arange(LAST + 1)), rows[-LAST:]


def gather_case() -> tuple[Tensor, Tensor]:
    rows = far_rows()
    return gather(rows, torch.arange(ROWS - LAST, ROWS)), rows[-LAST:]


def wgrad_case() -> tuple[Tensor, Tensor]:
    rows, right = far_rows(), torch.empty(ROWS, 32, dtype=torch.float16)
    right[-LAST:] = torch.randn(LAST, 32)
    out = wgrad(right, rows, offsets_to_the_end(), TILE)
    return out[1], right[-LAST:].float().T @ rows[-LAST:].float()


def up_case() -> tuple[Tensor, Tensor]:
    rows, weight = far_rows(), torch.randn(1, 2 * 32, WIDTH).half()
    origin = torch.arange(ROWS - LAST, ROWS)
    offsets = torch.tensor([0, LAST], dtype=torch.int32)
    hidden, _ = up(rows, weight, torch.ones(LAST), offsets, TILE, gate="swiglu", origin_R=origin)
    return hidden, rows[-LAST:].float() @ weight[0].float().T


def down_case() -> tuple[Tensor, Tensor]:
    rows, weight = far_rows(), torch.randn(1, WIDTH, 32).half()
    origin = torch.arange(ROWS - LAST, ROWS)
    offsets = torch.tensor([0, LAST], dtype=torch.int32)
    hidden = torch.cat([torch.zeros(LAST, 32), torch.ones(LAST, 32)], 1).half()
    grads = down_backward(
        rows, weight, hidden, torch.ones(LAST), offsets, TILE, gate="swiglu", origin_R=origin
    )
    # silu(0) is 0 with slope one half.
    return grads[0][:, :32], rows[-LAST:].float() @ weight[0].float() * 0.5


def fp8_case() -> tuple[Tensor, Tensor]:
    # The result is what reaches far.
    values = torch.empty(ROWS, 128, dtype=FP8)
    values[-LAST:] = torch.randn(LAST, 128).to(FP8)
    weight = torch.randn(2, WIDTH, 128).to(FP8)
    rows = Quantized(values, torch.ones(1, ROWS))
    scaled = Quantized(weight, torch.ones(2, WIDTH // 128, 1))
    offsets = offsets_to_the_end()
    out = fp8_gemm(rows, scaled, offsets, INTERPRETED_TILE, dtype=torch.float16)
    return out[-LAST:], values[-LAST:].float() @ weight[1].float().T


def quantize_case() -> tuple[Tensor, Tensor]:
    far = torch.empty((1 << 31) + 128, dtype=torch.float16)
    far[-128:] = torch.linspace(-448, 448, 128)
    rows = quantize_rows(far.as_strided((3, 128), (1 << 30, 1)))
    return rows.values[2], far[-128:].to(FP8)


def broken_case() -> tuple[Tensor, Tensor]:
    rows, out = far_rows(), torch.zeros(LAST, WIDTH, dtype=torch.float16)
    broken_kernel[(1,)](rows, out, ROWS - LAST, WIDTH, LAST)
    return out, rows[-LAST:]


CASES = {
    "rows": rows_case,
    "experts": experts_case,
    "combine": combine_case,
    "gather": gather_case,
    "wgrad": wgrad_case,
    "up": up_case,
    "down": down_case,
    "fp8": fp8_case,
    "quantize": quantize_case,
    "broken": broken_case,
}


def main() -> None:
    install()
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        got, wanted = CASES[name]()
        torch.testing.assert_close(got.float(), wanted.float(), rtol=1e-2, atol=1e-2)
        print(name, "equal", flush=True)


if __name__ == "__main__":
    main()
