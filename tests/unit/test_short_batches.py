"""Batches with fewer rows than a schedule needs microbatches: what is run instead."""

from __future__ import annotations

import pytest

from lightning_fold.pipeline.actions import B, F
from lightning_fold.pipeline.schedules import actions_of
from lightning_fold.pipeline.short import actions_of_few, is_too_few, nearest_count
from lightning_fold.pipeline.simulate import Costs, simulate


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_few_microbatches_run_where_the_stages_lie(name: str, pp: int) -> None:
    usual = actions_of(name, pp=pp, vpp=2, num_microbatches=2 * pp)
    for few in range(1, 2 * pp):
        assert is_too_few(name, pp=pp, vpp=2, num_microbatches=few)
        plan = actions_of_few(name, pp=pp, vpp=2, num_microbatches=few)
        assert plan.placement == usual.placement
        assert not plan.delays_weights
        for rank, listed in plan.actions.items():
            kinds = [action.computation_type for action in listed]
            assert kinds == [F] * 2 * few + [B] * 2 * few, rank
        assert simulate(plan, Costs()).makespan > 0
    assert not is_too_few(name, pp=pp, vpp=2, num_microbatches=2 * pp)


def test_the_nearest_legal_number_of_microbatches_is_not_larger() -> None:
    rounds = "interleaved_zero_bubble"
    assert nearest_count(rounds, pp=4, vpp=2, num_microbatches=13) == 12
    assert nearest_count(rounds, pp=4, vpp=2, num_microbatches=3) == 3
    assert nearest_count("zbv", pp=2, vpp=2, num_microbatches=7) == 7
    assert nearest_count("zbv", pp=2, vpp=2, num_microbatches=3) == 3, "none is legal"
    assert nearest_count("1f1b", pp=4, vpp=1, num_microbatches=1) == 1
