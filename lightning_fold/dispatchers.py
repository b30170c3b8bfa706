"""The names of dispatchers, and the registry by which users add their own.

Owns which names `dispatcher` takes; the ones built in live in `moe.dispatch`. Imports no torch, so
that a config is checked without it. A dispatcher over DeepEP or HybridEP plugs in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightning_fold.topology.doctor import nearest

AUTO = "auto"
BUILT_IN = ("local", "all_to_all", "all_gather", "dedup")
PADDING = ("local", "all_to_all")
"""Those that can send static shapes."""


@dataclass(frozen=True)
class Registered:
    """A user's dispatcher.

    Attributes:
        factory: Takes the `Comm` of a MoE layer and returns a `moe.dispatch.Dispatcher`.
        pads: Whether it honours `Routing.slots`.
    """

    factory: Callable[[Any], Any]
    pads: bool


_REGISTERED: dict[str, Registered] = {}


def register_dispatcher(name: str, factory: Callable[[Any], Any], *, pads: bool = False) -> None:
    """Make `FoldedMoEStrategy(dispatcher=name)` use a dispatcher of yours.

    To be called where every process does, before the strategy is made; the last call for a name
    wins.

    Args:
        name: What `dispatcher` is set to.
        factory: Takes the `lightning_fold.topology.comm.Comm` of a layer, which names its axes
            ("ep", "etp"), sizes, ranks and groups, and returns an object with the two methods of
            `lightning_fold.moe.dispatch.Dispatcher`. Called once a layer, on every rank.
        pads: Whether it sends exactly `Routing.slots` rows to every expert when told to.

    Raises:
        ValueError: The name is one of those that are built in.
        TypeError: The factory cannot be called.
    """
    if name in (AUTO, *BUILT_IN):
        raise ValueError(
            f"dispatcher {name!r} is built in and cannot be replaced. Legal: any name but "
            f"{_listed((AUTO, *BUILT_IN))}.  Change `name`."
        )
    if not callable(factory):
        kind = type(factory).__name__
        raise TypeError(f"the factory of dispatcher {name!r} must be callable, not {kind}")
    _REGISTERED[name] = Registered(factory, pads)


def registered() -> Mapping[str, Registered]:
    """Users' dispatchers by name."""
    return MappingProxyType(_REGISTERED)


def check_dispatcher(name: str, *, etp: int, ep: int, pads: bool = False) -> None:
    """Refuse a name that there is not, or that cannot serve the degrees or static shapes.

    Raises:
        ValueError: Names the legal values, the nearest first for a misspelt one.
    """
    known = (AUTO, *BUILT_IN, *_REGISTERED)
    if name not in known:
        likely = nearest(name, known)
        hint = f"Did you mean {likely!r}? " if likely else ""
        raise ValueError(
            f"dispatcher={name!r} is no dispatcher. {hint}Legal dispatcher: {_listed(known)}; "
            "`lightning_fold.register_dispatcher` adds others.  Change `dispatcher`."
        )
    if name == "local" and etp * ep > 1:
        others = [other for other in known if other != "local"]
        raise ValueError(
            f"dispatcher='local' keeps tokens on their rank, but etp*ep = {etp}*{ep} = {etp * ep} "
            f"ranks hold the experts. Legal dispatcher: {_listed(others)}.  Change `dispatcher`."
        )
    padding = [AUTO, *PADDING, *(other for other, entry in _REGISTERED.items() if entry.pads)]
    if pads and name not in padding:
        raise ValueError(
            f"dispatcher={name!r} sends as many rows as there are, but pad_to_capacity asks for "
            f"static shapes. Legal dispatcher: {_listed(padding)}.  Change `dispatcher`."
        )


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(repr(name) for name in names)
