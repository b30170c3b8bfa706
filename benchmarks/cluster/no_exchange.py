"""Exchanges that are not made: the lower bound of what exchanges of rows cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_fold.topology.comm import Comm, Pending

ROW_AXES = ("ep", "etp")
"""The axes that rows of tokens travel on."""


@contextmanager
def without_exchanges() -> Iterator[None]:
    """Send no rows: what would arrive over `ROW_AXES` is there at once, with another content.

    The lower bound of a step's time. A rank gets zeros where rows would come, and its own counts in
    place of its peers', which are the same under an even load.
    """
    originals = {name: getattr(Comm, name) for name in _STAND_INS}
    for name, stand_in in _STAND_INS.items():
        setattr(Comm, name, _local(originals[name], stand_in, starts=name.startswith("start")))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Comm, name, original)


def _all_to_all(comm: Comm, x: Tensor, send: Any, recv: Any, *, axis: str) -> Tensor:
    # Counts are as many to each peer as from it.
    return x.new_zeros(sum(recv), *x.shape[1:]) if x.is_floating_point() else x.clone()


def _gather(comm: Comm, x: Tensor, sizes: Sequence[int], *, axis: str) -> Tensor:
    if x.is_floating_point():
        return x.new_zeros(sum(sizes), *x.shape[1:])
    return x.repeat(len(sizes), *[1] * (x.dim() - 1))


def _reduce_scatter(comm: Comm, x: Tensor, sizes: Sequence[int], *, axis: str) -> Tensor:
    return x.new_zeros(sizes[comm.rank(axis)], *x.shape[1:])


_STAND_INS: dict[str, Callable[..., Tensor]] = {
    f"{start}{name}": stand_in
    for name, stand_in in (
        ("all_to_all_rows", _all_to_all),
        ("all_gather_rows", _gather),
        ("reduce_scatter_rows", _reduce_scatter),
    )
    for start in ("", "start_")
}


def _local(
    original: Callable[..., Any], stand_in: Callable[..., Tensor], *, starts: bool
) -> Callable[..., Any]:
    def call(comm: Comm, x: Tensor, *sizes: Any, axis: str, **options: Any) -> Any:
        if axis not in ROW_AXES or comm.size(axis) == 1:
            return original(comm, x, *sizes, axis=axis, **options)
        out = stand_in(comm, x, *sizes, axis=axis)
        return Pending(out) if starts else out

    return call
