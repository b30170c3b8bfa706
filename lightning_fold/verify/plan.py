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
    """

    model: str
    mapping: str
    clip: bool = False
    precision: Literal["64", "32"] = "64"
    mutation: str = ""
    shard: Literal["optimizer", "full"] = "optimizer"
    feature: str = ""

    @property
    def folding(self) -> Folding:
        """The mapping's degrees."""
        return Folding.from_id(self.mapping)

    @property
    def reference(self) -> str:
        """Key of the single-process run to compare with; dp is all that it knows of the mapping."""
        return f"{self.model}.dp{self.folding.dp}.{self._options}"

    @property
    def key(self) -> str:
        """Name of the case in folders, tables and test ids."""
        full = ".full" if self.shard == "full" else ""
        mutated = f".{self.mutation}" if self.mutation else ""
        return f"{self.mapping}.{self.model}.{self._options}{full}{mutated}"

    @property
    def _options(self) -> str:
        feature = f".{self.feature}" if self.feature else ""
        return f"{'clip' if self.clip else 'noclip'}.fp{self.precision}{feature}"


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


# Of the 40 mappings of 8 ranks: every axis large once, experts across dp, copies of the experts.
EIGHT = (
    "tp2cp1dp4pp1-etp2ep4edp1",
    "tp4cp1dp2pp1-etp1ep8edp1",
    "tp2cp1dp4pp1-etp2ep2edp2",
    "tp8cp1dp1pp1-etp1ep4edp2",
    "tp1cp1dp8pp1-etp2ep4edp1",
    "tp4cp1dp2pp1-etp4ep1edp2",
    "tp2cp1dp4pp1-etp1ep2edp4",
    "tp1cp1dp8pp1-etp8ep1edp1",
)
WORLDS = (1, 2, 4, 8)
MAIN_MODELS = ("decoder", "mixtral", "qwen3_moe")
VARIANTS = ("decoder-shared-bias", "decoder-tied", "mixtral-tied", "qwen3_moe-bias")

_TP2_EP4 = "tp2cp1dp2pp1-etp1ep4edp1"
_TP2_ETP2 = "tp2cp1dp2pp1-etp2ep2edp1"
_TP4_EP2 = "tp4cp1dp1pp1-etp1ep2edp2"
_TP1_ETP2 = "tp1cp1dp4pp1-etp2ep2edp1"
_DATA_4 = "tp1cp1dp4pp1-etp1ep1edp4"
_TP2_EP2_OF_2 = "tp2cp1dp1pp1-etp1ep2edp1"
_ETP2_OF_2 = "tp1cp1dp2pp1-etp2ep1edp1"

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
)
"""What every test run sees: two mappings of 2 ranks, five of 4."""


def mappings_of(world: int) -> list[str]:
    """Mapping ids of the long run: all with cp = pp = 1 up to 4 ranks, a selection of 8."""
    return list(EIGHT) if world == 8 else [f.mapping_id for f in legal_foldings(world)]


def closed_form(world: int) -> int:
    """Number of mappings with cp = pp = 1, d(world) * d3(world), counted without listing them."""
    triples = math.prod((a + 1) * (a + 2) // 2 for a in _exponents(world))
    return len(divisors(world)) * triples


def full(world: int) -> list[Case]:
    """Cases of the long run: mappings by families by clip on and off, and variants on a few."""
    mappings = mappings_of(world)
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
