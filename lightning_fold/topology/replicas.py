"""Make ranks that must agree agree: initial weights, and the random numbers of token owners.

A user's module is built on every rank on its own. Rank 0's weights win, as under Lightning's DDP,
so an unseeded script trains one model. Runs before anything is sharded; afterwards no rank's
tensors are the truth for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_fold.topology.comm import Comm

_STRIDE = 0x9E3779B97F4A7C15


def sync_module_states(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks. Collective, before sharding."""
    with torch.no_grad():
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
    sync_buffers(module)


def sync_buffers(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Copy the first rank's buffers to all ranks: those of a model without whole parameters.

    Collective over `group`, whose ranks hold the same buffers; None is all ranks.
    """
    source = 0 if group is None else dist.get_global_rank(group, 0)
    with torch.no_grad():
        for buffer in module.buffers():
            dist.broadcast(buffer.data, src=source, group=group)


def seed_token_owners(comm: Comm) -> None:
    """Give dp ranks different random numbers, and the peers of one the same. Collective.

    Peers over tp and cp compute one batch together; where they own different tokens of it, inside
    the model, `model.token_rng` tells them apart. The first dp rank keeps rank 0's generator, so a
    run with dp = 1 draws what a single device draws.
    """
    device = comm.meshes.attention.device_type
    state = torch.get_rng_state().to(device)
    seed = torch.tensor(torch.initial_seed() % 2**63, device=device)
    dist.broadcast(state, src=0)
    dist.broadcast(seed, src=0)
    torch.set_rng_state(state.cpu())
    owner = comm.rank("dp")
    if owner > 0:
        torch.manual_seed((int(seed) + owner * _STRIDE) % 2**63)
    elif device == "cuda":
        torch.cuda.manual_seed(int(seed))


def gather_random_states(mapping: str) -> dict[str, Any]:
    """The generators of all ranks, for a checkpoint. Collective over all ranks.

    Args:
        mapping: Mapping id; under another one the ranks draw other numbers anyway.
    """
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        own["cuda"] = torch.cuda.get_rng_state()
    states: list[Any] = [own]
    if dist.get_world_size() > 1:
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, own)
    return {"mapping": mapping, "states": states}


def restore_random_state(saved: Mapping[str, Any] | None, mapping: str) -> None:
    """Go on with the random numbers of a checkpoint that the same mapping wrote. Local."""
    if saved is None or saved["mapping"] != mapping:
        return
    own = saved["states"][dist.get_rank()]
    torch.set_rng_state(own["cpu"])
    if "cuda" in own and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(own["cuda"])
