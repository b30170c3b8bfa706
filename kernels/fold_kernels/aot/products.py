"""The grouped products: their tiles, their variants, and a call of each.

Widths are multiples of 64, as in real models.
"""

# Shapes.  S source rows   R pairs in expert order   e experts   D model width
#          F expert width   O rows of the first weight: 2F gated, F not

from __future__ import annotations

from torch import Tensor

from fold_kernels.aot.case import BF16, FP32, INT32, INT64, Case, Op, meta
from fold_kernels.gpu import fp8_gemm
from fold_kernels.gpu.down_backward import down_backward
from fold_kernels.gpu.gates import GATES
from fold_kernels.gpu.gemm import gemm
from fold_kernels.gpu.up import up
from fold_kernels.gpu.wgrad import wgrad
from fold_kernels.quantized import BLOCK, FP8, Quantized
from fold_kernels.tables import BUILT_IN, CANDIDATES, Tile

EXPERTS, SOURCES, D, F = 8, 4096, 2048, 1024


def built_in(op: str) -> tuple[Tile, ...]:
    """Built-in tiles of an op, each once."""
    return tuple(dict.fromkeys(tile for key, tile in BUILT_IN.items() if key.startswith(f"{op}/")))


def _offsets() -> Tensor:
    return meta(EXPERTS + 1, dtype=INT32)


def _rows(gathered: bool, pairs: int, width: int) -> tuple[Tensor, Tensor | None]:
    """Rows, and where each pair's row is, if they are gathered."""
    if not gathered:
        return meta(pairs, width), None
    return meta(SOURCES, width), meta(pairs, dtype=INT64)


def _depth(gate: str) -> int:
    return 2 * F if GATES[gate].gated else F


def _up(case: Case, pairs: int) -> object:
    gate, *words = case.words
    source, origin_R = _rows("gather" in words, pairs, D)
    return up(
        source,
        meta(EXPERTS, _depth(gate), D),
        meta(pairs, dtype=FP32),
        _offsets(),
        case.cut,
        gate=gate,
        origin_R=origin_R,
        bias_eO=meta(EXPERTS, _depth(gate)) if "bias" in words else None,
    )


def _gemm(case: Case, pairs: int) -> object:
    transposed, biased = "NN" in case.words, "bias" in case.words
    return gemm(
        meta(pairs, F),
        meta(EXPERTS, F, D) if transposed else meta(EXPERTS, D, F),
        _offsets(),
        case.cut,
        transposed=transposed,
        bias_eN=meta(EXPERTS, D) if biased else None,
        scale_R=meta(pairs, dtype=FP32) if biased else None,
    )


def _down_backward(case: Case, pairs: int) -> object:
    gate, *words = case.words
    grad, origin_R = _rows("gather" in words, pairs, D)
    return down_backward(
        grad,
        meta(EXPERTS, D, F),
        meta(pairs, _depth(gate)),
        meta(pairs, dtype=FP32),
        _offsets(),
        case.cut,
        gate=gate,
        origin_R=origin_R,
    )


def _wgrad(case: Case, pairs: int) -> object:
    side = next((word for word in case.words if word in ("left", "right")), "")
    left, _ = _rows(side == "left", pairs, D)
    right, _ = _rows(side == "right", pairs, F)
    return wgrad(
        left,
        right,
        _offsets(),
        case.cut,
        origin_R=meta(pairs, dtype=INT64) if side else None,
        gather=side,
        into=meta(EXPERTS, D, F, dtype=FP32) if "accumulate" in case.words else None,
    )


def _fp8_gemm(case: Case, pairs: int) -> object:
    rows = Quantized(meta(pairs, F, dtype=FP8), meta(F // BLOCK, pairs, dtype=FP32))
    scales = meta(EXPERTS, D // BLOCK, F // BLOCK, dtype=FP32)
    weight = Quantized(meta(EXPERTS, D, F, dtype=FP8), scales)
    return fp8_gemm.fp8_gemm(rows, weight, _offsets(), case.cut, dtype=BF16)


def _up_bytes(case: Case) -> int:
    halves = 2 if GATES[case.words[0]].gated else 1
    return (case.cut.m + halves * case.cut.n) * case.cut.k * BF16.itemsize


def _gemm_bytes(case: Case) -> int:
    return (case.cut.m + case.cut.n) * case.cut.k * BF16.itemsize


def _fp8_gemm_bytes(case: Case) -> int:
    return (case.cut.m + case.cut.n) * case.cut.k * FP8.itemsize


def _wgrad_bytes(case: Case) -> int:
    return case.cut.m * (case.cut.n + case.cut.k) * BF16.itemsize


PRODUCTS = {
    "up": Op(
        "up_kernel",
        _up,
        (
            "clamped_swiglu gather bias",
            "swiglu gather",
            "swiglu",
            "geglu_tanh gather",
            "relu_squared gather",
        ),
        built_in("up"),
        CANDIDATES["up"],
        opcodes=("wgmma", "tma", "cp.async"),
        step_bytes=_up_bytes,
    ),
    "gemm": Op(
        "gemm_kernel",
        _gemm,
        ("NN", "NT", "NT bias"),
        built_in("gemm"),
        CANDIDATES["gemm"],
        opcodes=("wgmma", "tma"),
        step_bytes=_gemm_bytes,
    ),
    "down_backward": Op(
        "down_backward_kernel",
        _down_backward,
        (
            "clamped_swiglu gather",
            "swiglu gather",
            "swiglu",
            "geglu_tanh gather",
            "relu_squared gather",
        ),
        built_in("down_backward"),
        CANDIDATES["down_backward"],
        opcodes=("wgmma", "tma", "cp.async"),
        step_bytes=_gemm_bytes,
    ),
    "wgrad": Op(
        "wgrad_kernel",
        _wgrad,
        ("accumulate", ""),
        built_in("wgrad"),
        CANDIDATES["wgrad"],
        opcodes=("wgmma", "tma"),
        step_bytes=_wgrad_bytes,
    ),
    "wgrad_gather": Op(
        "wgrad_gather_kernel",
        _wgrad,
        ("left accumulate", "right accumulate", "left", "right"),
        built_in("wgrad"),
        CANDIDATES["wgrad"],
        opcodes=("wgmma", "cp.async"),
        step_bytes=_wgrad_bytes,
    ),
    "fp8_gemm": Op(
        "fp8_gemm_kernel",
        _fp8_gemm,
        built_in=(fp8_gemm.MANY, fp8_gemm.FEW),
        opcodes=("wgmma", "tma"),
        step_bytes=_fp8_gemm_bytes,
    ),
}
