"""From the name of a dispatcher to the dispatcher of one layer."""

from __future__ import annotations

from typing import Any

from lightning_fold.dispatchers import check_dispatcher, registered
from lightning_fold.moe.dispatch.all_gather import AllGatherDispatcher
from lightning_fold.moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_fold.moe.dispatch.base import Dispatcher
from lightning_fold.moe.dispatch.dedup import DedupDispatcher
from lightning_fold.moe.dispatch.local import LocalDispatcher
from lightning_fold.moe.dispatch.padded import PaddedDispatcher
from lightning_fold.topology.comm import Comm


def choose_dispatcher(name: str, comm: Comm, *, pads: bool = False) -> Dispatcher[Any]:
    """The dispatcher that serves the degrees; "auto" is local where experts are whole.

    Args:
        name: See `FoldedConfig.dispatcher`.
        comm: Of the layer.
        pads: Whether shapes are static.

    Raises:
        ValueError: The name is unknown, or does not serve the degrees or static shapes.
    """
    etp, ep = comm.size("etp"), comm.size("ep")
    check_dispatcher(name, etp=etp, ep=ep, pads=pads)
    if name in registered():
        custom: Dispatcher[Any] = registered()[name].factory(comm)
        return custom
    if pads:
        return PaddedDispatcher(comm)
    if name == "local" or (name == "auto" and etp * ep == 1):
        return LocalDispatcher(comm)
    if name == "all_gather":
        return AllGatherDispatcher(comm)
    return DedupDispatcher(comm) if name == "dedup" else AllToAllDispatcher(comm)
