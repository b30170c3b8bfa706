"""Compare one case with its reference: routing first, loss last, every parameter, family by family.

A check is a relative error with its tolerance, the place of the worst value and the ratio of norms
there: a ratio of 2 or of 1/ep tells more than an error of 1. Reads files; starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fold.verify.plan import Case, tolerance_of

SMALLEST_NORM = 1e-6
"""A family whose reference gradient is smaller than this is not tested by comparing it."""


FAMILIES = ("dense", "shared", "router", "expert")
CHECKS = (
    *("names", "routing", "logits"),
    *(f"{family} gradient" for family in FAMILIES),
    *("clip norm", "weights", "buffers", "loss"),
)
"""Names of all checks, in order of comparison."""
_PARTS = {".experts.": "expert", ".mlp.gate.": "router", ".shared_": "shared"}


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: What was compared.
        error: Worst relative error; for names and routing the number of differences.
        tolerance: Largest error that passes.
        where: Tensor with the worst error.
        ratio: Norm over reference norm there.
    """

    name: str
    error: float
    tolerance: float
    where: str = ""
    ratio: float = 1.0

    @property
    def passed(self) -> bool:
        """Whether the error is small; NaN is not."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        sign = "<=" if self.passed else ">"
        place = f" at {self.where}, ratio {self.ratio:.6f}" if self.where else ""
        return f"{self.name}: {self.error:.1e} {sign} {self.tolerance:.0e}{place}"


@dataclass(frozen=True)
class Outcome:
    """What became of one case.

    Attributes:
        case: The case.
        checks: In order of comparison.
        family_norms: Reference gradient norm of each family.
        refusal: Why set-up refused the mapping.
        failure: Why there is no result: a crash or a hang.
    """

    case: Case
    checks: Sequence[Check] = ()
    family_norms: Mapping[str, float] = field(default_factory=dict)
    refusal: str | None = None
    failure: str | None = None

    @property
    def failed_checks(self) -> list[Check]:
        """Checks beyond their tolerance."""
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """Whether everything was compared and is close."""
        return bool(self.checks) and not self.failed_checks

    def explain(self) -> str:
        """All checks, or why there are none."""
        lines = [f"{'ok  ' if check.passed else 'FAIL'} {check}" for check in self.checks]
        reason = self.failure or self.refusal
        return "\n".join([self.case.key, *([reason] if reason else []), *lines])


def compare_case(case: Case, folder: Path, references: Path) -> Outcome:
    """Compare what the ranks have written with the reference.

    Args:
        case: The case.
        folder: Holds `rank<r>.pt` of every rank.
        references: Holds the references by key.
    """
    ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(case.folding.world)]
    refusals = {rank.get("refusal") for rank in ranks}
    if refusals != {None}:
        reason = "; ".join(sorted(str(refusal) for refusal in refusals))
        together = len(refusals) == 1
        return Outcome(case, refusal=reason) if together else Outcome(case, failure=reason)
    reference = torch.load(references / f"{case.reference}.pt")
    norms = family_norms(reference["grads"])
    return Outcome(case, tuple(_checks(case, ranks, reference, norms)), norms)


def family_of(name: str) -> str:
    """Family of a parameter by its name alone, apart from the strategy's own classification."""
    for part, family in _PARTS.items():
        if part in name:
            return family
    return "dense"


