"""What the expert computation takes and gives back, as values; the forms of it share them."""

# Shapes.  S rows that arrived   R pairs of a row and an expert, in expert order
#          e local experts   O = 2F both halves of the first product   D model width
#          F expert width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fold_kernels.activation import Activation


@dataclass(frozen=True)
class Operands:
    """One call. All floating tensors but `weights_R` have the compute dtype.

    Attributes:
        source_SD: Rows, each once.
        weights_R: Routing weights, at least fp32.
        gate_up_eOD: First weights, gate half then up half.
        down_eDF: Second weights.
        origin_R: int64, row of `source_SD` of every pair.
        counts_e: int64, pairs per expert, on device.
        sizes: The same counts on the host.
        activation: Maps [R, O] to [R, F].
    """

    source_SD: Tensor
    weights_R: Tensor
    gate_up_eOD: Tensor
    down_eDF: Tensor
    origin_R: Tensor
    counts_e: Tensor
    sizes: Sequence[int]
    activation: Activation


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for; the routing weights' costs nothing and is always there.

    Those of the weights are not asked for where they are put off.
    """

    source: bool
    gate_up: bool
    down: bool


@dataclass(frozen=True)
class Gradients:
    """Gradients of `Operands`, in the compute dtype but for `weights_R`; None if not needed."""

    source_SD: Tensor | None
    weights_R: Tensor
    gate_up_eOD: Tensor | None
    down_eDF: Tensor | None


@dataclass(frozen=True)
class Factors:
    """What the weight gradients are products of; gathers are cheap and made again.

    Attributes:
        source_SD: Rows, each once.
        grad_SD: Gradient of the sums.
        grad_hidden_RO: Gradient of the first product; backward writes it.
        act_RF: Activation times routing weight; backward writes it.
        origin_R: int64, row of every pair.
        counts_e: int64, pairs per expert, on device.
        sizes: The same counts on the host.
    """

    source_SD: Tensor
    grad_SD: Tensor
    grad_hidden_RO: Tensor
    act_RF: Tensor
    origin_R: Tensor
    counts_e: Tensor
    sizes: Sequence[int]


def empty_factors(x: Operands, grad_SD: Tensor) -> Factors:
    """The factors of one call before its backward has written its own."""
    pairs = x.origin_R.shape[0]
    return Factors(
        x.source_SD,
        grad_SD,
        x.source_SD.new_empty(pairs, x.gate_up_eOD.shape[1]),
        x.source_SD.new_empty(pairs, x.down_eDF.shape[2]),
        x.origin_R,
        x.counts_e,
        x.sizes,
    )


def zero_sums(source_SD: Tensor) -> Tensor:
    """Zeros to add rows to, [S, D], at least fp32."""
    wide = torch.promote_types(source_SD.dtype, torch.float32)
    return torch.zeros_like(source_SD, dtype=wide, memory_format=torch.contiguous_format)
