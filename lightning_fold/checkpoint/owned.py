"""Which part of a whole tensor this rank holds, and the reading of just that part from a file.

Placements cut dimensions one by one, so a part is a product of one index per dimension. Nothing
here communicates. Live first expert projections are [E, 2, F, D] where files hold the user's
[E, 2F, D]; both forms are understood.
"""

# Shapes.  E experts   F expert width   D model width

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from lightning_fold.checkpoint.tensor_entry import DimIndex
from lightning_fold.checkpoint.tensor_file import TensorEntry, TensorFile
from lightning_fold.params import local_tensor

PIECE = 1 << 25  # Bytes; large enough that the number of reads costs nothing.


def owned_index(live: Tensor) -> tuple[DimIndex, ...]:
    """Indices of each dimension of the whole tensor that this rank's local part holds. Local.

    Args:
        live: A DTensor of any sharding, uneven and strided ones included, or a plain tensor,
            which is whole.

    Returns:
        In the order of the local part: `whole[torch.meshgrid(*indices)]` is the local part. A
        slice with bounds where the indices are neighbours, else a 1-D tensor on CPU.
    """
    return tuple(_owned(live, dim) for dim in range(live.dim()))


def part_of(whole: Tensor, index: Sequence[DimIndex]) -> Tensor:
    """The part of a tensor where every dimension's index is met; a view wherever all are slices."""
    part = whole.detach()
    for dim, wanted in enumerate(index):
        if isinstance(wanted, slice):
            part = part.narrow(dim, wanted.start, wanted.stop - wanted.start)
        else:
            part = part.index_select(dim, wanted.to(part.device))
    return part


def stored_index(
    live: Tensor, stored: Sequence[int], *, halved: bool, first: DimIndex | None = None
) -> tuple[DimIndex, ...]:
    """Indices of a stored tensor that this rank's part of `live` takes. Local.

    Args:
        live: Says how it is sharded.
        stored: Shape of the stored tensor.
        halved: Whether `live` is [E, 2, F, D], which may be stored as [E, 2F, D].
        first: Indices of the first dimension instead of all that this rank holds.
    """
    index = owned_index(live)
    index = index if first is None else (first, *index[1:])
    return merge_halves(index, live.shape[2]) if halved and len(stored) == 3 else index


def merge_halves(index: Sequence[DimIndex], width: int) -> tuple[DimIndex, ...]:
    """Turn an index of the live [E, 2, F, D] into the one of the user's [E, 2F, D].

    Args:
        index: As `owned_index` gives it, without negative bounds.
        width: F.

    Returns:
        Indices whose second one lists the gate rows, then the up rows.
    """
    experts, halves, columns, inputs = index
    rows = _as_tensor(halves, 2)[:, None] * width + _as_tensor(columns, width)
    return experts, _compact(rows.flatten()), inputs


def read_owned(
    file: TensorFile,
    entry: str | TensorEntry,
    live: Tensor,
    *,
    halved: bool = False,
    first: DimIndex | None = None,
) -> Tensor:
    """Read this rank's part of a stored tensor, in the local shape of `live`. Local.

    Args:
        file: Where it is stored, whole.
        entry: A name of `file.entries`, or an entry found in `file.meta`.
        live: The sharded or plain tensor that the part is for.
        halved: Whether `live` is [E, 2, F, D]; the file may hold either form.
        first: Indices of the first dimension to read instead of all that this rank holds.

    Returns:
        A contiguous CPU tensor in the stored dtype.

    Raises:
        ValueError: The shapes differ, or the file is truncated.
    """
    stored = file.entries[entry] if isinstance(entry, str) else entry
    index = stored_index(live, stored.shape, halved=halved, first=first)
    if not halved or len(stored.shape) != 3:
        check_shape(stored, tuple(live.shape), entry)
        return file.read(stored, index)
    experts, halves, width, inputs = live.shape
    check_shape(stored, (experts, halves * width, inputs), entry)
    rows = file.read(stored, index)
    return rows.unflatten(1, (2, rows.shape[1] // 2))


@torch.no_grad()
def fill_owned(
    file: TensorFile, entry: str | TensorEntry, live: Tensor, *, halved: bool = False
) -> None:
    """Read this rank's part of a stored tensor into `live`, cast to its dtype. Local.

    Arguments and errors are those of `read_owned`. Reads a piece at a time, so that no more than
    `PIECE` bytes, or one index of the first dimension, are held beside `live`.
    """
    local = local_tensor(live)
    if not local.dim() or not local.numel():
        local.copy_(read_owned(file, entry, live, halved=halved))
        return
    stored = file.entries[entry] if isinstance(entry, str) else entry
    first = _as_tensor(owned_index(live)[0], live.shape[0])
    rows = max(1, PIECE * len(first) // (local.numel() * stored.dtype.itemsize))
    for start in range(0, len(first), rows):
        piece = _compact(first[start : start + rows])
        part = read_owned(file, entry, live, halved=halved, first=piece)
        local[start : start + rows].copy_(part)


def check_shape(stored: TensorEntry, wanted: tuple[int, ...], name: str | TensorEntry) -> None:
    """Refuse a stored tensor of another shape.

    Raises:
        ValueError: Names the file, the tensor and both shapes.
    """
    if stored.shape != wanted:
        which = name if isinstance(name, str) else "a tensor"
        raise ValueError(
            f"{stored.path}: {which} has shape {stored.shape}, the model has {wanted}. It was "
            "written by another model."
        )


def _owned(live: Tensor, dim: int) -> DimIndex:
    size = live.shape[dim]
    if not isinstance(live, DTensor) or not any(_cuts(p, dim) for p in live.placements):
        return slice(0, size)
    shape = [size if other == dim else 1 for other in range(live.dim())]
    mesh = live.device_mesh
    whole = DTensor.from_local(
        torch.arange(size, device=mesh.device_type).view(shape),
        mesh,
        [Replicate()] * mesh.ndim,
        run_check=False,
    )
    # From replicas to shards: each rank keeps what is its own, and nothing is sent. The
    # placements themselves say how uneven and strided shards are cut.
    cuts = [p if _cuts(p, dim) else Replicate() for p in live.placements]
    return _compact(whole.redistribute(mesh, cuts).to_local().flatten().cpu())


def _cuts(placement: Placement, dim: int) -> bool:
    # By its dimension: a strided shard is no `Shard` to torch, and `is_shard` denies it.
    return getattr(placement, "dim", None) == dim


def _compact(indices: Tensor) -> DimIndex:
    if not len(indices):
        return slice(0, 0)
    first = int(indices[0])
    neighbours = bool((indices == torch.arange(first, first + len(indices))).all())
    return slice(first, first + len(indices)) if neighbours else indices


def _as_tensor(index: DimIndex, size: int) -> Tensor:
    return torch.arange(size)[index] if isinstance(index, slice) else index
