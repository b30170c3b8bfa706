"""Checkpoints: names and shapes that belong to the user's model, and the files that hold them."""

from lightning_fold.checkpoint.canonical import Canonical
from lightning_fold.checkpoint.meta import OWN
from lightning_fold.checkpoint.optimizer_state import named_state
from lightning_fold.checkpoint.peers import CheckpointError, Peers
from lightning_fold.checkpoint.stages import Stages
from lightning_fold.checkpoint.store import CheckpointStore
from lightning_fold.checkpoint.whole import WholeModel

__all__ = [
    "OWN",
    "Canonical",
    "CheckpointError",
    "CheckpointStore",
    "Peers",
    "Stages",
    "WholeModel",
    "named_state",
]
