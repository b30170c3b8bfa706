"""Shard parameters over the axes that their gradients are summed over, with FSDP2.

The table of `params.families` literally becomes the FSDP2 mesh of each parameter:

    axes of the sum     mesh        parameters
    edp                 edp         experts, DTensors on (ep, etp)
    dp cp               dp_cp       dense, DTensors on tp
    dp cp tp            stage       whole on tp: norms, router, shared experts, replicated k and v

FSDP2 divides nothing here: the loss is divided once by the strategy. A parameter whose mesh has
one rank stays out of FSDP2. The two private names come from the docstring of `fully_shard`, which
tells users to import them from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from lightning_fold.params.families import Family, reduce_axes
from lightning_fold.topology.meshes import Meshes

MESH_OF_AXES = {("edp",): "edp", ("dp", "cp"): "dp_cp", ("dp", "cp", "tp"): "stage"}


def shard_over_data(
    units: Iterable[nn.Module],
    *,
    families: Mapping[nn.Parameter, Family],
    meshes: Meshes,
    layer_meshes: Mapping[nn.Parameter, Meshes] | None = None,
    frees_after_forward: bool = False,
) -> list[FSDPModule]:
    """Apply FSDP2 to `units`, innermost first; the last one must hold all others.

    Gradients are reduced in fp32 where parameters are narrower.

    Args:
        units: Modules whose parameters are gathered and reduced together.
        families: Family of every parameter.
        meshes: Where to shard.
        layer_meshes: Where to shard instead, for the experts of layers with their own folding.
        frees_after_forward: Free parameters between forward and backward; those of the module that
            steps call stay, since backward begins with them.

    Returns:
        The modules that FSDP2 manages; empty where nothing is spread over more than one rank.
    """
    own = layer_meshes or {}
    targets = {
        param: own.get(param, meshes).mesh(mesh_axis(param, family))
        for param, family in families.items()
    }
    infos = _mesh_infos([meshes.mesh("stage"), *targets.values()])
    alone = {param for param, mesh in targets.items() if mesh.size() == 1}
    managed: list[FSDPModule] = []
    for unit in units:
        if all(param in alone for param in unit.parameters()):
            continue
        fully_shard(
            unit,
            mesh=meshes.mesh("stage"),
            # None is True for all but the root.
            reshard_after_forward=None if frees_after_forward else False,
            shard_placement_fn=lambda param: _place(param, infos[id(targets[param].get_group())]),
            mp_policy=_policy(unit),
            ignored_params=alone,
        )
        assert isinstance(unit, FSDPModule)
        sum_only(unit)
        managed.append(unit)
    return managed


def mesh_axis(param: nn.Parameter, family: Family) -> str:
    """The axis over which a parameter's gradient is summed, and over which it is sharded."""
    names = param.device_mesh.mesh_dim_names if isinstance(param, DTensor) else ()
    return MESH_OF_AXES[reduce_axes(family, names or ())]


def sum_only(module: FSDPModule) -> None:
    """Make FSDP2 sum gradients without dividing. Neither setter recurses into submodules.

    A divide factor alone asks for a pre-multiplied sum in fp32 and bf16, which Gloo refuses and
    NCCL gets wrong in bf16.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Return to shards after a forward without a backward.

    Otherwise the whole parameters stay in place, and a later write to the shards is not seen by
    the next forward.
    """
    for module in modules:
        module.reshard()


def hold_back(roots: Iterable[FSDPModule]) -> None:
    """Keep parameters gathered and gradients local until `reduce_held`: many backwards follow."""
    for root in roots:
        root.set_is_last_backward(False)
        root.set_reshard_after_backward(False)
        root.set_requires_gradient_sync(False)


def reduce_held(roots: Iterable[FSDPModule]) -> None:
    """Reduce the gradients of all backwards since `hold_back`, once, and return to shards.

    Collective over the stage. No backward is there to do it in, and weight gradients may have come
    after the last one; torch's own pipelines do it by the same private calls
    (`_PipelineStageBase.perform_reduce_grad`).
    """
    for root in roots:
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)
        state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
        for inner in state._state_ctx.all_states:
            for group in inner._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()


def _mesh_infos(meshes: Iterable[DeviceMesh]) -> dict[int, FSDPMeshInfo]:
    """One FSDPMeshInfo a process group, by its id: FSDP2 refuses two for the same group."""
    by_group: dict[int, FSDPMeshInfo] = {}
    for mesh in meshes:
        by_group.setdefault(id(mesh.get_group()), FSDPMeshInfo(mesh, shard_mesh_dim=0))
    return by_group


def _place(param: nn.Parameter, info: FSDPMeshInfo) -> ShardPlacementResult:
    return ShardPlacementResult(Shard(_free_dim(param, info.mesh.size())), info)


def _free_dim(param: nn.Parameter, parts: int) -> int:
    """The first dimension that tp, ep and etp leave alone and `parts` divides, else 0.

    Such a shard needs no strided placement, which DCP loads silently wrong off dimension 0.
    """
    placements = param.placements if isinstance(param, DTensor) else ()
    taken = {placement.dim for placement in placements if isinstance(placement, Shard)}
    free = [d for d in range(param.dim()) if d not in taken and param.shape[d] % parts == 0]
    return free[0] if free else 0


def _policy(unit: nn.Module) -> MixedPrecisionPolicy:
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in unit.parameters())
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
