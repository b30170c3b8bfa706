"""One gradient norm over all meshes, and clipping by it.

Every element is counted once: a rank's sum of squares is divided by the number of ranks that hold
the same shard. torch's `clip_grad_norm_` raises when gradients live on two meshes, and would give
every rank its own norm otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_fold.params.storage import local_tensor


def gradient_norm(params: Iterable[nn.Parameter], *, device: torch.device) -> Tensor:
    """Two-norm of all gradients of all ranks, fp64. Collective, also without gradients.

    Args:
        params: This rank's parameters; those without a gradient are skipped.
        device: Device of the result.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for param in params:
        if param.grad is not None:
            local = local_tensor(param.grad)
            # dtype= accumulates in fp64 without a whole fp64 copy of the gradient.
            square = torch.linalg.vector_norm(local, dtype=torch.float64).square()
            total += square.to(device) / copies(param.grad)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


def clip_by_norm(
    params: Iterable[nn.Parameter],
    max_norm: float,
    *,
    device: torch.device,
    twins: Collection[int] = (),
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

    Collective over all ranks.

    Args:
        params: This rank's parameters.
        max_norm: The bound.
        device: Device of the result.
        twins: Ids of parameters whose gradient another pipeline stage holds, and counts, too.
    """
    params = list(params)
    norm = gradient_norm([p for p in params if id(p) not in twins], device=device)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            local_tensor(param.grad).mul_(scale.to(param.grad.dtype))
    return norm


def clip_by_value(params: Iterable[nn.Parameter], max_value: float) -> None:
    """Clamp every gradient element to [-max_value, max_value]. Local."""
    for param in params:
        if param.grad is not None:
            local_tensor(param.grad).clamp_(-max_value, max_value)


def copies(grad: Tensor) -> int:
    """Number of ranks that hold the same shard of `grad`."""
    if not isinstance(grad, DTensor):
        return 1
    mesh = grad.device_mesh
    return math.prod(
        mesh.size(i) for i, p in enumerate(grad.placements) if isinstance(p, Replicate)
    )
