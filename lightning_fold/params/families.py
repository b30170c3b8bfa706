"""Parameter families and the one table that decides over which axes a gradient is summed.

The rule. The loss is divided once, by the number of dp ranks; every reduction after that is a
sum. A gradient is summed over each axis that spreads its family's tokens, except the axes on
which the parameter itself is sharded:

    family   tokens are spread over   why
    DENSE    dp cp tp                 a tp rank holds its own slice of every sequence
    SHARED   dp cp tp                 shared experts run on the same slices
    ROUTER   dp cp tp                 each rank routes its own tokens
    EXPERT   edp                      dispatch has brought the tokens of all ep and etp peers

    q_proj, sharded on tp       -> dp cp        (its input was gathered over tp)
    input_layernorm, whole      -> dp cp tp
    experts, sharded on ep etp  -> edp

FSDP2 does the sums: a parameter is sharded over exactly the axes that its gradient is summed
over, so the bucketed reduce-scatter is the sum and no parameter keeps copies (`params.shard`).
Checked by the equivalence suite, family by family, with the ratio of norms; `make mutate` breaks
each line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum


class Family(Enum):
    """What a parameter belongs to; assigned once, by the module that owns it."""

    DENSE = "dense"
    SHARED = "shared"
    ROUTER = "router"
    EXPERT = "expert"


TOKEN_AXES: Mapping[Family, tuple[str, ...]] = {
    Family.DENSE: ("dp", "cp", "tp"),
    Family.SHARED: ("dp", "cp", "tp"),
    Family.ROUTER: ("dp", "cp", "tp"),
    Family.EXPERT: ("edp",),
}


def reduce_axes(family: Family, sharded_axes: Collection[str]) -> tuple[str, ...]:
    """Axes over which the gradient of a parameter is summed.

    Args:
        family: Its family.
        sharded_axes: Axes on which the parameter itself is sharded.
    """
    return tuple(axis for axis in TOKEN_AXES[family] if axis not in sharded_axes)


def assign_families(
    names: Iterable[str],
    *,
    experts: Collection[str],
    routers: Collection[str],
    shared: Collection[str],
) -> dict[str, Family]:
    """Family of every parameter name, by the modules that own it.

    Args:
        names: Qualified parameter names.
        experts: Names of experts containers.
        routers: Names of routers.
        shared: Names of shared experts and their gates.
    """
    owners = [(Family.EXPERT, experts), (Family.ROUTER, routers), (Family.SHARED, shared)]
    return {name: _family_of(name, owners) for name in names}


def _family_of(name: str, owners: list[tuple[Family, Collection[str]]]) -> Family:
    for family, modules in owners:
        if any(name.startswith(f"{module}.") for module in modules):
            return family
    return Family.DENSE
