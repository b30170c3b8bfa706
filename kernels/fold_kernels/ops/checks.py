"""What entries ask of their arguments, each refusal naming the op and the argument.

Shapes and dtypes alone: what indices and offsets hold lies on the device, and reading it would be a
synchronisation. An index outside of its range, or offsets that fall, are undefined behaviour.
Small arguments come back contiguous, as kernels address them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = (torch.int32, torch.int64)


def matrix(op: str, name: str, x: Tensor, *, width: int | None = None) -> None:
    """Refuse what is not [rows, width]."""
    if x.dim() != 2 or (width is not None and x.shape[1] != width):
        wanted = "[rows, width]" if width is None else f"[rows, {width}]"
        raise _refuse(op, name, tuple(x.shape), wanted)


def weights_of(op: str, name: str, x: Tensor, like: Tensor) -> None:
    """Refuse what is not one matrix an expert, in the dtype of the rows."""
    if x.dim() != 3:
        raise _refuse(op, name, tuple(x.shape), "[experts, rows, columns]")
    if x.dtype != like.dtype:
        raise _refuse(op, name, x.dtype, f"{like.dtype}, the dtype of the rows")


def offsets(op: str, x: Tensor, experts: int | None = None) -> Tensor:
    """Where each expert's rows begin, int32."""
    fits = x.dim() == 1 and x.shape[0] > 0 and (experts is None or x.shape[0] == experts + 1)
    if not fits:
        count = "one more than experts" if experts is None else f"{experts} + 1"
        raise _refuse(op, "offsets_e1", tuple(x.shape), f"[{count}]")
    if x.dtype not in _INTEGERS:
        raise _refuse(op, "offsets_e1", x.dtype, "int32")
    return x.to(torch.int32).contiguous()


def indices(op: str, name: str, x: Tensor, length: int | None = None) -> Tensor:
    """One place for each of some rows, int64."""
    if x.dim() != 1 or (length is not None and x.shape[0] != length):
        raise _refuse(op, name, tuple(x.shape), "1-D" if length is None else f"[{length}]")
    if x.dtype not in _INTEGERS:
        raise _refuse(op, name, x.dtype, "int64")
    return x.long().contiguous()


def factors(op: str, name: str, x: Tensor, length: int) -> Tensor:
    """One number for each of some rows."""
    if x.shape != (length,):
        raise _refuse(op, name, tuple(x.shape), f"[{length}]")
    return x.contiguous()


def biases(op: str, name: str, x: Tensor, experts: int, width: int) -> Tensor:
    """One row an expert."""
    if x.shape != (experts, width):
        raise _refuse(op, name, tuple(x.shape), f"[{experts}, {width}]")
    return x.contiguous()


def _refuse(op: str, name: str, found: object, wanted: str) -> ValueError:
    return ValueError(f"{op}: {name} is {found} and must be {wanted}. Change `{name}`.")
