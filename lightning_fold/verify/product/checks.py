"""Compare what the ranks of one mapping have seen with the plain loop: routing first, resume last.

Puts tokens that tp and cp have dealt back into their places before it compares. Leaves, beside the
errors, what a diagnosis needs: the factor of a wrong gradient, and the axes whose peers disagree.
"""

# Shapes.  B sequences   S tokens of a sequence   s tokens of it on one rank   K top-k

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_fold.topology.folding import Folding
from lightning_fold.verify.compare import (
    FAMILIES,
    Check,
    norm_ratio,
    relative_error,
    relative_errors,
)
from lightning_fold.verify.product.diagnosis import AXES, Deviation
from lightning_fold.verify.product.plain import STEPS
from lightning_fold.verify.product.record import Seen

NAMES = (
    *("names", "routing", "outputs"),
    *(f"{family} gradient" for family in FAMILIES),
    *("clip norm", "aux loss", "weights", "resume"),
)
"""Checks in order of comparison."""

Key = tuple[str, int, int, int, int]
"""What, step, dp rank, microbatch, and the number of the call."""
Record = Mapping[str, Any]
_Pair = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""Values and their references."""
_STEP = re.compile(r", step (\d+)")


@dataclass(frozen=True)
class StepCheck(Check):
    """A check that knows when.

    Attributes:
        step: The first step at which it fails; 0 where it passes.
    """

    step: int = 0


def compare_mapping(
    folding: Folding, ranks: Sequence[Record], plain: Record, *, tolerance: float
) -> tuple[list[StepCheck], list[Deviation]]:
    """Checks of one mapping but for `resume`, and how its wrong gradients deviate.

    Args:
        folding: The mapping.
        ranks: What each rank has written.
        plain: The plain loop's record for this degree of dp.
        tolerance: Largest relative error that passes.
    """
    actual, expected = assembled(ranks, folding), numbered(plain["seen"])
    checks = [_names(ranks[0], plain), *_routing(actual, expected)]
    losses: dict[tuple[int, int], Tensor] = {}
    for rank in reversed(ranks):
        losses |= rank["losses"]
    logits = _named(actual, expected, "logits")
    told = _of_steps(losses), _of_steps(plain["losses"])
    checks.append(compare_outputs(logits, told, tolerance))
    families = ranks[0]["families"]
    for family in FAMILIES:
        wanted = {n: g for n, g in plain["grads"].items() if families.get(n) == family}
        if wanted:
            checks.append(worst(f"{family} gradient", ranks[0]["grads"], wanted, tolerance))
    norms, expected_norms = (_by_step(record["norms"]) for record in (ranks[0], plain))
    checks.append(worst("clip norm", norms, expected_norms, tolerance))
    aux = _named(actual, expected, "aux_loss")
    if aux[1]:
        checks.append(worst("aux loss", *aux, tolerance))
    after = worst("weights", ranks[0]["weights"], plain["weights"], tolerance)
    checks.append(replace(after, step=STEPS))
    return checks, list(_deviations(folding, ranks, plain, tolerance))


def compare_outputs(logits: _Pair, losses: _Pair, tolerance: float) -> StepCheck:
    """Logits and losses as one check: a loss is named only if the logits of its step are right."""
    both = [worst("outputs", *pair, tolerance) for pair in (logits, losses) if pair[1]]
    failed = [check for check in both if not check.passed]
    if failed:
        return min(failed, key=lambda check: check.step)
    return max(both, key=lambda check: check.error)


def compare_resumed(
    ranks: Sequence[Record], plain: Mapping[str, Tensor], tolerance: float
) -> StepCheck:
    """The check `resume`: weights one step after a save, a reshard and a resume."""
    return replace(worst("resume", ranks[0]["resumed"], plain, tolerance), step=STEPS + 1)


def worst(
    name: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> StepCheck:
    """The tensor that is furthest from its reference; a missing one is infinitely far.

    Of the first step at which one is too far: what is off later may only follow from it.
    """
    errors = relative_errors(actual, expected)
    far = {key: _step_of(key) for key, error in errors.items() if not error <= tolerance}
    step = min(far.values(), default=0)
    first = [key for key, at in far.items() if at == step] or list(errors)
    where = max(first, key=errors.__getitem__)
    ratio = norm_ratio(actual.get(where), expected[where])
    return StepCheck(name, errors[where], tolerance, where, ratio, step)


def numbered(seen: Sequence[Seen]) -> dict[Key, Tensor]:
    """Values by where they belong."""
    values: dict[Key, Tensor] = {}
    for item in seen:
        values[_next_key(item, values)] = item.value
    return values


def assembled(ranks: Sequence[Record], folding: Folding) -> dict[Key, Tensor]:
    """What the ranks have seen, whole: tokens in the order of the batch."""
    out: dict[Key, Tensor] = {}
    stages = itertools.product(range(folding.dp), range(folding.pp))
    for stage in stages:
        where = [(rank["coordinates"]["dp"], rank["coordinates"]["pp"]) for rank in ranks]
        peers = [rank["seen"] for rank, own in zip(ranks, where, strict=True) if own == stage]
        for calls in zip(*peers, strict=True):
            key = _next_key(calls[0], out)
            out[key] = join_parts(calls)
    return out


def join_parts(parts: Sequence[Seen]) -> Tensor:
    """One tensor from the parts of peers; without places, every peer has all of it."""
    first = parts[0]
    if first.places_s is None:
        return first.value
    is_routing = first.what != "logits"
    shape = (first.sequences, first.length, first.value.shape[-1])
    whole_BSK = first.value.new_full(shape, -1)
    for part in parts:
        assert part.places_s is not None
        rows = part.value.view(first.sequences, -1, shape[-1]) if is_routing else part.value
        whole_BSK[:, part.places_s] = rows
    return whole_BSK.flatten(0, 1) if is_routing else whole_BSK


def _next_key(seen: Seen, known: Mapping[Key, Tensor]) -> Key:
    number = 0
    while (seen.what, *seen.at, seen.microbatch, number) in known:
        number += 1
    return (seen.what, *seen.at, seen.microbatch, number)


def _of_steps(losses: Mapping[tuple[int, int], Tensor]) -> dict[str, Tensor]:
    """In fp64: a model may make its loss in another dtype than a sum of microbatches has."""
    return {_place(("loss", *at, 0, 0)): value.double() for at, value in losses.items()}


def _names(first: Record, plain: Record) -> StepCheck:
    wrong = set(first["weights"]) ^ set(plain["weights"])
    wrong |= set(first["grads"]) ^ set(plain["grads"])
    return StepCheck("names", len(wrong), 0, ", ".join(sorted(wrong)[:3]), math.nan)


def _routing(actual: Mapping[Key, Tensor], expected: Mapping[Key, Tensor]) -> Iterator[StepCheck]:
    """Differing decisions; nothing where the model's routing cannot be seen."""
    wanted = {k: v for k, v in expected.items() if k[0] not in ("logits", "aux_loss")}
    if not wanted:
        return
    wrong = {key: _differing(actual.get(key), value) for key, value in wanted.items()}
    first = min((key for key, count in wrong.items() if count), key=lambda k: k[1], default=None)
    place, step = (_place(first), first[1]) if first else ("", 0)
    yield StepCheck("routing", sum(wrong.values()), 0, place, math.nan, step)


