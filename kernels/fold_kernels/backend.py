"""Which form of an op runs: pure functions of dtype, sizes, device and what was measured.

    triton             kernels of `fold_kernels.gpu`; only where a table says that they were timed
                       on this kind of GPU and are not slower than what they replace; products in
                       fp8 replace an emulation, and ask for no measurement
    torch_grouped_mm   `torch.nn.functional.grouped_mm`
    te                 Transformer Engine's `GroupedLinear`; only when forced
    loop               a product an expert; serves everything

`LIGHTNING_FOLD_MOE_BACKEND` forces one; what it cannot serve is refused, not replaced. The choice
is a function of what all ranks know, and is logged once with its reason. No other file of this
package reads the environment.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, get_args

import torch

from fold_kernels.measured import Table, table_of
from fold_kernels.quantized import FP8
from fold_kernels.tables import kind_of

Backend = Literal["triton", "torch_grouped_mm", "te", "loop"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
FORCE_VARIABLE, TILES_VARIABLE = "LIGHTNING_FOLD_MOE_BACKEND", "LIGHTNING_FOLD_TILES"

# torch 2.13 refuses other dtypes, and strides that are no multiple of 16 bytes.
GROUPED_MM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT_BYTES = 16
# A pointer or stride that 16 does not divide costs Triton its asynchronous copies.
TRITON_MULTIPLE = 16
TRITON_CAPABILITY = (9, 0)
TRITON_DTYPES = (torch.bfloat16, torch.float16, FP8)
# An expert is packed into 11 bits beside its tile.
TRITON_EXPERTS = 2047

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What a choice depends on.

    Attributes:
        op: Name of the op, as tables spell it.
        device_type: `cpu` or `cuda`.
        dtype: Of the rows.
        widths: Of rows and results, in elements.
        rows: How many.
        experts: How many of them.
        capability: Of the GPU; None elsewhere.
        obstacle: What the caller knows against Triton, such as an activation without a kernel.
        dtypes: Of rows that the kernel takes on a GPU.
    """

    op: str
    device_type: str
    dtype: torch.dtype
    widths: tuple[int, ...] = ()
    rows: int = 0
    experts: int = 1
    capability: tuple[int, int] | None = None
    obstacle: str | None = None
    dtypes: tuple[torch.dtype, ...] = TRITON_DTYPES

    @classmethod
    def of(
        cls, op: str, tensor: torch.Tensor, /, widths: Sequence[int] = (), **others: Any
    ) -> Request:
        """A call on some rows; what `others` name takes the place of what they say."""
        said = {
            "device_type": tensor.device.type,
            "dtype": tensor.dtype,
            "rows": tensor.shape[0],
            "capability": capability_of(tensor.device),
        }
        return cls(op, widths=tuple(widths), **{**said, **others})


@dataclass(frozen=True)
class Choice:
    """A backend and why."""

    backend: Backend
    reason: str


def choose(
    request: Request,
    *,
    forced: str | None = None,
    table: Table | None = None,
    interpreted: bool = False,
) -> Choice:
    """Choose the form of `request`.

    Args:
        request: The call.
        forced: Backend that the user asks for.
        table: What was measured on this kind of GPU.
        interpreted: Whether Triton runs in its interpreter, which takes CPU tensors and fp32.

    Raises:
        ValueError: `forced` is no backend, or cannot serve the call.
    """
    if forced:
        return _forced(request, forced, interpreted)
    if request.dtype == FP8:
        return _choose_fp8(request)
    obstacle = why_not_triton(request, interpreted=False) or _why_not_worth_it(request, table)
    if obstacle is None:
        return Choice("triton", "measured on this kind of GPU")
    obstacle_of_torch = why_not_grouped_mm(request)
    if request.device_type == "cpu":
        return Choice("loop", "on a CPU it takes the time of grouped_mm and less memory")
    if obstacle_of_torch is None:
        return Choice("torch_grouped_mm", f"no triton: {obstacle}")
    return Choice("loop", f"no triton: {obstacle}; no grouped_mm: {obstacle_of_torch}")


def why_not_triton(request: Request, *, interpreted: bool) -> str | None:
    """What keeps the kernels from serving a call; None when nothing does."""
    if not has_triton():
        return "triton is not installed"
    if request.obstacle is not None:
        return request.obstacle
    if request.experts > TRITON_EXPERTS:
        return f"{request.experts} experts are more than {TRITON_EXPERTS}"
    if request.rows >= 1 << 31:
        return f"{request.rows} rows are not below 2**31"
    if not interpreted:
        return _why_not_on_gpu(request)
    served = (*request.dtypes, torch.float32)
    if request.dtype not in served:
        return _no_dtype(request)
    # The interpreter copies anything, but descriptors check their strides there as well.
    return _why_not_aligned(request)


def _why_not_aligned(request: Request, *, takes_empty: bool = True) -> str | None:
    size = request.dtype.itemsize
    odd = [w for w in request.widths if w * size % ALIGNMENT_BYTES or (w == 0 and not takes_empty)]
    return f"rows of {odd} elements are no multiples of {ALIGNMENT_BYTES} bytes" if odd else None


