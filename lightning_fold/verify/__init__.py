"""Equivalence with the plain single-process model: cases, reference, ranks, comparison, mutations.

The oracle is always the user's class in another process that never imports this package. Nothing
here is used in training. `verify` runs a user's own model; the rest is the suite of this package's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fold.verify.product import MappingResult, VerifyResult, verify

__all__ = ["MappingResult", "VerifyResult", "verify"]


def __getattr__(name: str) -> Any:
    # Not at once: `python -m` would find its own module imported already, and say so.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_fold.verify import product

    return getattr(product, name)
