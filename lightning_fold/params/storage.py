"""A DTensor is storage, the math runs on local tensors: the way from one to the other and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Any) -> Tensor:
    """This rank's shard; a plain tensor is whole.

    The gradient of a parameter's shard becomes a DTensor with the parameter's placements.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """`local` as this rank's shard of a tensor with the global shape and placements of `like`.

    A plain `like` has none: `local` is then returned as it is. Sends nothing.
    """
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
