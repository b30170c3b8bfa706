"""How the tokens of a sequence are dealt to ranks."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fold.topology import sequence
from lightning_fold.topology.sequence import (
    balanced_sizes,
    zigzag_chunks,
    zigzag_places,
    zigzag_sizes,
)

lengths, degrees = st.integers(0, 200), st.integers(1, 16)


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(sequence).failed == 0


@given(lengths, degrees)
def test_balanced_sizes_cover_the_length_and_differ_by_one(length: int, parts: int) -> None:
    sizes = balanced_sizes(length, parts)
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(lengths, degrees)
def test_zigzag_deals_every_place_once_and_evenly(length: int, cp: int) -> None:
    places = [zigzag_places(length, cp=cp, rank=rank) for rank in range(cp)]
    assert sorted(place for held in places for place in held) == list(range(length))
    assert all(held == sorted(held) for held in places)
    sizes = zigzag_sizes(length, cp=cp)
    assert sizes == [len(held) for held in places]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 12), st.integers(1, 8))
def test_zigzag_balances_the_pairs_of_a_causal_mask(each: int, cp: int) -> None:
    pairs = [
        sum(place + 1 for place in zigzag_places(2 * cp * each, cp=cp, rank=rank))
        for rank in range(cp)
    ]
    assert len(set(pairs)) == 1


@pytest.mark.parametrize("length", [0, 1, 7])
def test_one_rank_holds_the_whole_sequence(length: int) -> None:
    early, late = zigzag_chunks(length, cp=1, rank=0)
    assert [*early, *late] == list(range(length))
