"""The pair of factorisations that parallel folding puts over the same ranks.

Owns which rank sits where: degrees, coordinates, groups and the mapping id. Both views keep
the pipeline axis outermost, so that every pipeline group is the same list of ranks in both;
nothing else couples them. Knows no torch, no process group and no model.

Eight ranks, four per stage; attention splits over tp and dp, the experts over ep alone:

    >>> folding = Folding.from_world(8, tp=2, pp=2, ep=4)
    >>> folding.mapping_id
    'tp2cp1dp2pp2-etp1ep4edp1'

    rank              0   1   2   3 |  4   5   6   7
    attention   tp    0   1   0   1 |  0   1   0   1
                dp    0   0   1   1 |  0   0   1   1
                pp    0   0   0   0 |  1   1   1   1
    MoE         ep    0   1   2   3 |  0   1   2   3
                pp    0   0   0   0 |  1   1   1   1

    >>> [folding.coordinates(rank)["dp"] for rank in range(8)]
    [0, 0, 1, 1, 0, 0, 1, 1]
    >>> folding.groups("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> folding.groups("dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> folding.groups("ep")
    ((0, 1, 2, 3), (4, 5, 6, 7))
    >>> folding.groups("pp")
    ((0, 4), (1, 5), (2, 6), (3, 7))
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

# Row-major: the last axis is the fastest.
ATTENTION_AXES = ("pp", "dp", "cp", "tp")
MOE_AXES = ("pp", "edp", "ep", "etp")
AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")

_MAPPING_ID = re.compile(
    "-".join("".join(f"{axis}([1-9][0-9]*)" for axis in view) for view in (AXES[:4], AXES[4:]))
)


@dataclass(frozen=True)
class Folding:
    """The degrees of the attention view and of the MoE view over one world.

    Raises:
        ValueError: a degree is not a positive int, or the two views cover different stages.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int

    def __post_init__(self) -> None:
        for axis, degree in asdict(self).items():
            if type(degree) is not int or degree < 1:
                raise ValueError(
                    f"Folding: {axis}={degree!r} must be an int >= 1. Legal {axis}: 1, 2, 3, ..."
                    f"  Change `{axis}`."
                )
        if self.etp * self.ep * self.edp != self.stage_size:
            raise ValueError(_explain_open_pair(self))

    @classmethod
    def from_world(
        cls, world: int, *, tp: int = 1, cp: int = 1, pp: int = 1, etp: int = 1, ep: int = 1
    ) -> Folding:
        """Derive dp and edp; `topology.doctor.resolve_folding` explains what is refused here."""
        attention, experts = tp * cp * pp, etp * ep * pp
        if min(world, tp, cp, pp, etp, ep) < 1 or world % attention or world % experts:
            raise ValueError(
                "Folding does not close: world = pp*tp*cp*dp = pp*etp*ep*edp, but world="
                f"{world} is not a multiple of both {pp}*{tp}*{cp} and {pp}*{etp}*{ep} "
                f"(pp={pp} tp={tp} cp={cp} etp={etp} ep={ep}, all >= 1)."
            )
        dp, edp = world // attention, world // experts
        return cls(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=edp)

    @classmethod
    def from_id(cls, text: str) -> Folding:
        """Read a mapping id such as `tp2cp1dp2pp1-etp1ep4edp1`, the inverse of `mapping_id`."""
        match = _MAPPING_ID.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a mapping id: it must name all seven degrees, each >= 1, in "
                "this order and without spaces. Legal form: tp2cp1dp2pp1-etp1ep4edp1."
                "  Change the mapping id."
            )
        return cls(*(int(degree) for degree in match.groups()))

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage, tp*cp*dp = etp*ep*edp."""
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.stage_size

    @property
    def mapping_id(self) -> str:
        """The text form, `tp2cp1dp2pp1-etp1ep4edp1`."""
        return f"tp{self.tp}cp{self.cp}dp{self.dp}pp{self.pp}-etp{self.etp}ep{self.ep}edp{self.edp}"

    def size(self, axis: str) -> int:
        """Return the degree of an axis."""
        _require_axis(axis)
        degree: int = getattr(self, axis)
        return degree

    def stride(self, axis: str) -> int:
        """Return the distance in ranks between neighbours on an axis, also where it has one."""
        _require_axis(axis)
        grid = ATTENTION_AXES if axis in ATTENTION_AXES else MOE_AXES
        return math.prod(self.size(inner) for inner in grid[grid.index(axis) + 1 :])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's coordinate on each of the seven axes."""
        self._require_rank(rank)
        return {axis: rank // self.stride(axis) % self.size(axis) for axis in AXES}

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that differ from this one on the axis only, by coordinate."""
        self._require_rank(rank)
        stride, size = self.stride(axis), self.size(axis)
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + size * stride, stride))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return every group of an axis, ordered by first rank; they partition the world."""
        stride, size = self.stride(axis), self.size(axis)
        firsts = (rank for rank in range(self.world) if rank // stride % size == 0)
        return tuple(tuple(range(first, first + size * stride, stride)) for first in firsts)

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise ValueError(
                f"rank={rank} is outside {self.mapping_id} with world={self.world}."
                f" Legal ranks: 0 to {self.world - 1}."
            )


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive int in ascending order."""
    return tuple(candidate for candidate in range(1, number + 1) if number % candidate == 0)


def legal_foldings(
    world: int, *, cp: Iterable[int] = (1,), pp: Iterable[int] = (1,)
) -> list[Folding]:
    """List every folding of a world that uses the given cp and pp degrees.

    Ordered by pp and cp as given, then tp, etp and ep ascending. Degrees that do not fit the
    world are passed over. With cp = pp = 1 there are d(world) * d3(world) foldings: d counts
    the divisors (the choices of tp), d3 the ordered triples with that product (etp, ep, edp).
    A prime power p^a has d = a + 1 and d3 = (a + 1)(a + 2) / 2, so worlds of 1, 2, 4 and 8
    ranks have 1, 6, 18 and 40. In general a stage of s = world/pp ranks adds d(s/cp) * d3(s).
    """
    contexts = tuple(cp)
    return [
        Folding.from_world(world, tp=tp, cp=context, pp=stages, etp=etp, ep=ep)
        for stages in pp
        if world % stages == 0
        for context in contexts
        if world // stages % context == 0
        for tp in divisors(world // stages // context)
        for etp in divisors(world // stages)
        for ep in divisors(world // stages // etp)
    ]


def _require_axis(axis: str) -> None:
    if axis not in AXES:
        raise ValueError(f"{axis!r} is not an axis. Legal axes: {', '.join(AXES)}.")


def _explain_open_pair(folding: Folding) -> str:
    experts = folding.etp * folding.ep
    stage = folding.stage_size
    legal = stage // experts if stage % experts == 0 else "none"
    return (
        "Folding does not close: etp*ep*edp must equal tp*cp*dp per pipeline stage.\n"
        f"  tp={folding.tp} cp={folding.cp} dp={folding.dp}  ->  stage_size = {stage}\n"
        f"  etp={folding.etp} ep={folding.ep} edp={folding.edp}  ->  "
        f"{folding.etp}*{folding.ep}*{folding.edp} = {experts * folding.edp}\n"
        f"Legal edp for etp={folding.etp} ep={folding.ep}: {legal}.  Change "
        + ("`edp`." if legal != "none" else "`ep` or `etp`.")
    )