def _differing(actual: Tensor | None, expected: Tensor) -> int:
    if actual is None or actual.shape != expected.shape:
        return expected.numel()
    return int((actual != expected).sum())


def _named(
    actual: Mapping[Key, Tensor], expected: Mapping[Key, Tensor], what: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return (
        {_place(key): value for key, value in actual.items() if key[0] == what},
        {_place(key): value for key, value in expected.items() if key[0] == what},
    )


def _place(key: Key) -> str:
    what, step, dp_rank, microbatch, number = key
    part = f", microbatch {microbatch}" if microbatch else ""
    again = f", call {number}" if number else ""
    return f"{what}, step {step}, dp rank {dp_rank}{part}{again}"


def _step_of(place: str) -> int:
    """The step that `_place` has written; 0 for a parameter."""
    found = _STEP.search(place)
    return int(found[1]) if found else 0


def _by_step(norms: Sequence[float]) -> dict[str, Tensor]:
    return {
        f"norm, step {i}": torch.tensor(norm, dtype=torch.float64) for i, norm in enumerate(norms)
    }


# What the diagnosis needs.


def _deviations(
    folding: Folding, ranks: Sequence[Record], plain: Record, tolerance: float
) -> Iterator[Deviation]:
    families = ranks[0]["families"]
    for name, expected in plain["grads"].items():
        views = [rank["grads"].get(name) for rank in ranks]
        if any(view is None or view.shape != expected.shape for view in views):
            continue
        error = max(relative_error(view, expected) for view in views)
        if error <= tolerance:
            continue
        ratio = norm_ratio(views[0], expected)
        scaled = relative_error(views[0], expected * ratio) if ratio > 0 else math.inf
        yield Deviation(
            name=name,
            family=families.get(name, ""),
            mapping=folding.mapping_id,
            error=error,
            ratio=ratio,
            proportional=scaled <= 10 * tolerance,
            differing=differing_axes(folding, views, tolerance),
            completing=completing_axes(folding, views, expected, tolerance),
        )


def differing_axes(folding: Folding, views: Sequence[Tensor], tolerance: float) -> tuple[str, ...]:
    """Axes along which peers hold different gradients of one parameter."""
    return tuple(
        axis
        for axis in _axes(folding)
        if any(
            relative_error(views[rank], views[group[0]]) > tolerance
            for group in folding.groups(axis)
            for rank in group[1:]
        )
    )


def completing_axes(
    folding: Folding, views: Sequence[Tensor], expected: Tensor, tolerance: float
) -> tuple[str, ...]:
    """Axes over which the sum of the peers' gradients is the reference."""
    return tuple(
        axis
        for axis in _axes(folding)
        if all(
            relative_error(sum_of([views[rank] for rank in group]), expected) <= 10 * tolerance
            for group in folding.groups(axis)
        )
    )


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Their sum."""
    return torch.stack(list(tensors)).sum(0)


def _axes(folding: Folding) -> list[str]:
    return [axis for axis in AXES if folding.size(axis) > 1]
