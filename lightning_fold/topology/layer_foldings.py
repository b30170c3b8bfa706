"""Foldings of single layers: `moe_layers: {0-3: {etp: 2, ep: 2}}`.

Layers of one model may divide their experts differently: few wide experts over etp, many narrow
ones over ep. Attention keeps one mapping, so going from a layer to the next costs nothing more.
Pure integers and strings; whether a layer exists or has experts is checked with the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning_fold.topology.doctor import nearest, resolve_folding
from lightning_fold.topology.folding import Folding

_DEGREES = {
    "etp": "etp",
    "ep": "ep",
    "expert_tensor_parallel_size": "etp",
    "expert_parallel_size": "ep",
}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def layer_foldings(moe_layers: Mapping[Any, Any] | None, base: Folding) -> dict[int, Folding]:
    """The folding of each layer that is named; the others have `base`.

    >>> base = Folding.from_world(4, tp=2, etp=1, ep=4)
    >>> {i: f.mapping_id for i, f in layer_foldings({"0-1": {"etp": 2, "ep": 2}}, base).items()}
    {0: 'tp2cp1dp2pp1-etp2ep2edp1', 1: 'tp2cp1dp2pp1-etp2ep2edp1'}

    Args:
        moe_layers: Degrees by layers: numbers, runs such as "0-3", or several with commas. A
            degree that is left out is the base's.
        base: The strategy's folding.

    Raises:
        ValueError: A key is no range, a layer is named twice, a degree is unknown or does not fit.
    """
    check_written(moe_layers)
    return {
        layer: folding
        for key, degrees in (moe_layers or {}).items()
        for folding in [_folding(key, degrees, base)]
        for layer in _layers(key)
    }


def check_written(moe_layers: Mapping[Any, Any] | None) -> None:
    """Refuse what no ranks and no model could make right.

    Raises:
        ValueError: A key is no range, a layer is named twice, or a degree is unknown.
    """
    found: set[int] = set()
    for key, degrees in (moe_layers or {}).items():
        _check_degrees(key, degrees)
        for layer in _layers(key):
            if layer in found:
                raise ValueError(
                    f"moe_layers: layer {layer} is named twice, the second time in {key!r}. Name "
                    "each layer once.  Change `moe_layers`."
                )
            found.add(layer)


def check_layers(
    foldings: Mapping[int, Folding], *, num_layers: int, moe: Mapping[int, str]
) -> None:
    """Refuse layers that the model does not have, or that have no experts.

    Args:
        foldings: From `layer_foldings`.
        num_layers: Decoder layers of the model.
        moe: Number of every layer with experts, and their name.

    Raises:
        ValueError: Names the layer and those that may be named.
    """
    for layer in foldings:
        if layer not in moe:
            legal = ", ".join(str(i) for i in sorted(moe)) or "none"
            reason = "has no experts" if layer < num_layers else "is not in the model"
            raise ValueError(
                f"moe_layers: layer {layer} {reason}, which has {num_layers} layers (0 to "
                f"{num_layers - 1}). Legal layers: {legal}.  Change `moe_layers`."
            )


def _layers(key: Any) -> list[int]:
    layers: list[int] = []
    for part in str(key).split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if first > last:
            raise ValueError(
                f"moe_layers: {key!r} names no layers. Legal: a number, a run such as '0-3', or "
                "several with commas.  Change `moe_layers`."
            )
        layers += range(first, last + 1)
    return layers


def _check_degrees(key: Any, degrees: Any) -> None:
    if not isinstance(degrees, Mapping) or not degrees:
        raise ValueError(
            f"moe_layers: {key!r} must be followed by degrees, such as {{etp: 2, ep: 2}}, and is "
            f"{degrees!r}.  Change `moe_layers`."
        )
    for name, degree in degrees.items():
        if name not in _DEGREES:
            likely = nearest(str(name), _DEGREES)
            hint = f"Change it to `{likely}`." if likely else "Legal: etp, ep."
            raise ValueError(f"moe_layers: `{name}` of {key!r} is no degree of experts. {hint}")
        if type(degree) is not int or degree < 1:
            raise ValueError(
                f"moe_layers: {name}={degree!r} of {key!r} counts ranks. Legal {name}: 1, 2, 3, "
                "...  Change `moe_layers`."
            )


def _folding(key: Any, degrees: Mapping[str, int], base: Folding) -> Folding:
    chosen = {"etp": base.etp, "ep": base.ep}
    chosen |= {_DEGREES[name]: degree for name, degree in degrees.items()}
    try:
        return resolve_folding(base.world, tp=base.tp, cp=base.cp, pp=base.pp, **chosen)
    except ValueError as error:
        reason = str(error).rpartition("  Change ")[0]
        raise ValueError(f"moe_layers: {key!r}: {reason}  Change `moe_layers`.") from None
