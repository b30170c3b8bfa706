"""Dispatchers: how token rows reach their experts, and how results come back."""

from lightning_fold.moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_fold.moe.dispatch.base import Dispatcher
from lightning_fold.moe.dispatch.local import LocalDispatcher

__all__ = ["AllToAllDispatcher", "Dispatcher", "LocalDispatcher"]
