"""Which form of an op runs: one pure function of dtype, sizes and device."""

from __future__ import annotations

from typing import Literal

import torch

Backend = Literal["torch_grouped_mm", "loop"]
Form = Literal["loop", "grouped"]

# torch 2.13 refuses other dtypes, and strides that are no multiple of 16 bytes.
GROUPED_MM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT_BYTES = 16


def choose_grouped_gemm(
    dtype: torch.dtype, *, in_width: int, out_width: int, device_type: str
) -> Backend:
    """Backend of a grouped GEMM whose rows have `in_width` and `out_width` elements.

    On CUDA only bf16 is served by `torch.nn.functional.grouped_mm`. The loop serves everything.
    """
    served = GROUPED_MM_DTYPES if device_type == "cpu" else (torch.bfloat16,)
    if dtype not in served:
        return "loop"
    aligned = all(width * dtype.itemsize % ALIGNMENT_BYTES == 0 for width in (in_width, out_width))
    return "torch_grouped_mm" if aligned and min(in_width, out_width) > 0 else "loop"


def choose_experts(device_type: str) -> Form:
    """Form of the expert computation: `loop` in batches of experts, or `grouped`, all at once.

    On a CPU both take the same time for 8 to 64 experts (`benchmarks/moe_layer.py`'s shapes), and
    the loop holds the rows of one batch instead of all, several times. On a GPU a call costs more
    than a small product; that side is reasoned, not measured.
    """
    return "loop" if device_type == "cpu" else "grouped"
