"""Say which reduction is likely missing or doubled, from the numbers of all mappings together.

Evidence, in this order: a loss is wrong where its logits are right; peers of one axis hold
different gradients whose sum is the reference; a gradient is the reference times one factor that
follows a degree from mapping to mapping; the mappings that fail are those on which a degree is
above one. Pure: no torch, no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_fold.topology.folding import Folding

ATTENTION, MOE = ("tp", "cp", "dp"), ("etp", "ep", "edp")
AXES = (*ATTENTION, *MOE, "pp")
_PRODUCTS = (("dp", "cp"), ("tp", "cp"), ("etp", "ep"), ("tp", "cp", "dp"))


@dataclass(frozen=True)
class Deviation:
    """A parameter whose gradient is wrong under one mapping.

    Attributes:
        name: The parameter.
        family: Its family.
        mapping: Mapping id.
        error: Worst relative error over the ranks.
        ratio: Norm over reference norm, on rank 0.
        proportional: Whether it is the reference times `ratio`.
        differing: Axes along which the ranks' gradients differ.
        completing: Axes over which their sum is the reference.
    """

    name: str
    family: str
    mapping: str
    error: float
    ratio: float
    proportional: bool
    differing: tuple[str, ...]
    completing: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A check that failed under one mapping.

    Attributes:
        step: The first step at which it fails; a later one may follow from an earlier fault.
        under: Of `resume`, the mapping that resumed.
    """

    mapping: str
    check: str
    where: str
    error: float
    ratio: float
    step: int = 0
    under: str = ""


@dataclass(frozen=True)
class Finding:
    """What one check says over all mappings.

    Attributes:
        check: The check.
        family: Family of the parameter; empty where the check is about none.
        axes: Axes that explain the fault, the likeliest first; empty where none does.
        cause: In words.
        certain: Whether the numbers leave no other cause.
        parameter: Where it is worst.
        mapping: Where that is.
        ratio: Norm over reference norm there.
        failed: Mappings on which the check fails.
        run: Number of mappings compared.
    """

    check: str
    family: str
    axes: tuple[str, ...]
    cause: str
    certain: bool
    parameter: str
    mapping: str
    ratio: float
    failed: tuple[str, ...]
    run: int

    def __str__(self) -> str:
        ratio = "" if math.isnan(self.ratio) else f", ratio {self.ratio:.6g}"
        return (
            f"{self.check}: {self.cause}; worst {self.parameter} under {self.mapping}{ratio}; "
            f"{len(self.failed)} of {self.run} mappings"
        )


def diagnose(
    failures: Sequence[Failure], deviations: Sequence[Deviation], run: Sequence[str]
) -> list[Finding]:
    """Findings, one a check that is the first to fail; later checks only follow from it.

    Args:
        failures: Failed checks of all mappings, one mapping after the other, in order of
            comparison within each.
        deviations: Wrong gradients of all mappings.
        run: Mapping ids that were compared.
    """
    leading = _leading(failures)
    findings = []
    for check in dict.fromkeys(failure.check for failure in leading):
        failed = [failure for failure in leading if failure.check == check]
        family = check.removesuffix(" gradient") if check.endswith(" gradient") else ""
        own = {failure.mapping for failure in failed}
        wrong = [d for d in deviations if d.family == family and d.mapping in own]
        findings.append(_finding(failed, family, wrong, run))
    return findings


def _leading(failures: Sequence[Failure]) -> list[Failure]:
    """Of every mapping the first failure; where that is a gradient, those of all families.

    And where it is a loss: which parameters it reaches says more than its number.
    """
    leading: list[Failure] = []
    unequal = {failure.mapping for failure in failures if failure.check != "resume"}
    for mapping, group in groupby(failures, key=lambda failure: failure.mapping):
        found = sorted(group, key=lambda failure: failure.step)
        if mapping not in unequal and found[0].under in unequal:
            # The checkpoint may be right: the mapping that resumed it trains wrongly by itself.
            continue
        gradients = [f for f in found if f.check.endswith(" gradient")]
        if found[0] in gradients:
            leading += gradients
            continue
        leading.append(found[0])
        if _is_loss(found[0]):
            leading += [f for f in gradients if f.step == found[0].step]
    return leading


def _is_loss(failure: Failure) -> bool:
    """Whether a loss is the first to be wrong; a check of outputs names logits before a loss."""
    return failure.check == "outputs" and failure.where.startswith("loss")


