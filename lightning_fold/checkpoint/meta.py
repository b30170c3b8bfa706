"""What a checkpoint holds beside tensors: primitives only, so that reading it executes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

OWN = "lightning_fold"
"""Key of this package's entries in a checkpoint."""

_PRIMITIVES: tuple[type[Any], ...] = (bool, int, float, str, bytes)


def primitive(value: Any, where: str, replaced: list[str]) -> Any:
    """`value` in primitives and tensors; what is neither is stored as text.

    Args:
        value: Nested dictionaries, lists and tuples.
        where: Its place, for `replaced`.
        replaced: Receives the places that were stored as text.
    """
    if isinstance(value, Mapping):
        return {key: primitive(item, f"{where}.{key}", replaced) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [primitive(item, f"{where}[{i}]", replaced) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, Tensor):
        return value
    for kind in _PRIMITIVES:
        if isinstance(value, kind):
            # Not as it is: a numpy scalar is a float, and weights_only=True refuses its class.
            return kind(value)
    replaced.append(where.lstrip("."))
    return str(value)
