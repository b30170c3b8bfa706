"""Transformer Engine's grouped GEMM, behind an import that may fail in any way.

An optional extra that needs a GPU and cuDNN; without them its import raises RuntimeError or
FileNotFoundError rather than ImportError. Nothing here has run on a GPU.
"""

# Shapes.  R rows in expert order   e experts   I input width   O output width

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def te_obstacle() -> str | None:
    """Why Transformer Engine cannot be used; None when it can."""
    try:
        import transformer_engine.pytorch as te
    # It raises what its parts raise: RuntimeError without cuDNN, FileNotFoundError without a build.
    except Exception as error:
        return f"transformer_engine.pytorch cannot be imported: {type(error).__name__}: {error}"
    return None if hasattr(te, "GroupedLinear") else "its transformer_engine has no GroupedLinear"


@cache
def _linear(experts: int, in_width: int, out_width: int, dtype: torch.dtype) -> Any:
    """A module without storage; the weights of every call are handed in."""
    import transformer_engine.pytorch as te

    return te.GroupedLinear(
        experts, in_width, out_width, bias=False, params_dtype=dtype, device="meta"
    )


def te_grouped_gemm(rows_RI: Tensor, weight_eOI: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each group of rows times the transpose of its weight, [R, O], with autograd.

    Args:
        rows_RI: Rows in expert order.
        weight_eOI: One weight an expert.
        sizes: Rows of each expert; Transformer Engine takes them as a tensor on the host.
    """
    experts, out_width, in_width = weight_eOI.shape
    module = _linear(experts, in_width, out_width, rows_RI.dtype)
    weights = {f"weight{e}": weight for e, weight in enumerate(weight_eOI.unbind())}
    splits = torch.tensor(list(sizes))
    out: Tensor = torch.func.functional_call(module, weights, (rows_RI, splits))
    return out


def te_weight_gradient(grad_RO: Tensor, rows_RI: Tensor, sizes: Sequence[int]) -> Tensor:
    """Gradient of `te_grouped_gemm` to its weights, [e, O, I]: its own backward, alone."""
    with torch.enable_grad():
        shape = len(sizes), grad_RO.shape[1], rows_RI.shape[1]
        # The product is linear in its weights: any value gives the same gradient.
        weight = rows_RI.new_zeros(shape).requires_grad_()
        out = te_grouped_gemm(rows_RI.detach(), weight, sizes)
        (grad,) = torch.autograd.grad(out, weight, grad_RO)
    return grad
