"""Tokens: the routing decision, dispatch, the expert computation and the way back."""

from lightning_fold.moe.layer import FoldedExperts
from lightning_fold.moe.routing import Routing

__all__ = ["FoldedExperts", "Routing"]
