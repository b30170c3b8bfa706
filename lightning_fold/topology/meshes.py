"""Device meshes over the two views of the same ranks, and the process groups under them.

Owns every process group of the product. Groups with equal rank lists are created once and shared:
DeviceMesh does not do that by itself, so the meshes are made from groups of one table. A rank
creates only the groups it is in. Rank arithmetic is `folding`'s; nothing here decides a mapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_fold.topology.folding import Folding

ATTENTION_AXES = ("pp", "dp", "cp", "tp")
MOE_AXES = ("pp", "edp", "ep", "etp")
# Joined axes: dp_cp holds the ranks that share a tensor-parallel shard, stage all ranks of a
# pipeline stage.
DENSE_AXES = ("pp", "dp_cp", "tp")
STAGE_AXES = ("pp", "stage")


@dataclass(frozen=True)
class Meshes:
    """The views of the ranks as device meshes; every axis name belongs to exactly one lookup.

    Attributes:
        folding: The degrees that the meshes realise.
        attention: Axes (pp, dp, cp, tp).
        moe: Axes (pp, edp, ep, etp).
        dense: Axes (pp, dp_cp, tp), the storage mesh of dense parameters.
        stage: Axes (pp, stage).
        by_folding: The same with another MoE mesh, for layers whose experts are divided otherwise.
        telling: By axis, a second process group for a few numbers; empty where none is needed.
    """

    folding: Folding
    attention: DeviceMesh
    moe: DeviceMesh
    dense: DeviceMesh
    stage: DeviceMesh
    by_folding: Mapping[Folding, Meshes] = field(default_factory=dict)
    telling: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    _by_axis: dict[str, DeviceMesh] = field(default_factory=dict, init=False, compare=False)

    def of(self, folding: Folding | None) -> Meshes:
        """The meshes of a layer with its own folding; these, where it has none."""
        return self if folding in (None, self.folding) else self.by_folding[folding]

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return self.mesh(axis).size()

    def rank(self, axis: str) -> int:
        """This rank's coordinate on `axis`."""
        return self.mesh(axis).get_local_rank()

    def group(self, axis: str, *, tells: bool = False) -> dist.ProcessGroup:
        """The process group of this rank on `axis`; with `tells` the one for a few numbers."""
        own = self.telling.get(axis) if tells else None
        return self.mesh(axis).get_group() if own is None else own

    def mesh(self, axis: str) -> DeviceMesh:
        """The one-dimensional mesh of this rank on `axis`."""
        # Slicing takes DeviceMesh 0.4 ms, and a layer asks dozens of times.
        if axis not in self._by_axis:
            self._by_axis[axis] = self._slice(axis)
        return self._by_axis[axis]

    def _slice(self, axis: str) -> DeviceMesh:
        for view in (self.dense, self.moe, self.attention, self.stage):
            if axis in cast("tuple[str, ...]", view.mesh_dim_names):
                return view[axis]
        raise ValueError(f"unknown mesh axis {axis!r}; axes: pp dp cp tp edp ep etp dp_cp stage")


def build_meshes(
    folding: Folding,
    device_type: str,
    *,
    layer_foldings: Iterable[Folding] = (),
    timeout: timedelta | None = None,
    tells_apart: bool = False,
) -> Meshes:
    """Create the process groups and the meshes on them.

    Collective over all ranks of the world; call once per process and keep the result. A group
    carries the names of its axes as `group_desc`, such as "ep" or "dp/dp_cp", by which NCCL's
    watchdog and this package's tell of it.

    Args:
        folding: The degrees.
        device_type: Of the meshes.
        layer_foldings: Foldings of single layers; they differ from `folding` in etp and ep only.
        timeout: Bounds every collective of the groups; None takes c10d's default.
        tells_apart: Whether ep and etp get second groups, on which numbers do not queue behind
            rows: a communicator of NCCL does one thing at a time, one of Gloo two.
    """
    f, world = folding, torch.arange(dist.get_world_size())
    others = sorted(set(layer_foldings) - {f}, key=lambda other: other.mapping_id)
    grids = {
        ATTENTION_AXES: world.view(f.pp, f.dp, f.cp, f.tp),
        MOE_AXES: _moe_grid(f, world),
        DENSE_AXES: world.view(f.pp, f.dp * f.cp, f.tp),
        STAGE_AXES: world.view(f.pp, f.stage_size),
    }
    pairs = [*grids.items(), *((MOE_AXES, _moe_grid(other, world)) for other in others)]
    groups = {
        ranks: _group(ranks, desc="/".join(axes), timeout=timeout)
        for ranks, axes in _axes_by_ranks(pairs).items()
    }

    def view(axes: tuple[str, ...], grid: torch.Tensor) -> DeviceMesh:
        own = [groups[_my_ranks(grid, dim)] for dim in range(grid.dim())]
        return DeviceMesh.from_group(own, device_type, mesh=grid, mesh_dim_names=axes)

    def telling(grid: torch.Tensor) -> dict[str, dist.ProcessGroup]:
        if not tells_apart:
            return {}
        ranks = {axis: _my_ranks(grid, MOE_AXES.index(axis)) for axis in ("ep", "etp")}
        return {
            axis: _new_group(own, desc=f"{axis} counts", timeout=timeout)
            for axis, own in ranks.items()
            if len(own) > 1
        }

    attention, moe, dense, stage = (view(axes, grid) for axes, grid in grids.items())
    counts = telling(grids[MOE_AXES])
    meshes = Meshes(folding, attention, moe, dense, stage, telling=counts)
    by_folding = {
        other: replace(meshes, folding=other, moe=view(MOE_AXES, grid), telling=telling(grid))
        for other in others
        for grid in [_moe_grid(other, world)]
    }
    return replace(meshes, by_folding=by_folding)


def _moe_grid(folding: Folding, world: torch.Tensor) -> torch.Tensor:
    return world.view(folding.pp, folding.edp, folding.ep, folding.etp)


def _axes_by_ranks(
    grids: Iterable[tuple[tuple[str, ...], torch.Tensor]],
) -> dict[tuple[int, ...], list[str]]:
    """The axes whose groups this rank is in, by rank list: axes with equal lists share one."""
    found: dict[tuple[int, ...], list[str]] = {}
    for axes, grid in grids:
        for dim, axis in enumerate(axes):
            names = found.setdefault(_my_ranks(grid, dim), [])
            names.extend([axis] if axis not in names else [])
    return found


def _my_ranks(grid: torch.Tensor, dim: int) -> tuple[int, ...]:
    rows = grid.movedim(dim, -1).reshape(-1, grid.shape[dim])
    mine = (rows == dist.get_rank()).any(1)
    return tuple(rows[mine][0].tolist())


def _group(ranks: tuple[int, ...], *, desc: str, timeout: timedelta | None) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        return cast("dist.ProcessGroup", dist.group.WORLD)
    return _new_group(ranks, desc=desc, timeout=timeout)


def _new_group(
    ranks: tuple[int, ...], *, desc: str, timeout: timedelta | None
) -> dist.ProcessGroup:
    # Local synchronisation: a rank outside the group need not take part, so creation costs the
    # number of groups a rank is in, not the number in the world.
    group = dist.new_group(
        list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=desc
    )
    return cast("dist.ProcessGroup", group)
