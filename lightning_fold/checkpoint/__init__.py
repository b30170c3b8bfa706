"""Checkpoints: names and shapes that belong to the user's model, and the files that hold them."""

from lightning_fold.checkpoint.canonical import Canonical
from lightning_fold.checkpoint.sharded import (
    MAPPING,
    is_sharded,
    live_optimizer_state,
    load_sharded,
    remove,
    save_sharded,
)

__all__ = [
    "MAPPING",
    "Canonical",
    "is_sharded",
    "live_optimizer_state",
    "load_sharded",
    "remove",
    "save_sharded",
]
