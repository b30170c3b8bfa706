"""The folded experts container: contract, telemetry, autocast."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fold.moe.dispatch import LocalDispatcher
from lightning_fold.moe.layer import FoldedExperts, compute_dtype
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.telemetry import RoutingCounts, Telemetry


class OneRank:
    """All that `LocalDispatcher` asks of a Comm."""

    def to_host(self, tensor: Tensor, *, why: str) -> list[int]:
        return tensor.tolist()


class Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2, 6, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


@pytest.fixture
def folded() -> FoldedExperts:
    return FoldedExperts(
        Container(),
        name="layers.0.experts",
        num_experts=4,
        dispatcher=LocalDispatcher(OneRank()),
        activation=swiglu,
        telemetry=Telemetry(),
        tokens=RunningTokens(),
    )


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
    return torch.randn(10, 8, requires_grad=True), index, torch.rand(10, 2)


def events_of(folded: FoldedExperts) -> list[RoutingCounts]:
    events: list[RoutingCounts] = []
    folded.telemetry.subscribe(RoutingCounts, events.append)
    return events


def test_counts_are_those_of_the_routing_decision(folded: FoldedExperts) -> None:
    events = events_of(folded)
    hidden, index, weights = batch()
    folded.container.eval()
    folded(hidden, index, weights)
    (event,) = events
    assert event.layer == "layers.0.experts"
    assert not event.training
    assert event.counts_E.tolist() == torch.bincount(index.flatten(), minlength=4).tolist()


def test_recomputed_forward_is_counted_once(folded: FoldedExperts) -> None:
    events = events_of(folded)
    hidden, index, weights = batch()
    out = checkpoint(folded, hidden, index, weights, use_reentrant=False)
    out.square().sum().backward()
    assert hidden.grad is not None
    assert len(events) == 1


def test_experts_compute_in_the_autocast_type_and_answer_in_their_own(
    folded: FoldedExperts,
) -> None:
    hidden, index, weights = batch()
    plain = folded(hidden, index, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compute_dtype(hidden) == torch.bfloat16
        assert compute_dtype(hidden.double()) == torch.float64
        narrow = folded(hidden, index, weights)
    assert narrow.dtype == torch.float32
    assert 0 < (narrow - plain).norm() / plain.norm() < 2e-2
