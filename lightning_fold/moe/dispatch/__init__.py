"""Dispatchers: how token rows reach their experts, and how results come back."""

from lightning_fold.moe.dispatch.all_gather import AllGatherDispatcher
from lightning_fold.moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_fold.moe.dispatch.base import Dispatcher
from lightning_fold.moe.dispatch.choose import choose_dispatcher
from lightning_fold.moe.dispatch.dedup import DedupDispatcher
from lightning_fold.moe.dispatch.local import LocalDispatcher
from lightning_fold.moe.dispatch.padded import PaddedDispatcher

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "DedupDispatcher",
    "Dispatcher",
    "LocalDispatcher",
    "PaddedDispatcher",
    "choose_dispatcher",
]
