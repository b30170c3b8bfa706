"""Which model runs under which mapping, and how close it must come.

Owns the case (one model, one mapping, clip on or off, one precision) and the lists of cases: a
telling few for every test run, the whole product for the long one. Pure data: imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_fold.topology.folding import Folding, divisors, legal_foldings

Method = Literal["all_gather", "ulysses", "ring"]
# What is computed of one forward's tokens, so that it depends on how a batch is cut. A mean over
# sequences does not, nor do the counts of a step.
_SEE_MICROBATCHES = (
    *("per_layer", "model", "global_batch", "z_loss", "aux"),
    *("capacity-local", "capacity-local-padded"),
)


@dataclass(frozen=True)
class Case:
    """One run to compare with the single-process model.

    Attributes:
        model: Key of `cases.MODELS`.
        mapping: Mapping id.
        clip: Whether gradients are clipped, which hides a factor common to all of them.
        precision: "64", or "32", which alone sees some faults of reductions.
        mutation: Fault to inject, by its name in `mutations`; empty for none.
        shard: See `FoldedConfig.data_parallel_shard`.
        feature: Key of `features.FEATURES`; empty for none.
        context_parallel_method: See `FoldedConfig.context_parallel_method`.
        batch: See `cases.sub_batch`.
        schedule: See `FoldedConfig.pipeline_schedule`; this and what follows holds for pp > 1.
        virtual_stages: See `FoldedConfig.virtual_pipeline_size`.
        num_microbatches: See `FoldedConfig.num_microbatches`.
        layout: See `FoldedConfig.pipeline_layout`.
        overlap: See `FoldedConfig.pipeline_overlap`.
    """

    model: str
    mapping: str
    clip: bool = False
    precision: Literal["64", "32"] = "64"
    mutation: str = ""
    shard: Literal["optimizer", "full"] = "optimizer"
    feature: str = ""
    context_parallel_method: Method = "all_gather"
    batch: Literal["padded", "packed", "short", "rows"] = "padded"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    num_microbatches: int | None = None
    layout: str | None = None
    overlap: bool = False

    @property
    def folding(self) -> Folding:
        """The mapping's degrees."""
        return Folding.from_id(self.mapping)

    @property
    def reference(self) -> str:
        """Key of the single-process run to compare with; dp is all that it knows of the mapping."""
        pieces = f".{self.pieces}pieces" if self.pieces > 1 else ""
        return f"{self.model}.dp{self.folding.dp}.{self._options}{pieces}"

    @property
    def pieces(self) -> int:
        """Microbatches that the single process runs one by one; 1 where they must not show."""
        sees = self.feature in _SEE_MICROBATCHES or self.model.endswith("-aux")
        return (self.num_microbatches or 1) if sees else 1

    @property
    def key(self) -> str:
        """Name of the case in folders, tables and test ids."""
        full = ".full" if self.shard == "full" else ""
        mutated = f".{self.mutation}" if self.mutation else ""
        gathers = self.context_parallel_method == "all_gather"
        method = "" if gathers else f".{self.context_parallel_method}"
        return f"{self.mapping}.{self.model}.{self._options}{method}{full}{self._pipeline}{mutated}"

    @property
    def _pipeline(self) -> str:
        if self.folding.pp == 1:
            return ""
        virtual = f".v{self.virtual_stages}" if self.virtual_stages > 1 else ""
        layout = f".{self.layout.replace('|', '_')}" if self.layout else ""
        woven = "-woven" if self.overlap else ""
        return f".{self.schedule}{woven}{virtual}.n{self.num_microbatches}{layout}"

    @property
    def _options(self) -> str:
        feature = f".{self.feature}" if self.feature else ""
        batch = f".{self.batch}" if self.batch != "padded" else ""
        return f"{'clip' if self.clip else 'noclip'}.fp{self.precision}{feature}{batch}"


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors: ||a - b|| / ||b|| of each tensor, |a - b| / |b| of the loss."""

    tensors: float
    loss: float


def tolerance_of(case: Case) -> Tolerance:
    """Tolerance of a case: fp32 rounding, or fp64 with or without Hugging Face's fp32 islands."""
    if case.precision == "32":
        return Tolerance(1e-5, 1e-5)
    if case.model.startswith("decoder"):
        return Tolerance(1e-10, 1e-10)
    # Norms, router probabilities and loss are cast to fp32 inside these models.
    return Tolerance(1e-6, 5e-7)


