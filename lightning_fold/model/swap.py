"""Take over experts containers: their weights move to (ep, etp), their forward dispatches.

The container object, its parameter names and the model's router stay. The live first projection
is [E, 2, F, D] with plain shards on dimensions 0 and 2: a strided shard of [E, 2F, D] would be
loaded silently wrong by DCP.
"""

# Shapes.  E all experts   D model width   F expert width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_fold.model.inspect import ExpertsSpec
from lightning_fold.moe.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from lightning_fold.moe.layer import FoldedExperts
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.topology.comm import Comm


def swap_experts(
    specs: Sequence[ExpertsSpec], *, comm: Comm, dispatcher: str, tokens: RunningTokens
) -> set[str]:
    """Fold every container that can be folded.

    Args:
        specs: Containers; one that cannot be folded stays as it is (the doctor has seen to ep =
            etp = 1).
        comm: Collectives.
        dispatcher: "auto", "local" or "all_to_all".
        tokens: Which tokens the layers see.

    Returns:
        Names of the parameters whose live shape is [E, 2, F, D].
    """
    folded = [spec for spec in specs if spec.refusal is None]
    for spec in folded:
        _fold(spec, comm, dispatcher, tokens)
    return {f"{spec.name}.gate_up_proj" for spec in folded}


def choose_dispatcher(name: str, comm: Comm) -> Dispatcher[Any]:
    """The dispatcher that serves the degrees; "auto" is local where experts are whole."""
    alone = comm.size("ep") * comm.size("etp") == 1
    if name == "local" and not alone:
        raise ValueError(
            f"dispatcher='local' moves no tokens, but expert_parallel_size={comm.size('ep')} and "
            f"expert_tensor_parallel_size={comm.size('etp')} spread the experts. Legal: 'auto', "
            f"'all_to_all'. Change `dispatcher`."
        )
    if name == "local" or (name == "auto" and alone):
        return LocalDispatcher(comm)
    return AllToAllDispatcher(comm)


def shard_parameter(
    param: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Shard]
) -> nn.Parameter:
    """This rank's shard of a parameter that every rank has, whole or on meta. Sends nothing."""
    local: Tensor = param.detach()
    for axis, placement in enumerate(placements):
        # torch.chunk, as DTensor does: an uneven vocabulary gets uneven shards, possibly empty
        # ones.
        chunks = local.chunk(mesh.size(axis), placement.dim)
        rank = mesh.get_local_rank(axis)
        empty = local.narrow(placement.dim, 0, 0)
        local = chunks[rank] if rank < len(chunks) else empty
    # A clone, because a view would keep the whole parameter in memory.
    shard = DTensor.from_local(
        local.clone(),
        mesh,
        placements,
        run_check=False,
        shape=param.shape,
        stride=param.detach().contiguous().stride(),
    )
    return nn.Parameter(shard, requires_grad=param.requires_grad)


def _fold(spec: ExpertsSpec, comm: Comm, dispatcher: str, tokens: RunningTokens) -> None:
    module: Any = spec.module
    gate_up, down = module.gate_up_proj, module.down_proj
    halves = nn.Parameter(gate_up.detach().unflatten(1, (2, -1)), gate_up.requires_grad)
    if comm.size("ep") * comm.size("etp") > 1:
        mesh = comm.meshes.moe["ep", "etp"]
        halves = shard_parameter(halves, mesh, [Shard(0), Shard(2)])
        down = shard_parameter(down, mesh, [Shard(0), Shard(2)])
    module.gate_up_proj, module.down_proj = halves, down
    module.forward = FoldedExperts(
        module,
        name=spec.name,
        num_experts=spec.num_experts,
        dispatcher=choose_dispatcher(dispatcher, comm),
        activation=spec.activation,
        telemetry=comm.telemetry,
        tokens=tokens,
    )
