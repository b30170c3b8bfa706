"""Parameters: families, the table of gradient sums, sharding over data axes, the gradient norm."""

from lightning_fold.params.clip import clip_by_norm, clip_by_value, gradient_norm
from lightning_fold.params.families import Family, assign_families, reduce_axes
from lightning_fold.params.shard import (
    hold_back,
    mesh_axis,
    reduce_held,
    reshard,
    shard_over_data,
)
from lightning_fold.params.storage import local_tensor, with_local

__all__ = [
    "Family",
    "assign_families",
    "clip_by_norm",
    "clip_by_value",
    "gradient_norm",
    "hold_back",
    "local_tensor",
    "mesh_axis",
    "reduce_axes",
    "reduce_held",
    "reshard",
    "shard_over_data",
    "with_local",
]
