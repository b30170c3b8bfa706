"""Layers know which tokens they see, also when backward repeats one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fold.model.inspect import ModelParts
from lightning_fold.model.token_layout import TokenWatch, documents_of, layout_of
from lightning_fold.moe.tokens import RunningTokens


class Ranks:
    """All that the watch asks of a Comm."""

    def __init__(self, cp: int = 1, tp: int = 1, cp_rank: int = 0, tp_rank: int = 0) -> None:
        self.sizes, self.ranks = {"cp": cp, "tp": tp}, {"cp": cp_rank, "tp": tp_rank}

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    def rank(self, axis: str) -> int:
        return self.ranks[axis]


class Layer(nn.Module):
    def __init__(self, tokens: RunningTokens) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.tokens = tokens
        self.seen: list[int] = []

    def forward(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        assert self.tokens.moe is not None
        self.seen.append(self.tokens.moe.num_tokens)
        return hidden * self.weight


class Core(nn.Module):
    def __init__(self, tokens: RunningTokens, repeats: bool) -> None:
        super().__init__()
        self.layer, self.repeats = Layer(tokens), repeats

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = torch.zeros(*input_ids.shape, requires_grad=True)
        angles = (hidden.detach().cos(), hidden.detach().sin())
        if self.repeats:
            return checkpoint(self.layer, hidden, position_embeddings=angles, use_reentrant=False)
        return self.layer(hidden, position_embeddings=angles)


def watched(comm: Any, *, repeats: bool = False) -> tuple[Core, RunningTokens]:
    tokens = RunningTokens()
    core = Core(tokens, repeats)
    parts = ModelParts("model", core, (), (), (), (("model.layer", core.layer),))
    TokenWatch(tokens, comm).install(parts)
    return core, tokens


def test_a_repeated_layer_sees_the_tokens_of_its_own_forward() -> None:
    core, _ = watched(Ranks(), repeats=True)
    first, second = core(torch.zeros(2, 3)), core(torch.zeros(1, 5))
    first.sum().backward()
    second.sum().backward()
    assert core.layer.seen == [6, 5, 6, 5]


def test_padding_and_sequences_of_the_tokens_of_one_rank() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    arguments = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "attention_mask": mask}
    layout = layout_of(arguments, Ranks(cp=2, cp_rank=0))
    assert layout is not None
    # Five tokens in chunks of 2, 1, 1 and 1: this rank has the first and the last.
    assert layout.places_s.tolist() == [0, 1, 4]
    valid = layout.valid_T()
    assert valid is not None
    assert valid.tolist() == [True, True, False, False, True, True]
    assert layout.sequence_T().tolist() == [0, 0, 0, 1, 1, 1]


def test_tp_ranks_hold_runs_of_what_their_cp_rank_holds() -> None:
    core, tokens = watched(Ranks(tp=2, tp_rank=1))
    core(torch.zeros(2, 5))
    assert tokens.attention is not None
    assert tokens.attention.places_s.tolist() == [0, 1, 2, 3, 4]
    assert tokens.moe is not None
    assert tokens.moe.places_s.tolist() == [3, 4]


def test_documents_begin_where_positions_do_not_follow() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    documents = documents_of(positions, (2, 6), None)
    assert documents is not None
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]]
    assert documents_of(positions, (2, 6), torch.ones(2, 6)) is None


@pytest.mark.parametrize("arguments", [{}, {"input_ids": torch.zeros(3)}, {"x": torch.ones(2, 2)}])
def test_a_core_that_does_not_tell_its_batch_has_no_layout(arguments: dict[str, Tensor]) -> None:
    assert layout_of(arguments, Ranks()) is None
