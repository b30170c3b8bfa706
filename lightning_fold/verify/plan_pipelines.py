"""Which pipelines are verified: schedules, layouts, folded mappings with stages, and features.

Owns lists of cases as `plan` does, whose `Case` these are. Every batch has ten rows, so that ten,
five and two microbatches are even and any other number is not. Pure data: imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_fold.topology.folding import Folding
from lightning_fold.verify.plan import AUX_FORMULAS, MAIN_MODELS, Case

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}
"""Name and virtual stages of every schedule that is built in."""
# Three layers, of which the second is dense, on more stages than that.
FOUR = "Et|t|t|L"
FOUR_WITH_AN_EMPTY_ONE = "E|tt||tL"
EIGHT = "E|t|t|t||||L"

# Of 8 ranks: each axis large once, experts across dp and cp, copies of the experts.
MAPPINGS = (
    "tp2cp2dp1pp2-etp1ep4edp1",
    "tp2cp1dp2pp2-etp2ep2edp1",
    "tp1cp1dp2pp4-etp1ep2edp1",
    "tp2cp1dp2pp2-etp1ep4edp1",
    "tp1cp2dp2pp2-etp1ep4edp1",
    "tp1cp1dp4pp2-etp1ep4edp1",
    "tp1cp1dp4pp2-etp2ep2edp1",
    "tp1cp1dp4pp2-etp1ep2edp2",
    "tp1cp1dp4pp2-etp1ep1edp4",
    "tp4cp1dp1pp2-etp1ep4edp1",
    "tp4cp1dp1pp2-etp4ep1edp1",
    "tp1cp4dp1pp2-etp1ep4edp1",
    "tp2cp2dp1pp2-etp2ep2edp1",
    "tp2cp2dp1pp2-etp1ep2edp2",
    "tp1cp2dp2pp2-etp2ep1edp2",
    "tp2cp1dp1pp4-etp1ep2edp1",
    "tp2cp1dp1pp4-etp2ep1edp1",
    "tp1cp2dp1pp4-etp1ep2edp1",
)

_PP2 = "tp1cp1dp1pp2-etp1ep1edp1"
_PP4 = "tp1cp1dp1pp4-etp1ep1edp1"
_TP2 = "tp2cp1dp1pp2-etp1ep2edp1"
_DP2 = "tp1cp1dp2pp2-etp1ep2edp1"
_CP2 = "tp1cp2dp1pp2-etp1ep2edp1"
_ETP2 = "tp1cp1dp2pp2-etp2ep1edp1"
_DATA = "tp1cp1dp2pp2-etp1ep1edp2"


@dataclass(frozen=True)
class Way:
    """How a pipeline runs a batch; the fields of `Case` that say so."""

    schedule: str
    virtual_stages: int
    num_microbatches: int
    layout: str | None = None
    overlap: bool = False

    def case(self, model: str, mapping: str, *, feature: str = "", clip: bool = False) -> Case:
        """A case that runs in this way."""
        case = Case(model, mapping, clip=clip, feature=feature, batch="rows")
        return replace(
            case,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            num_microbatches=self.num_microbatches,
            layout=self.layout,
            overlap=self.overlap,
        )


_PLAIN = Way("1f1b", 1, 4)
_TWICE = Way("interleaved_1f1b", 2, 4, FOUR)
_BUBBLE = Way("interleaved_zero_bubble", 2, 4, FOUR_WITH_AN_EMPTY_ONE)
_ZBV = Way("zbv", 2, 5, FOUR)
_DUAL = Way("dualpipev", 2, 4, FOUR_WITH_AN_EMPTY_ONE)
_DEEP = Way("1f1b", 1, 4, FOUR)
_DEEP_TWICE = Way("interleaved_1f1b", 2, 6, EIGHT)
_DEEP_ZBV = Way("zbv", 2, 8, EIGHT)
_TWO_STAGES = (_PLAIN, _TWICE, _BUBBLE, _ZBV, _DUAL)
_FOUR_STAGES = (_DEEP, _DEEP_TWICE, _DEEP_ZBV)

QUICK = (
    _PLAIN.case("decoder-tied", _PP2, clip=True),
    _TWICE.case("decoder", _PP2),
    _DUAL.case("mixtral-aux", _PP2),
    _PLAIN.case("decoder", _TP2, feature="aux", clip=True),
    _ZBV.case("qwen3_moe", _DP2, feature="selective", clip=True),
    _TWICE.case("decoder", _CP2),
    _BUBBLE.case("decoder-groups", _ETP2, feature="bias"),
    _DEEP_ZBV.case("decoder", _PP4),
)
"""What every test run sees."""
STAGES = {
    "plain": _PLAIN.case("decoder", _PP2),
    "tied": _PLAIN.case("decoder-tied", _PP2, clip=True),
    "aux": _PLAIN.case("decoder", _TP2, feature="aux"),
    "delayed": _ZBV.case("decoder", _PP2),
}
"""Cases that notice the faults of pipelines."""


_WOVEN = Way("1f1b", 1, 5, overlap=True)
_WOVEN_TWICE = Way("interleaved_1f1b", 2, 4, FOUR, overlap=True)
_WOVEN_DUAL = Way("dualpipev", 2, 5, FOUR_WITH_AN_EMPTY_ONE, overlap=True)
WOVEN = (
    _WOVEN.case("decoder", _PP2),
    _WOVEN.case("decoder-shared-bias", _DP2, feature="aux", clip=True),
    _WOVEN_TWICE.case("mixtral", _TP2, feature="full"),
    _WOVEN_DUAL.case("qwen3_moe", _DP2, feature="selective"),
    _WOVEN_DUAL.case("decoder", _ETP2, feature="full"),
    _WOVEN_TWICE.case("decoder-groups", _CP2, feature="bias"),
)
"""Woven schedules; every test run sees them."""
_WOVEN_DEEP = Way("1f1b", 1, 10, FOUR, overlap=True)
WOVEN_EIGHT = (
    _WOVEN.case("decoder", "tp1cp1dp4pp2-etp2ep2edp1", feature="aux", clip=True),
    _WOVEN_TWICE.case("qwen3_moe", "tp1cp2dp2pp2-etp2ep2edp1"),
    _WOVEN_DUAL.case("mixtral", "tp2cp1dp2pp2-etp2ep2edp1", feature="selective", clip=True),
    _WOVEN_DEEP.case("decoder", "tp1cp1dp2pp4-etp1ep2edp1", feature="full"),
)
"""The same where ep and etp are both spread inside a stage, and over four stages."""


def pipelines(world: int) -> list[Case]:
    """Cases of the long run on `world` ranks."""
    if world == 2:
        return _schedule_cases(pp=2, model="decoder", mapping=_PP2) + _layout_cases()
    if world == 4:
        # Deep: a layer for each of eight stages.
        grid = _schedule_cases(pp=4, model="decoder-deep", mapping=_PP4)
        return grid + _tied_cases() + _feature_cases()
    return _folded_cases() if world == 8 else []


def _schedule_cases(*, pp: int, model: str, mapping: str) -> list[Case]:
    """Every schedule, with microbatches of equal and of different sizes, and with few of them."""
    cases = []
    for name, virtual in SCHEDULES.items():
        layout = FOUR if (pp, virtual) == (2, 2) else None
        least = pp * virtual if name in ("zbv", "dualpipev") else 1
        for number in (1, 2, 3, 4, 5, 8, 10):
            rounds = max(1, number // pp)
            is_legal = name != "interleaved_zero_bubble" or number % rounds == 0
            if number >= least and is_legal:
                way = Way(name, virtual, number, layout)
                cases.append(way.case(model, mapping, clip=number == 4))
    return cases


def _layout_cases() -> list[Case]:
    """Stages without layers, embedding or head alone, and no layout at all."""
    layouts = ("Et|ttL", "Ettt|L", "E|tttL", None)
    cases = [replace(_PLAIN, layout=layout).case("decoder", _PP2) for layout in layouts]
    cases.append(replace(_TWICE, layout="Ettt|||L").case("decoder", _PP2))
    for layout in (FOUR, FOUR_WITH_AN_EMPTY_ONE, "E||ttt|L"):
        for way in (_TWICE, _ZBV):
            cases.append(replace(way, layout=layout).case("decoder", _PP2, clip=True))
    deep = [replace(way, layout=None).case("decoder-deep", _PP2) for way in (_TWICE, _DUAL)]
    three = replace(_TWICE, virtual_stages=3, layout=None).case("decoder-deep", _PP2)
    return [*cases, *deep, three]


def _tied_cases() -> list[Case]:
    """A tied embedding on both ends, which lie on two ranks or, in a V, on one."""
    twins = [way.case("decoder-tied", _PP4, clip=True) for way in _FOUR_STAGES]
    for model in ("decoder-tied", "mixtral-tied"):
        for mapping in (_TP2, _DP2):
            twins += [way.case(model, mapping, clip=True) for way in (_PLAIN, _TWICE, _ZBV)]
    return twins


def _feature_cases() -> list[Case]:
    """What crosses borders beside hidden states, and what counts tokens, on each axis of two."""
    cases = []
    for mapping in (_TP2, _DP2, _CP2):
        for way in (_PLAIN, _ZBV, _BUBBLE):
            cases += [
                way.case("decoder", mapping, feature="aux"),
                way.case("mixtral-aux", mapping, clip=True),
                way.case("decoder-groups", mapping, feature="bias"),
            ]
        cases += [_PLAIN.case("decoder", mapping, feature=name) for name in AUX_FORMULAS]
        cases += [
            _TWICE.case("mixtral", mapping, feature="folded"),
            _TWICE.case("decoder", mapping, feature="capacity"),
            _ZBV.case("qwen3_moe", mapping, feature="capacity-position"),
            _ZBV.case("decoder-shared-bias", mapping, feature="capacity-padded"),
            _DUAL.case("decoder", mapping, feature="full"),
            _PLAIN.case("qwen3_moe", mapping, feature="full", clip=True),
            _ZBV.case("mixtral", mapping, feature="selective"),
            _ZBV.case("decoder-shared-bias", mapping, feature="dedup"),
        ]
    # The head alone at the end: its stage makes losses of routers that it does not have.
    alone = replace(_PLAIN, layout="Ettt|L")
    cases += [alone.case("decoder", mapping, feature="aux") for mapping in (_TP2, _DP2)]
    cases += [
        _PLAIN.case("decoder", _DP2, feature="layers"),
        _ZBV.case("mixtral", _ETP2, feature="layers", clip=True),
        _PLAIN.case("decoder", _DATA, feature="capacity-local"),
        replace(_PLAIN.case("decoder", _CP2), context_parallel_method="ring"),
        replace(_ZBV.case("mixtral", _CP2), context_parallel_method="ulysses"),
        replace(_TWICE.case("decoder", _DP2), precision="32"),
    ]
    return cases


def _folded_cases() -> list[Case]:
    """Every mapping with every family, with and without recomputation, by schedules in turn."""
    cases = []
    for i, mapping in enumerate(MAPPINGS):
        ways = _ways(mapping)
        for j, model in enumerate(MAIN_MODELS):
            # The plainest way without, the others in turn with recomputation.
            way = ways[(i + j) % len(ways)]
            cases.append(ways[0].case(model, mapping, clip=j == 0))
            cases.append(way.case(model, mapping, feature="selective", clip=j > 0))
    full = [way.case("decoder", MAPPINGS[0], feature="full") for way in (_PLAIN, _ZBV)]
    aux = [_ways(mapping)[0].case("decoder", mapping, feature="aux") for mapping in MAPPINGS[:5]]
    return [*cases, *full, *aux, *WOVEN_EIGHT]


def _ways(mapping: str) -> Sequence[Way]:
    """The plainest first; for as many stages as the mapping has ranks of a pipeline."""
    return _FOUR_STAGES if Folding.from_id(mapping).pp == 4 else _TWO_STAGES
