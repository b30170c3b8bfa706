"""Take over experts containers: their weights move to (ep, etp), their forward dispatches.

The container object, its parameter names and the model's router stay. The live first projection
is [E, 2, F, D] with plain shards on dimensions 0 and 2: a strided shard of [E, 2F, D] would be
loaded silently wrong by DCP.
"""

# Shapes.  E all experts   D model width   F expert width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fold_kernels.expert_forms import Precision
from lightning_fold.model.inspect import ExpertsSpec
from lightning_fold.model.token_rng import has_randomness
from lightning_fold.moe.capacity import Capacity
from lightning_fold.moe.dispatch import choose_dispatcher
from lightning_fold.moe.layer import FoldedExperts
from lightning_fold.moe.shared import SharedBeside
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.topology.comm import Comm


class SharedBlock(NamedTuple):
    """A MoE block and its shared experts."""

    block: nn.Module
    experts: nn.Module


@dataclass(frozen=True)
class _Plan:
    """What all layers share."""

    dispatcher: str
    tokens: RunningTokens
    capacity: Capacity | None
    shared: Mapping[str, SharedBlock]
    precision: Precision

    def beside(self, name: str, comm: Comm) -> SharedBeside | None:
        found = self.shared.get(name.rpartition(".")[0])
        # Without peers nothing is on the wire.
        if found is None or comm.size("ep") * comm.size("etp") == 1:
            return None
        return SharedBeside(found.block, found.experts, self.tokens)


def swap_experts(
    specs: Sequence[ExpertsSpec],
    *,
    comm: Comm,
    dispatcher: str,
    tokens: RunningTokens,
    layer_comms: Mapping[str, Comm] | None = None,
    capacity: Capacity | None = None,
    shared: Mapping[str, SharedBlock] | None = None,
    precision: Precision = "bf16",
) -> set[str]:
    """Fold every container that can be folded.

    Args:
        specs: Containers; one that cannot be folded stays as it is (the doctor has seen to ep =
            etp = 1).
        comm: Collectives.
        dispatcher: See `FoldedConfig.dispatcher`.
        tokens: Which tokens the layers see.
        layer_comms: Collectives of containers with their own folding, by name.
        capacity: What an expert takes; None is all.
        shared: From `shared_blocks`.
        precision: See `FoldedConfig.expert_precision`; what it cannot serve is refused before.

    Returns:
        Names of the parameters whose live shape is [E, 2, F, D].
    """
    folded = [spec for spec in specs if spec.refusal is None]
    plan = _Plan(dispatcher, tokens, capacity, shared or {}, precision)
    own = layer_comms or {}
    for spec in folded:
        _fold(spec, own.get(spec.name, comm), plan)
    return {f"{spec.name}.gate_up_proj" for spec in folded}


def shared_blocks(root: nn.Module, shared: Sequence[str]) -> dict[str, SharedBlock]:
    """Blocks with one module of shared experts, by the blocks' names.

    Args:
        root: The names start here.
        shared: Names of shared experts and their gates.
    """
    found: dict[str, list[nn.Module]] = {}
    for name in shared:
        parent, _, child = name.rpartition(".")
        module = root.get_submodule(name)
        if "gate" not in child and any(True for _ in module.parameters()):
            found.setdefault(parent, []).append(module)
    return {
        name: SharedBlock(root.get_submodule(name), modules[0])
        for name, modules in found.items()
        # Dropout drawn early, and once more where the early result does not serve, would differ.
        if len(modules) == 1 and not has_randomness(modules[0])
    }


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


def _fold(spec: ExpertsSpec, comm: Comm, plan: _Plan) -> None:
    module: Any = spec.module
    gate_up, down = module.gate_up_proj, module.down_proj
    halves = nn.Parameter(gate_up.detach().unflatten(1, (2, -1)), gate_up.requires_grad)
    if comm.size("ep") * comm.size("etp") > 1:
        mesh = comm.meshes.moe["ep", "etp"]
        halves = shard_parameter(halves, mesh, [Shard(0), Shard(2)])
        down = shard_parameter(down, mesh, [Shard(0), Shard(2)])
    module.gate_up_proj, module.down_proj = halves, down
    capacity = plan.capacity
    dispatcher = choose_dispatcher(plan.dispatcher, comm, pads=bool(capacity and capacity.pad))
    module.forward = FoldedExperts(
        module,
        name=spec.name,
        num_experts=spec.num_experts,
        dispatcher=dispatcher,
        activation=spec.activation,
        telemetry=comm.telemetry,
        tokens=plan.tokens,
        capacity=None if capacity is None else partial(capacity.apply, plan.tokens, comm),
        beside=plan.beside(spec.name, comm),
        precision=plan.precision,
    )
