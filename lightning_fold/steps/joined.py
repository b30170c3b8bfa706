"""What a step returned for the microbatches of a batch, as one value for the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def joined(parts: Sequence[Any]) -> Any:
    """Join what a step returned for each microbatch, in order.

    Tensors with rows are concatenated, scalars stacked, lists put one after the other, mappings and
    tuples joined item by item; of anything else there is a list.
    """
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.dim() else torch.stack(list(parts))
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list):
        return [item for part in parts for item in part]
    if isinstance(first, tuple):
        items = [joined([part[i] for part in parts]) for i in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    return list(parts)
