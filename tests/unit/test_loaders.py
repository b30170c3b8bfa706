"""What is compared of first batches, and what ranks tell each other of their ends."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_fold import loaders
from lightning_fold.loaders import digest, explain_difference

Pair = namedtuple("Pair", ["left", "right"])


class Shelf:
    """A store that lives in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class UsersLoader(DataLoader[int]):
    pass


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "PATIENCE_S", 0.1)


# ---------------------------------------------------------------- first batches


def test_digest_reads_every_tensor_of_a_batch() -> None:
    x, y = torch.arange(4), torch.zeros(2, dtype=torch.bfloat16)
    batch = {"a": [x, (y, "text")], "b": Pair(torch.tensor(True), torch.tensor(1.5))}
    assert digest(batch) == digest({"a": [x.clone(), (y, "words")], "b": batch["b"]})
    others = [
        {**batch, "a": [x + 1, (y, "text")]},
        {**batch, "a": [x, (-y, "text")]},
        {**batch, "b": Pair(torch.tensor(False), torch.tensor(1.5))},
        {**batch, "a": [x.view(2, 2), (y, "text")]},
        {**batch, "a": [x.int(), (y, "text")]},
    ]
    assert len({digest(batch), *map(digest, others)}) == 6


def test_digest_takes_any_layout() -> None:
    assert digest(torch.arange(6).view(2, 3).T) == digest(torch.tensor([[0, 3], [1, 4], [2, 5]]))
    assert digest([torch.eye(2).to_sparse(), torch.empty(0)])


def test_only_peers_of_one_dp_rank_must_agree() -> None:
    assert explain_difference([(0, "x"), (0, "x"), (1, "y"), (1, "y")], loader="x") == ""
    found = [(0, "same"), (1, "0123456789"), (0, "same"), (1, "abcdefghij")]
    text = explain_difference(found, loader="val_dataloader, loader 1")
    assert text.startswith("Ranks 1, 3 are one data-parallel rank (1 of dp=2)")
    assert "first batch of val_dataloader, loader 1 differs" in text
    assert "rank 1: 01234567, rank 3: abcdefgh" in text
    assert text.endswith("Change `val_dataloader`.")


# ---------------------------------------------------------------- ends


def notes(shelf: Shelf, rank: int, world: int = 2) -> Any:
    return loaders._Notes(shelf, "run", rank=rank, world=world)


def noted(shelf: Shelf, rank: int, loader: DataLoader[int]) -> DataLoader[int]:
    loaders._note_batches(loader, notes(shelf, rank), "loader1")
    return loader


@pytest.mark.parametrize("kind", [DataLoader, UsersLoader])
def test_a_noted_loader_reads_as_before_and_keeps_its_class(kind: Any, impatient: None) -> None:
    loader = noted(Shelf(), 0, kind(Stream(5), batch_size=2))
    assert isinstance(loader, kind)
    assert type(loader).__name__ == kind.__name__
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_the_first_to_end_refuses_when_another_goes_on() -> None:
    shelf = Shelf()
    longer = iter(noted(shelf, 1, DataLoader(Stream(3), batch_size=1)))
    shorter = iter(noted(shelf, 0, DataLoader(Stream(2), batch_size=1)))
    for _ in range(2):
        next(longer), next(shorter)
    next(longer)
    with pytest.raises(ValueError, match=r"rank 0 has no batch after 2, and rank 1 .* batch 3"):
        next(shorter)


def test_ranks_that_end_together_end() -> None:
    shelf = Shelf()
    notes(shelf, 1).write("loader1.1", 2, ended=True)
    assert len(list(noted(shelf, 0, DataLoader(Stream(2), batch_size=1)))) == 2


def test_a_rank_at_its_end_waits_for_a_slower_one() -> None:
    shelf = Shelf()
    slower = threading.Timer(0.2, lambda: notes(shelf, 1).write("loader1.1", 3))
    slower.start()
    with pytest.raises(ValueError, match="ends unevenly"):
        list(noted(shelf, 0, DataLoader(Stream(2), batch_size=1)))
    slower.join()


def test_rounds_are_counted_apart(impatient: None) -> None:
    shelf = Shelf()
    notes(shelf, 1).write("loader1.1", 3)
    notes(shelf, 1).write("loader1.2", 2, ended=True)
    loader = noted(shelf, 0, DataLoader(Stream(2), batch_size=1))
    with pytest.raises(ValueError, match="ends unevenly"):
        list(loader)
    assert len(list(loader)) == 2


def test_a_rank_that_hears_nothing_goes_on(impatient: None) -> None:
    assert len(list(noted(Shelf(), 0, DataLoader(Stream(2), batch_size=1)))) == 2