def _why_not_on_gpu(request: Request) -> str | None:
    if request.device_type != "cuda":
        return f"tensors are on {request.device_type}"
    if request.dtype not in request.dtypes:
        return _no_dtype(request)
    if request.capability is None or request.capability < TRITON_CAPABILITY:
        return f"capability {request.capability} is below {TRITON_CAPABILITY}"
    odd = [width for width in request.widths if width % TRITON_MULTIPLE]
    return f"widths {odd} are no multiples of {TRITON_MULTIPLE}" if odd else None


def why_not_grouped_mm(request: Request) -> str | None:
    """What keeps `torch.nn.functional.grouped_mm` from serving a call."""
    # On CUDA torch documents bf16 alone.
    served = GROUPED_MM_DTYPES if request.device_type == "cpu" else (torch.bfloat16,)
    if request.dtype not in served:
        return _no_dtype(request)
    return _why_not_aligned(request, takes_empty=False)


def why_not_te(request: Request) -> str | None:
    """What keeps Transformer Engine from serving a call."""
    from fold_kernels.te import te_obstacle

    if request.device_type != "cuda":
        return f"tensors are on {request.device_type}"
    return _no_dtype(request) if request.dtype == FP8 else te_obstacle()


def choose_for(tensor: torch.Tensor, request: Request) -> Choice:
    """`choose` with what this process was told, logged once."""
    forced, table = forced_backend(), table_for(tensor.device)
    choice = choose(request, forced=forced, table=table, interpreted=is_interpreted())
    _log_once(request.op, choice)
    return choice


def runs_triton(tensor: torch.Tensor, op: str, **others: Any) -> bool:
    """Whether an op around the products runs as a kernel; every one has a plain form beside it.

    Args:
        tensor: Its rows.
        op: Its name.
        others: What else a `Request` says, such as an obstacle.
    """
    forced, interpreted = forced_backend(), is_interpreted()
    # The common case of a CPU asks nothing else.
    if (tensor.device.type == "cpu" and not interpreted) or forced not in (None, "triton"):
        return False
    request = Request.of(op, tensor, **others)
    if why_not_triton(request, interpreted=interpreted) is not None:
        return False
    return forced == "triton" or _why_not_worth_it(request, table_for(tensor.device)) is None


def grouped_mm_serves(rows: torch.Tensor, in_width: int, out_width: int) -> bool:
    """Whether a grouped GEMM runs as `torch.nn.functional.grouped_mm`, not as a loop."""
    request = Request.of("gemm", rows, (in_width, out_width))
    # grouped_mm accepts no empty operand; the loop keeps the graph alive without rows.
    return rows.shape[0] > 0 and forced_backend() != "loop" and why_not_grouped_mm(request) is None


@cache
def has_triton() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels; it reads the same variable at its import."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def forced_backend() -> str | None:
    """The backend that the user asks for."""
    return os.environ.get(FORCE_VARIABLE) or None


@lru_cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@lru_cache
def _log_once(op: str, choice: Choice) -> None:
    _log.info("%s: %s (%s)", op, choice.backend, choice.reason)


@lru_cache
def table_for(device: torch.device) -> Table:
    """What was measured on this kind of GPU."""
    return table_of(capability_of(device), os.environ.get(TILES_VARIABLE) or None)


def _choose_fp8(request: Request) -> Choice:
    # No measurement is asked for: what a kernel replaces is an emulation in fp32.
    obstacle = why_not_triton(request, interpreted=False)
    if obstacle is None:
        return Choice("triton", "nothing else multiplies fp8")
    return Choice("loop", f"emulated in fp32; no triton: {obstacle}")


def _forced(request: Request, forced: str, interpreted: bool) -> Choice:
    if forced not in BACKENDS:
        raise ValueError(
            f"{FORCE_VARIABLE}={forced!r} must be one of {', '.join(BACKENDS)}. Change or unset it."
        )
    obstacle = {
        "triton": lambda: why_not_triton(request, interpreted=interpreted),
        "torch_grouped_mm": lambda: why_not_grouped_mm(request),
        "te": lambda: why_not_te(request),
        "loop": lambda: None,
    }[forced]()
    if obstacle is not None:
        raise ValueError(
            f"{FORCE_VARIABLE}={forced} cannot serve {request.op}: {obstacle}. Change or unset it."
        )
    backend = next(name for name in BACKENDS if name == forced)
    return Choice(backend, f"{FORCE_VARIABLE} forces it")


def _why_not_worth_it(request: Request, table: Table | None) -> str | None:
    """What is known, or unknown, about the speed of the kernels."""
    width = request.widths[-1] if request.widths else 0
    kind = kind_of(rows=request.rows, experts=request.experts, width=width)
    gain = None if table is None else table.gain_of(request.op, kind)
    if gain is None:
        return "never timed on this GPU, see `lightning-fold tune`"
    return None if gain >= 1.0 else f"{gain:.2f} of the speed of what it replaces"


def _no_dtype(request: Request) -> str:
    return f"it has no form for {request.dtype} on {request.device_type}"
