"""Context parallelism: cp ranks share the places of a sequence, attention sees all of them."""

from lightning_fold.model.context.check import check_context
from lightning_fold.model.context.parallel import ContextParallel

__all__ = ["ContextParallel", "check_context"]