# Of the 100 mappings of 8 ranks: every axis large once, experts across dp and cp, copies of the
# experts.
EIGHT = (
    "tp2cp1dp4pp1-etp2ep4edp1",
    "tp4cp1dp2pp1-etp1ep8edp1",
    "tp2cp1dp4pp1-etp2ep2edp2",
    "tp8cp1dp1pp1-etp1ep4edp2",
    "tp1cp1dp8pp1-etp2ep4edp1",
    "tp4cp1dp2pp1-etp4ep1edp2",
    "tp2cp1dp4pp1-etp1ep2edp4",
    "tp1cp1dp8pp1-etp8ep1edp1",
    "tp2cp2dp2pp1-etp1ep8edp1",
    "tp2cp2dp2pp1-etp2ep4edp1",
    "tp2cp2dp2pp1-etp2ep2edp2",
    "tp2cp2dp2pp1-etp1ep4edp2",
    "tp1cp8dp1pp1-etp1ep8edp1",
    "tp1cp8dp1pp1-etp2ep1edp4",
    "tp1cp4dp2pp1-etp1ep4edp2",
    "tp1cp4dp2pp1-etp4ep2edp1",
    "tp2cp4dp1pp1-etp1ep8edp1",
    "tp4cp2dp1pp1-etp2ep4edp1",
    "tp4cp2dp1pp1-etp1ep2edp4",
    "tp1cp2dp4pp1-etp2ep4edp1",
    "tp1cp2dp4pp1-etp1ep1edp8",
)
WORLDS = (1, 2, 4, 8)
METHODS: tuple[Method, ...] = ("all_gather", "ulysses", "ring")
MAIN_MODELS = ("decoder", "mixtral", "qwen3_moe")
AUX_FORMULAS = ("per_sequence", "per_layer", "model", "global_batch", "z_loss")
VARIANTS = ("decoder-shared-bias", "decoder-tied", "mixtral-tied", "qwen3_moe-bias")

_TP2_EP4 = "tp2cp1dp2pp1-etp1ep4edp1"
_TP2_ETP2 = "tp2cp1dp2pp1-etp2ep2edp1"
_TP4_EP2 = "tp4cp1dp1pp1-etp1ep2edp2"
_TP1_EP4 = "tp1cp1dp4pp1-etp1ep4edp1"
_TP1_ETP2 = "tp1cp1dp4pp1-etp2ep2edp1"
_DATA_4 = "tp1cp1dp4pp1-etp1ep1edp4"
_TP2_EP2_OF_2 = "tp2cp1dp1pp1-etp1ep2edp1"
_ETP2_OF_2 = "tp1cp1dp2pp1-etp2ep1edp1"
_TP2_CP2 = "tp2cp2dp1pp1-etp1ep4edp1"
_CP4 = "tp1cp4dp1pp1-etp2ep2edp1"
_CP2_DP2 = "tp1cp2dp2pp1-etp1ep4edp1"

QUICK = (
    Case("decoder", _TP2_EP2_OF_2),
    Case("mixtral", _TP2_EP2_OF_2, clip=True),
    Case("qwen3_moe", _ETP2_OF_2),
    Case("decoder-shared-bias", _ETP2_OF_2, clip=True),
    Case("decoder", _TP2_EP4),
    Case("mixtral", _TP2_EP4),
    Case("qwen3_moe", _TP2_EP4, clip=True),
    Case("decoder-tied", _TP2_EP4),
    Case("decoder", _TP2_EP4, precision="32"),
    Case("decoder-shared-bias", _TP2_ETP2),
    Case("mixtral", _TP2_ETP2, clip=True),
    Case("decoder", _TP4_EP2, clip=True),
    Case("qwen3_moe-bias", _TP4_EP2),
    Case("decoder", _TP1_ETP2),
    Case("mixtral-tied", _DATA_4),
    Case("decoder", _DATA_4, clip=True),
    Case("qwen3_moe", _DATA_4, shard="full"),
    Case("decoder-tied", _TP2_ETP2, shard="full"),
    Case("decoder", _TP2_CP2),
    Case("decoder", _TP2_CP2, context_parallel_method="ulysses", batch="packed"),
    Case("decoder", _CP4, context_parallel_method="ring", batch="short"),
    Case("decoder", _TP2_EP4, feature="aux"),
    Case("decoder-groups", _TP2_ETP2, feature="bias"),
    Case("mixtral-aux", _TP4_EP2),
    Case("decoder", _TP4_EP2, feature="dedup"),
    Case("decoder-shared-bias", _TP2_ETP2, feature="all_gather"),
    Case("decoder", _TP2_EP4, feature="capacity-padded"),
    Case("mixtral", _CP2_DP2, context_parallel_method="ring", batch="packed"),
    Case("qwen3_moe", _CP2_DP2, clip=True),
    Case("mixtral", _TP2_EP2_OF_2, feature="full"),
    Case("decoder-shared-bias", _TP2_ETP2, feature="selective"),
    Case("decoder", _TP2_EP4, feature="layers"),
)
"""What every test run sees: two mappings of 2 ranks, eight of 4."""


