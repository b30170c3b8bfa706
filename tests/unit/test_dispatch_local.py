"""Dispatch and combine without communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_fold.moe.dispatch import LocalDispatcher
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.moe.layer import FoldedExperts
from lightning_fold.moe.routing import Routing
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.telemetry import RoutingCounts, Telemetry

# Shapes.  T local tokens   K top-k   R rows of this rank's experts   E all experts


class OneRank:
    """The part of `Comm` that a local dispatch uses."""

    host_syncs = 0

    def to_host(self, tensor: torch.Tensor, *, why: str) -> list[int]:
        self.host_syncs += 1
        values: list[int] = tensor.tolist()
        return values


def _dispatcher() -> LocalDispatcher:
    comm: Any = OneRank()
    return LocalDispatcher(comm)


def _routing(index: list[list[int]], num_experts: int = 4) -> Routing:
    index_TK = torch.tensor(index, dtype=torch.int64).reshape(len(index), -1)
    weights_TK = torch.arange(1.0, index_TK.numel() + 1).view(index_TK.shape)
    return Routing(index_TK, weights_TK, num_experts)


def summed(rows: ExpertRows) -> torch.Tensor:
    """Experts that return their input: what `run_experts` would, with weights of one."""
    pairs_RD = rows.source_SD[rows.origin_R]
    return torch.zeros_like(rows.source_SD).index_add(0, rows.origin_R, pairs_RD)


def test_counts_are_per_global_expert() -> None:
    assert _routing([[3, 1], [1, 0]]).counts_E().tolist() == [1, 2, 0, 1]
    assert _routing([[3, 1], [1, 0]]).top_k == 2


def test_rows_arrive_in_expert_order_with_their_weights() -> None:
    x_TD = torch.tensor([[10.0], [20.0]])
    rows, _ = _dispatcher().dispatch(x_TD, _routing([[3, 1], [1, 0]]))
    assert rows.source_SD is x_TD
    assert rows.origin_R.tolist() == [1, 0, 1, 0]
    assert rows.weights_R.tolist() == [4.0, 2.0, 3.0, 1.0]
    assert list(rows.sizes) == rows.counts_e.tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize("index", [[[0, 1], [2, 3]], [[2, 0]], [[0, 1, 2, 3]] * 3], ids=str)
def test_combine_sums_the_rows_of_each_token(index: list[list[int]]) -> None:
    dispatcher, routing = _dispatcher(), _routing(index)
    x_TD = torch.randn(len(index), 3, dtype=torch.float64)
    rows, state = dispatcher.dispatch(x_TD, routing)
    torch.testing.assert_close(dispatcher.combine(summed(rows), state), x_TD * routing.top_k)


def test_no_tokens() -> None:
    dispatcher = _dispatcher()
    routing = Routing(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), 4)
    rows, state = dispatcher.dispatch(torch.empty(0, 3), routing)
    assert list(rows.sizes) == [0, 0, 0, 0]
    assert dispatcher.combine(summed(rows), state).shape == (0, 3)


def test_two_microbatches_may_be_in_flight() -> None:
    dispatcher = _dispatcher()
    first, second = torch.randn(2, 3), torch.randn(4, 3)
    rows_a, state_a = dispatcher.dispatch(first, _routing([[0, 1], [2, 3]]))
    rows_b, state_b = dispatcher.dispatch(second, _routing([[3, 0]] * 4))
    torch.testing.assert_close(dispatcher.combine(summed(rows_a), state_a), first * 2)
    torch.testing.assert_close(dispatcher.combine(summed(rows_b), state_b), second * 2)


def test_one_host_synchronisation_and_one_event_a_forward() -> None:
    container, telemetry, seen = torch.nn.Module(), Telemetry(), []
    container.gate_up_proj = torch.nn.Parameter(torch.randn(4, 2, 2, 3))
    container.down_proj = torch.nn.Parameter(torch.randn(4, 3, 2))
    dispatcher = _dispatcher()
    experts = FoldedExperts(
        container,
        name="mlp.experts",
        num_experts=4,
        dispatcher=dispatcher,
        activation=lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1],
        telemetry=telemetry,
        tokens=RunningTokens(),
    )
    telemetry.subscribe(RoutingCounts, seen.append)
    container.eval()
    routing = _routing([[3, 1], [1, 0]])
    experts(torch.randn(2, 3), routing.index_TK, routing.weights_TK)
    assert dispatcher.comm.host_syncs == 1
    ((layer, counts, training),) = [(e.layer, e.counts_E.tolist(), e.training) for e in seen]
    assert (layer, counts, training) == ("mlp.experts", [1, 2, 0, 1], False)
