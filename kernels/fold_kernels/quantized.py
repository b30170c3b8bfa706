"""Numbers in fp8 with a scale for every 128 of them: what quantisation makes and the products take.

Values are e4m3: 4 bits of exponent, 3 of mantissa, 448 at most, no Inf. A block's scale is its
largest magnitude over 448, so a block fills the range and no value has to be clipped.
"""

# Shapes.  R rows   e experts   N output width   K width that is summed over   b = 128

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
BLOCK = 128
LARGEST = 448.0
# A block below it, of zeros for example, is quantised as if it were this large: the inverse of its
# scale stays finite.
SMALLEST = 1e-30


@dataclass(frozen=True)
class Quantized:
    """A tensor in fp8, contiguous along the width that products sum over.

    A block with a NaN or an Inf is NaN whole, scale and values: nothing computed from it passes for
    a number.

    Attributes:
        values: e4m3, [R, K] of rows or [e, N, K] of weights.
        scales: fp32, one a block: [K / b, R] of rows, whose blocks are 1 x b, or
            [e, N / b, K / b] of weights, whose blocks are b x b. Those of consecutive rows lie
            together, since a product loads them so.
    """

    values: Tensor
    scales: Tensor