def mappings_of(world: int) -> list[str]:
    """Mapping ids of the long run: all with pp = 1 up to 4 ranks, a selection of 8."""
    legal = legal_foldings(world, cp=divisors(world))
    return list(EIGHT) if world == 8 else [f.mapping_id for f in legal]


def closed_form(world: int) -> int:
    """Number of mappings with pp = 1, d3(world)^2, counted without listing them.

    (tp, cp, dp) and (etp, ep, edp) are ordered triples whose product is the world, chosen freely
    of one another. A prime power p^a is shared among three factors in (a + 1)(a + 2) / 2 ways, and
    d3 is the product over the primes: 1, 3, 6 and 10 for 1, 2, 4 and 8 ranks, so 1, 9, 36 and 100
    mappings.
    """
    triples = math.prod((a + 1) * (a + 2) // 2 for a in _exponents(world))
    return triples**2


def full(world: int) -> list[Case]:
    """Cases of the long run: mappings by families by clip on and off, and variants on a few.

    With cp, the decoder and one Hugging Face model each, and the methods on mappings of their own.
    """
    every = mappings_of(world)
    mappings = [mapping for mapping in every if Folding.from_id(mapping).cp == 1]
    telling = mappings[:3] if world == 8 else [m for m in mappings if m in _telling(world)]
    cases = [
        Case(model, mapping, clip=clip)
        for mapping in mappings
        for model in MAIN_MODELS
        for clip in (False, True)
    ]
    cases += [Case(model, mapping) for mapping in telling for model in VARIANTS]
    # From the middle, where tp and dp are both there: gradients are then summed over every mesh.
    middle = telling[len(telling) // 2]
    cases += [Case(model, middle, precision="32") for model in MAIN_MODELS]
    cases += [Case(model, middle, clip=True, shard="full") for model in MAIN_MODELS]
    cases += _router_cases(world) + _token_cases(world)
    cases += _recompute_cases(world) + _layer_cases(world)
    return cases + _context_cases([mapping for mapping in every if mapping not in mappings])


def _router_cases(world: int) -> list[Case]:
    """Every aux loss, bias and decision where tp, dp, ep and etp are large in turn, and with cp."""
    if world != 4:
        few = {2: (_TP2_EP2_OF_2, _ETP2_OF_2), 8: EIGHT[:5]}.get(world, mappings_of(world))
        cases = [Case("decoder", mapping, feature="aux") for mapping in few]
        cases += [Case("decoder-groups", few[0], feature="bias"), Case("mixtral-aux", few[0])]
        # Its attention is not sharded by tp, which is 1 in the last.
        return [*cases, Case("deepseek_v3", few[-1], feature="bias")]
    data = (_TP1_EP4, _TP1_ETP2)
    plain, context = (_TP2_EP4, _TP4_EP2, *data), (_TP2_CP2, _CP4, _CP2_DP2)
    cases = [Case("decoder", mapping, feature=name) for mapping in plain for name in AUX_FORMULAS]
    for mapping in (*plain, *context):
        cases += [
            Case("decoder", mapping, feature="aux"),
            Case("decoder-groups", mapping, feature="bias"),
            Case("mixtral", mapping, feature="folded"),
            Case("mixtral-aux", mapping),
        ]
    cases += [Case("deepseek_v3", mapping, feature="bias") for mapping in data]
    return [*cases, Case("decoder", _TP2_EP4, feature="balanced")]


def _token_cases(world: int) -> list[Case]:
    """Each dispatcher and each kind of capacity, where ep, etp, edp, tp and cp differ in turn."""
    if world != 4:
        return []
    dp4_ep2, dp4_ep4 = "tp1cp1dp4pp1-etp1ep2edp2", "tp1cp1dp4pp1-etp1ep4edp1"
    dispatched = (_TP1_ETP2, _TP2_EP4, _TP4_EP2, dp4_ep2, _TP2_CP2)
    cases = [
        Case(model, mapping, feature=name)
        for mapping in dispatched
        for name in ("all_gather", "dedup")
        for model in ("decoder-shared-bias", "mixtral")
    ]
    for mapping in (*dispatched, _TP2_ETP2, _CP4, _CP2_DP2, _DATA_4):
        cases += [
            Case("decoder", mapping, feature="capacity"),
            Case("qwen3_moe", mapping, feature="capacity-position"),
            Case("decoder-shared-bias", mapping, feature="capacity-padded"),
        ]
    for mapping in (_TP1_ETP2, dp4_ep4, _DATA_4, dp4_ep2):
        names = ("capacity-local", "capacity-local-padded")
        cases += [Case("decoder", mapping, clip=True, feature=name) for name in names]
    return cases


def _recompute_cases(world: int) -> list[Case]:
    """Both kinds of recomputation with tp, etp, ZeRO-3 and cp; what routers add, once more."""
    if world != 4:
        return []
    cases = []
    for name in ("selective", "full"):
        cases += [
            Case("decoder-shared-bias", _TP2_EP4, feature=name),
            Case("qwen3_moe", _TP2_ETP2, clip=True, feature=name),
            Case("mixtral", _TP1_ETP2, shard="full", feature=name),
            Case("mixtral-aux", _TP4_EP2, feature=name),
            Case("decoder", _CP2_DP2, context_parallel_method="ring", feature=name),
        ]
    return cases


def _layer_cases(world: int) -> list[Case]:
    """Layers with other expert degrees than the strategy's: with tp, cp, etp and ZeRO-3."""
    if world != 4:
        return []
    return [
        Case("mixtral", _TP1_ETP2, feature="layers"),
        Case("qwen3_moe", _TP4_EP2, clip=True, feature="layers"),
        Case("decoder", _DATA_4, shard="full", feature="layers"),
        Case("decoder-shared-bias", _TP2_CP2, feature="layers"),
    ]


def _context_cases(mappings: Sequence[str]) -> list[Case]:
    """Every mapping with cp once per kind of model, and each method on a few of them."""
    cases = [Case("decoder", mapping) for mapping in mappings]
    for i, mapping in enumerate(mappings):
        cases.append(Case(MAIN_MODELS[1 + i % 2], mapping, clip=True))
    few = [*mappings[:2], *mappings[len(mappings) // 2 :][:2]]
    for mapping in dict.fromkeys(few):
        for method in METHODS:
            cases += [
                Case("decoder-shared-bias", mapping, context_parallel_method=method),
                Case("decoder", mapping, context_parallel_method=method, batch="packed"),
                Case("mixtral", mapping, context_parallel_method=method, batch="short"),
                Case("qwen3_moe", mapping, context_parallel_method=method, batch="packed"),
            ]
    for mapping in mappings[:1]:
        cases += [
            Case("decoder", mapping, precision="32", context_parallel_method=method)
            for method in METHODS
        ]
        cases.append(Case("decoder", mapping, clip=True, shard="full"))
    return cases


def reference_requests(cases: Sequence[Case]) -> list[dict[str, object]]:
    """The single-process runs that `cases` are compared with, each once, as JSON values."""
    by_key = {
        case.reference: {
            "key": case.reference,
            "model": case.model,
            "dp": case.folding.dp,
            "clip": case.clip,
            "precision": case.precision,
            "feature": case.feature,
            "batch": case.batch,
            "pieces": case.pieces,
        }
        for case in cases
    }
    return list(by_key.values())


def _telling(world: int) -> set[str]:
    quick = {case.mapping for case in QUICK if case.folding.world == world}
    return quick or set(mappings_of(world))


def _exponents(number: int) -> list[int]:
    exponents, factor = [], 2
    while number > 1:
        power = 0
        while number % factor == 0:
            number, power = number // factor, power + 1
        exponents += [power] if power else []
        factor += 1
    return exponents
