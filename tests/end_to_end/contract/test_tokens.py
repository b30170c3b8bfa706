"""Degenerate routings on four ranks: dispatch, experts and combine against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from contract.launch import Run
from contract.scenarios_tokens import ROUTINGS, reference


@pytest.mark.parametrize("mapping", ["ep2etp2", "dp4", "tp2ep4"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_match_a_loop_over_tokens(routing: str, mapping: str, four: Run) -> None:
    wanted = reference(routing, 4)
    for rank, result in enumerate(four.ranks(f"tokens@{mapping}")):
        got = result[routing]
        for name in ("out", "hidden", "weights"):
            torch.testing.assert_close(
                got[name], wanted["ranks"][rank][name], rtol=1e-12, atol=1e-13
            )
        for name in ("gate_up_proj", "down_proj"):
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-12, atol=1e-13)
        assert got["syncs"] == 1