def _finding(
    failed: Sequence[Failure], family: str, wrong: Sequence[Deviation], run: Sequence[str]
) -> Finding:
    at = max(failed, key=lambda failure: failure.error)
    mappings = tuple(dict.fromkeys(failure.mapping for failure in failed))
    axes, cause, certain = (
        _missing_sum(wrong) or _wrong_factor(wrong, run) or _pattern(at.check, mappings, run)
    )
    if _is_loss(at):
        cause = (
            f"the loss is off and its logits are right, so tokens are weighed wrongly where "
            f"microbatches or the shards of cp and dp are joined; {cause}"
        )
    return Finding(
        check=at.check,
        family=family,
        axes=axes,
        cause=cause,
        certain=certain,
        parameter=at.where,
        mapping=at.mapping,
        ratio=at.ratio,
        failed=mappings,
        run=len(run),
    )


Explanation = tuple[tuple[str, ...], str, bool]


def _missing_sum(wrong: Sequence[Deviation]) -> Explanation | None:
    """Copies that differ between the peers of an axis, in every deviation."""
    if not wrong:
        return None
    # Both ends of a pipeline hold a tied weight.
    family_axes = MOE if wrong[0].family == "expert" else (*ATTENTION, "pp")
    completing = _shared(wrong, lambda d: set(d.completing) & set(d.differing) & set(family_axes))
    if completing:
        axis = completing[0]
        return (
            (axis,),
            f"not summed over {axis} (its peers hold different gradients, and their sum over "
            f"{axis} is the reference)",
            True,
        )
    differing = _shared(wrong, lambda d: set(d.differing) & set(family_axes))
    if len(differing) == 1:
        axis = differing[0]
        return (axis,), f"likely not summed over {axis} (its peers hold different gradients)", False
    return None


def _shared(
    wrong: Sequence[Deviation], axes_of: Callable[[Deviation], set[str]]
) -> tuple[str, ...]:
    sets = [axes_of(deviation) for deviation in wrong]
    shared = set.intersection(*sets) if sets else set()
    return tuple(axis for axis in AXES if axis in shared)


def _wrong_factor(wrong: Sequence[Deviation], run: Sequence[str]) -> Explanation | None:
    """One factor a mapping, the same degree on all of them."""
    if not wrong or not all(deviation.proportional for deviation in wrong):
        return None
    factors = dict.fromkeys(run, 1.0)
    for deviation in wrong:
        known = factors[deviation.mapping]
        if known != 1.0 and not math.isclose(known, deviation.ratio, rel_tol=1e-6):
            return None
        factors[deviation.mapping] = deviation.ratio
    shown = ", ".join(sorted({f"{deviation.ratio:.6g}" for deviation in wrong}))
    times = _following(factors, 1)
    divided = _following(factors, -1)
    if times:
        words = " or ".join("*".join(axes) for axes in times)
        return (
            tuple(dict.fromkeys(axis for axes in times for axis in axes)),
            f"multiplied by {words} (factor {shown}): a doubled sum, or a division left out",
            len(times) == 1,
        )
    if divided:
        words = " or ".join("*".join(axes) for axes in divided)
        return (
            tuple(dict.fromkeys(axis for axes in divided for axis in axes)),
            f"divided by {words} (factor {shown}): a mean where a sum belongs",
            len(divided) == 1,
        )
    return (), f"multiplied by {shown}, which is no degree", False


def _following(factors: Mapping[str, float], sign: int) -> list[tuple[str, ...]]:
    """Axes whose degree, or its inverse, is the factor on every mapping; single ones first."""
    singles: list[tuple[str, ...]] = [(axis,) for axis in AXES]
    fitting = [
        axes
        for axes in (*singles, *_PRODUCTS)
        if all(
            math.isclose(factor, _degree(mapping, axes) ** sign, rel_tol=1e-6)
            for mapping, factor in factors.items()
        )
    ]
    return [axes for axes in fitting if len(axes) == 1] or fitting


def _pattern(check: str, failed: Sequence[str], run: Sequence[str]) -> Explanation:
    """Which degree the failing mappings have in common."""
    large = {axis: {m for m in run if _degree(m, (axis,)) > 1} for axis in AXES}
    where = set(failed)
    exact = tuple(axis for axis, mappings in large.items() if mappings == where)
    if exact and len(where) < len(run):
        words = " or ".join(exact)
        return exact, f"differs on exactly the mappings with {words} > 1: look there", True
    pairs = {("etp", "ep"): large["etp"] | large["ep"], ("tp", "cp"): large["tp"] | large["cp"]}
    for axes, mappings in pairs.items():
        if mappings == where and len(where) < len(run):
            return axes, f"differs on exactly the mappings with {'*'.join(axes)} > 1", True
    inside = tuple(axis for axis, mappings in large.items() if mappings and where <= mappings)
    if inside and where == set(run):
        return inside, f"differs on all that ran, each with {' and '.join(inside)} > 1", False
    if inside:
        return inside, f"differs only where {' and '.join(inside)} > 1", False
    return (), f"{check} differs on mappings that share no axis", False


def _degree(mapping: str, axes: Iterable[str]) -> int:
    folding = Folding.from_id(mapping)
    return math.prod(folding.size(axis) for axis in axes)
