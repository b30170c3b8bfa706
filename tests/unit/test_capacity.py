"""Capacity: who stays, how much room there is, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fold.config import FoldedConfig
from lightning_fold.moe.capacity import Capacity, capacity_of, keep_rows
from lightning_fold.moe.routing import Routing
from lightning_fold.moe.tokens import PeerTokens, RunningTokens, TokenLayout

# Shapes.  T tokens   K top-k   G groups with a capacity of their own


class OneRank:
    """A `Comm` without peers."""

    def size(self, axis: str) -> int:
        return 1

    def rank(self, axis: str) -> int:
        return 0

    def all_gather_rows(self, x: torch.Tensor, sizes: list[int], *, axis: str) -> torch.Tensor:
        return x


def tokens_of(*, valid: list[list[int]], peers: tuple[PeerTokens, ...] | None = None) -> Any:
    mask = torch.tensor(valid).bool()
    running = RunningTokens()
    running.moe = TokenLayout(
        mask.shape[0], mask.shape[1], torch.arange(mask.shape[1]), valid_BS=mask, peers=peers
    )
    return running


def kept(capacity: Capacity, index: list[int], weights: list[float], tokens: Any) -> list[bool]:
    """Which tokens stay of a top-1 routing over two experts."""
    routing = Routing(torch.tensor(index)[:, None], torch.tensor(weights)[:, None], 2)
    comm: Any = OneRank()
    cut = capacity.apply(tokens, comm, routing).kept_TK
    assert cut is not None
    return cut[:, 0].tolist()


@given(st.integers(0, 9), st.integers(1, 3), st.integers(0, 4), st.booleans(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_group_keeps_the_first_or_best_of_its_valid_rows(
    tokens: int, top_k: int, room: int, by_merit: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    group_TK = torch.rand(tokens, 4, generator=generator).topk(top_k, dim=1).indices
    # Few values, hence ties.
    merit_TK = torch.randint(0, 3, (tokens, top_k), generator=generator).double()
    valid_T = torch.rand(tokens, generator=generator) < 0.7
    got = keep_rows(
        group_TK,
        merit_TK if by_merit else None,
        valid_T=valid_T,
        room_G=torch.full((4,), room),
    )
    wanted = torch.zeros(tokens, top_k, dtype=torch.bool)
    for group in range(4):
        rows = [(t, k) for t in range(tokens) for k in range(top_k)]
        rows = [row for row in rows if valid_T[row[0]] and group_TK[row] == group]
        rows = sorted(rows, key=lambda row: -float(merit_TK[row])) if by_merit else rows
        for row in rows[:room]:
            wanted[row] = True
    assert torch.equal(got, wanted)


def test_local_scope_counts_the_valid_tokens_of_the_rank() -> None:
    # Four valid tokens over two experts: room for two each.
    tokens = tokens_of(valid=[[1, 1, 1], [1, 0, 0]])
    index, weights = [0, 0, 0, 1, 0, 0], [0.1, 0.3, 0.2, 0.4, 0.9, 0.9]
    by_position = Capacity(1.0, drop="position")
    assert kept(by_position, index, weights, tokens) == [True, True, False, True, False, False]
    by_weight = Capacity(1.0, drop="probability")
    assert kept(by_weight, index, weights, tokens) == [False, True, True, True, False, False]


def test_sequence_scope_counts_each_sequence() -> None:
    # Three valid tokens: room for two. One valid token: room for one.
    tokens = tokens_of(valid=[[1, 1, 1], [1, 0, 0]])
    capacity = Capacity(1.0, drop="position", scope="sequence")
    index = [0, 0, 0, 0, 0, 0]
    assert kept(capacity, index, [0.5] * 6, tokens) == [True, True, False, True, False, False]


@pytest.mark.parametrize(("factor", "room"), [(1.1, 11), (1.0, 10), (0.01, 1), (1.101, 12)])
def test_room_is_the_ceiling_of_the_written_factor(factor: float, room: int) -> None:
    # 20 * 1.1 / 2 is 11 and a little in binary floating point, whose ceiling is 12.
    counted = Capacity(factor)._room(torch.tensor([20]), Routing(*[torch.ones(20, 1)] * 2, 2))
    assert counted.tolist() == [room]


def test_slots_hold_what_any_peer_may_keep() -> None:
    peers = (PeerTokens(4, 2, 2), PeerTokens(10, 2, 5))
    routing = Routing(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), 2)
    comm: Any = OneRank()
    tokens = tokens_of(valid=[[1, 1], [1, 1]], peers=peers)
    assert Capacity(1.0, pad=True).apply(tokens, comm, routing).slots == 5
    by_sequence = Capacity(1.0, scope="sequence", pad=True)
    assert by_sequence.apply(tokens, comm, routing).slots == 6
    assert Capacity(100.0, pad=True).apply(tokens, comm, routing).slots == 10


@pytest.mark.parametrize("capacity", [Capacity(1.0, scope="sequence"), Capacity(1.0, pad=True)])
def test_a_core_that_hides_its_batch_is_refused(capacity: Capacity) -> None:
    with pytest.raises(ValueError, match=r"does not tell its batch.*`input_ids`"):
        kept(capacity, [0, 1], [0.5, 0.5], RunningTokens())


def test_experts_called_with_other_tokens_are_refused() -> None:
    tokens = tokens_of(valid=[[1, 1, 1]])
    with pytest.raises(ValueError, match="experts get 2 tokens and the call has 3"):
        kept(Capacity(1.0), [0, 1], [0.5, 0.5], tokens)


def test_without_a_layout_all_local_tokens_count() -> None:
    capacity = Capacity(1.0, drop="position")
    assert kept(capacity, [0, 0], [0.5, 0.5], RunningTokens()) == [True, False]


def test_config_makes_the_capacity() -> None:
    assert capacity_of(FoldedConfig()) is None
    options = {"capacity_scope": "sequence", "pad_to_capacity": True}
    config = FoldedConfig(capacity_factor=1.5, token_drop="position", router_options=options)
    config.check()
    assert capacity_of(config) == Capacity(1.5, "position", "sequence", pad=True)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_without_room_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"Legal capacity_factor: above 0.*`capacity_factor`"):
        FoldedConfig(capacity_factor=factor).check()


@pytest.mark.parametrize("key", ["capacity_scope", "pad_to_capacity"])
def test_options_of_no_capacity_are_refused(key: str) -> None:
    options = {key: "sequence" if key == "capacity_scope" else True}
    with pytest.raises(ValueError, match="capacity_factor=None sets none"):
        FoldedConfig(router_options=options).check()
