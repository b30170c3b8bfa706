"""Distances between runs, in units of what training moved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def worst(run: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative distance over tensors, and the tensor that has it; names must be equal."""
    assert set(run) == set(reference), set(run) ^ set(reference)
    distances = [(_relative(run[n], reference[n], reference[n]), n) for n in reference]
    return max(distances)


def worst_move(run: dict[str, Any], reference: dict[str, Any]) -> tuple[float, str]:
    """As `worst` over "after", relative to how far the reference moved from "before".

    A tensor that the reference did not move must be equal.
    """
    after, target, before = run["after"], reference["after"], reference["before"]
    assert set(after) == set(target), set(after) ^ set(target)
    return max((_relative(after[n], target[n], target[n] - before[n]), n) for n in target)


def _relative(value: Tensor, target: Tensor, scale: Tensor) -> float:
    assert value.shape == target.shape
    assert value.dtype == target.dtype
    difference = float(torch.linalg.vector_norm((value - target).double()))
    return difference / max(float(torch.linalg.vector_norm(scale.double())), 1e-30)
