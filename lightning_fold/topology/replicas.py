"""Make ranks that must agree agree: initial weights, and the random numbers of token owners.

A user's module is built on every rank on its own. Rank 0's weights win, as under Lightning's DDP,
so an unseeded script trains one model. Runs before anything is sharded; afterwards no rank's
tensors are the truth for another.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_fold.topology.comm import Comm

_STRIDE = 0x9E3779B97F4A7C15


def sync_module_states(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks. Collective, before sharding."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, src=0)


def seed_token_owners(comm: Comm) -> None:
    """Give dp and cp ranks different random numbers and tp peers the same. Collective.

    The first owner keeps rank 0's generator, so a run with dp = cp = 1 draws what a single device
    draws.
    """
    device = comm.meshes.attention.device_type
    state = torch.get_rng_state().to(device)
    seed = torch.tensor(torch.initial_seed() % 2**63, device=device)
    dist.broadcast(state, src=0)
    dist.broadcast(seed, src=0)
    torch.set_rng_state(state.cpu())
    owner = comm.rank("dp_cp")
    if owner > 0:
        torch.manual_seed((int(seed) + owner * _STRIDE) % 2**63)
    elif device == "cuda":
        torch.cuda.manual_seed(int(seed))
