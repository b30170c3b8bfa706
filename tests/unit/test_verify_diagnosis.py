"""What the numbers of all mappings say about the missing or doubled reduction."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lightning_fold.topology.folding import Folding, legal_foldings
from lightning_fold.verify.product.checks import completing_axes, differing_axes
from lightning_fold.verify.product.diagnosis import Deviation, Failure, diagnose

ALL = [folding.mapping_id for folding in legal_foldings(4, cp=(1, 2, 4))]
TP2 = "tp2cp1dp2pp1-etp1ep4edp1"


def size(mapping: str, axis: str) -> int:
    return Folding.from_id(mapping).size(axis)


def scaled(family: str, factors: dict[str, float]) -> tuple[list[Failure], list[Deviation]]:
    check = f"{family} gradient"
    failures = [Failure(m, check, "w", abs(f - 1), f) for m, f in factors.items()]
    deviations = [Deviation("w", family, m, 1.0, f, True, (), ()) for m, f in factors.items()]
    return failures, deviations


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "etp", "ep", "edp"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_factor_that_follows_one_degree_names_the_axis(axis: str, sign: int) -> None:
    factors = {m: size(m, axis) ** float(sign) for m in ALL if size(m, axis) > 1}
    (finding,) = diagnose(*scaled("expert", factors), ALL)
    assert finding.axes == (axis,)
    assert finding.certain
    word = "multiplied by" if sign == 1 else "divided by"
    assert finding.cause.startswith(f"{word} {axis} (factor")
    assert (finding.family, len(finding.failed), finding.run) == ("expert", len(factors), len(ALL))


def test_one_mapping_leaves_all_degrees_that_match() -> None:
    (finding,) = diagnose(*scaled("dense", {TP2: 2.0}), [TP2])
    assert finding.axes == ("tp", "dp")
    assert not finding.certain
    assert "tp or dp" in finding.cause


def test_a_factor_that_is_no_degree_is_told_as_such() -> None:
    (finding,) = diagnose(*scaled("dense", {TP2: 1.7}), [TP2])
    assert "1.7, which is no degree" in finding.cause
    assert finding.axes == ()


def copies(completing: tuple[str, ...]) -> tuple[list[Failure], list[Deviation]]:
    failure = Failure(TP2, "router gradient", "gate", 0.5, 0.7)
    return [failure], [
        Deviation("gate", "router", TP2, 0.5, 0.7, False, ("tp", "ep"), completing),
        Deviation("gate2", "router", TP2, 0.5, 0.7, False, ("tp",), completing),
    ]


def test_copies_whose_sum_is_the_reference_are_certain() -> None:
    (finding,) = diagnose(*copies(("tp",)), ALL)
    assert (finding.axes, finding.certain) == (("tp",), True)
    assert "not summed over tp" in finding.cause
    text = str(finding)
    assert all(word in text for word in ("router gradient", "gate", TP2, "ratio 0.7"))


def test_copies_that_only_differ_are_likely() -> None:
    (finding,) = diagnose(*copies(()), ALL)
    assert (finding.axes, finding.certain) == (("tp",), False)
    assert "likely not summed over tp" in finding.cause


def test_mappings_that_fail_together_name_their_axis() -> None:
    failures = [Failure(m, "outputs", "logits", 0.1, 1.0) for m in ALL if size(m, "etp") > 1]
    (finding,) = diagnose(failures, [], ALL)
    assert finding.axes == ("etp",)
    assert "exactly the mappings with etp > 1" in finding.cause
    spread = [m for m in ALL if size(m, "etp") * size(m, "ep") > 1]
    (finding,) = diagnose([Failure(m, "outputs", "x", 0.1, 1.0) for m in spread], [], ALL)
    assert finding.axes == ("etp", "ep")
    some = [m for m in ALL if size(m, "tp") == 4]
    (finding,) = diagnose([Failure(m, "outputs", "x", 0.1, 1.0) for m in some], [], ALL)
    assert (finding.axes, finding.certain) == (("tp",), False)


def test_a_loss_off_by_itself_is_told_with_the_gradients_that_it_reaches() -> None:
    loss = Failure(TP2, "outputs", "loss, step 0, dp rank 0", 0.1, 1.1)
    failures, deviations = copies(())
    found = diagnose([loss, *failures], deviations, [TP2])
    assert [finding.check for finding in found] == ["outputs", "router gradient"]
    assert "tokens are weighed wrongly" in found[0].cause
    assert "on all that ran, each with tp and dp and ep > 1" in found[0].cause
    logits = replace(loss, where="logits, step 0, dp rank 0")
    (only,) = diagnose([logits, *failures], deviations, [TP2])
    assert "weighed" not in only.cause


def test_what_fails_later_only_follows() -> None:
    routing = Failure(TP2, "routing", "layer, step 1", 17, math.nan, step=1)
    failures, deviations = copies(("tp",))
    found = diagnose(
        [routing, *failures, replace(routing, check="weights", step=3)], deviations, ALL
    )
    assert [finding.check for finding in found] == ["router gradient"]
    first = replace(routing, step=0)
    assert [f.check for f in diagnose([first, *failures], deviations, ALL)] == ["routing"]


def test_a_checkpoint_is_not_blamed_for_the_mapping_that_resumed_it() -> None:
    other = "tp1cp1dp4pp1-etp1ep2edp2"
    resume = Failure(other, "resume", "w", 0.1, 1.0, step=4, under=TP2)
    failures, deviations = copies(("tp",))
    assert len(diagnose([resume, *failures], deviations, ALL)) == 1
    (finding,) = diagnose([resume], [], ALL)
    assert finding.check == "resume"


def test_axes_are_told_from_the_ranks_own_views() -> None:
    folding = Folding.from_id(TP2)
    whole = torch.randn(3, dtype=torch.float64)
    parts = [whole * 0.3, whole * 0.7]
    views = [parts[folding.coordinates(rank)["tp"]] for rank in range(4)]
    assert differing_axes(folding, views, 1e-10) == ("tp", "ep")
    assert completing_axes(folding, views, whole, 1e-10) == ("tp",)
    assert differing_axes(folding, [whole] * 4, 1e-10) == ()