def family_norms(grads: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of the gradient of each family that the model has."""
    members = {family: of_family(grads, family).values() for family in FAMILIES}
    return {
        family: float(torch.stack([grad.double().norm() for grad in found]).norm())
        for family, found in members.items()
        if found
    }


def of_family(grads: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Tensors of one family."""
    return {name: grad for name, grad in grads.items() if family_of(name) == family}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||a - b|| / ||b|| in fp64; infinite where shapes or dtypes differ or only `b` is zero."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    difference = float((actual.double() - expected.double()).norm())
    scale = float(expected.double().norm())
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale if math.isfinite(difference) else math.inf


def relative_errors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """Relative error of every expected tensor; a missing one is infinitely far."""
    return {
        key: relative_error(actual[key], value) if key in actual else math.inf
        for key, value in expected.items()
    }


def norm_ratio(actual: Tensor | None, expected: Tensor) -> float:
    """Norm over reference norm; NaN where there is no value, or the reference is zero."""
    scale = float(expected.double().norm())
    return float(actual.double().norm()) / scale if actual is not None and scale else math.nan


def _checks(
    case: Case,
    ranks: Sequence[dict[str, Any]],
    reference: dict[str, Any],
    norms: Mapping[str, float],
) -> Iterable[Check]:
    first, limit = ranks[0], tolerance_of(case)
    yield _names(ranks, reference)
    yield _routing(ranks, reference, case.folding.dp)
    logits = _interleaved([_whole_logits(ranks, rank) for rank in range(case.folding.dp)])
    yield _worst("logits", _numbered(logits), _numbered(reference["logits"]), limit.tensors)
    for family, norm in norms.items():
        actual, expected = (of_family(run["grads"], family) for run in (first, reference))
        tolerance = limit.tensors if norm > SMALLEST_NORM else -1.0
        yield _worst(f"{family} gradient", actual, expected, tolerance)
    if case.clip:
        actual, expected = _numbered(first["norms"]), _numbered(reference["norms"])
        yield _worst("clip norm", actual, expected, limit.tensors)
    yield _worst("weights", first["weights"], reference["weights"], limit.tensors)
    if reference["buffers"]:
        yield _buffers(ranks, reference["buffers"])
    yield _losses(ranks, reference["losses"], limit.loss)


def _names(ranks: Sequence[dict[str, Any]], reference: dict[str, Any]) -> Check:
    """Parameters with a gradient, parameters, and their families, those of all stages together."""
    first, expected = ranks[0], {name: family_of(name) for name in reference["weights"]}
    told = {(name, family) for rank in ranks for name, family in rank["families"].items()}
    wrong = set(first["weights"]) ^ set(expected) | set(first["grads"]) ^ set(reference["grads"])
    wrong |= {name for name, _ in told ^ set(expected.items())}
    return Check("names", len(wrong), 0, ", ".join(sorted(wrong)[:3]))


def _routing(ranks: Sequence[dict[str, Any]], reference: dict[str, Any], dp: int) -> Check:
    """Differing decisions; each rank has noted which places of the sequences it saw.

    A layer that two stages have run differs by all that it has decided.
    """
    wrong = 0
    for layer, expected in enumerate(reference["routing"]):
        holders = [rank for rank in ranks if rank["routing"][layer]]
        if len({rank["coordinates"]["pp"] for rank in holders}) != 1:
            wrong += sum(index.numel() for index in expected)
            continue
        owners = [
            _join_decisions([r for r in holders if r["coordinates"]["dp"] == dp_rank], layer)
            for dp_rank in range(dp)
        ]
        actual = _interleaved(owners)
        wrong += abs(len(actual) - len(expected))
        for a, b in zip(actual, expected, strict=False):
            wrong += int((a != b).sum()) if a.shape == b.shape else b.numel()
    return Check("routing", wrong, 0)


def _buffers(ranks: Sequence[dict[str, Any]], expected: Mapping[str, Tensor]) -> Check:
    """Every rank of the stages that have one has the whole of it, equal to the last bit."""
    numbered = list(enumerate(ranks))
    own = {f"{n} on rank {r}": b for r, rank in numbered for n, b in rank["buffers"].items()}
    wanted = {}
    for name, buffer in expected.items():
        stages = {rank["coordinates"]["pp"] for rank in ranks if name in rank["buffers"]}
        for r, rank in numbered:
            if not stages or rank["coordinates"]["pp"] in stages:
                wanted[f"{name} on rank {r}"] = buffer
    return _worst("buffers", own, wanted, 0.0)


def _join_decisions(peers: Sequence[dict[str, Any]], layer: int) -> list[Tensor]:
    """Decisions [T, K] of every forward from those [B * s, K] of the ranks of one dp rank."""
    joined = []
    for forward in range(len(peers[0]["places"])):
        places = [peer["places"][forward] for peer in peers]
        rows = [peer["routing"][layer][forward] for peer in peers]
        sequences = sum(map(len, rows)) // sum(map(len, places))
        parts = [r.view(sequences, len(p), r.shape[1]) for r, p in zip(rows, places, strict=True)]
        joined.append(_in_order(parts, places).flatten(0, 1))
    return joined


def _whole_logits(ranks: Sequence[dict[str, Any]], dp_rank: int) -> list[Tensor]:
    """Logits [B, S, V] of every batch, from the stage that has them; tp peers have the same."""
    peers = [
        rank
        for rank in ranks
        if (rank["coordinates"]["dp"], rank["coordinates"]["tp"]) == (dp_rank, 0) and rank["logits"]
    ]
    forwards = range(len(peers[0]["logits"]))
    return [
        _in_order([p["logits"][i] for p in peers], [p["logit_places"][i] for p in peers])
        for i in forwards
    ]


def _losses(ranks: Sequence[dict[str, Any]], expected: Sequence[Any], tolerance: float) -> Check:
    """The loss of every batch, on every stage."""
    actual: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for stage in sorted({rank["coordinates"]["pp"] for rank in ranks}):
        place = {"pp": stage, "tp": 0, "cp": 0}
        owners = [r["losses"] for r in ranks if place.items() <= r["coordinates"].items()]
        actual |= {f"{i} on stage {stage}": x for i, x in _numbered(_interleaved(owners)).items()}
        wanted |= {f"{i} on stage {stage}": x for i, x in _numbered(expected).items()}
    return _worst("loss", actual, wanted, tolerance)


def _in_order(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Parts [B, s, ...] of sequences, joined by the places of their tokens."""
    return torch.cat(list(parts), dim=1)[:, torch.cat(list(places)).argsort()]


def _interleaved(owners: Sequence[Sequence[Any]]) -> list[Any]:
    """The reference's order: every dp rank's first step, then every dp rank's second, and so on."""
    return [value for step in zip(*owners, strict=True) for value in step]


def _numbered(values: Sequence[Any]) -> dict[str, Tensor]:
    return {
        # A plain float would become fp32, and errors below 1e-7 invisible.
        str(i): torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value
        for i, value in enumerate(values)
    }


def _worst(
    name: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> Check:
    """The tensor that is furthest from its reference; a missing one is infinitely far."""
    errors = relative_errors(actual, expected)
    where = max(errors, key=errors.__getitem__)
    return Check(
        name, errors[where], tolerance, where, norm_ratio(actual.get(where), expected[where])
    )
