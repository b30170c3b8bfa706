"""Which tokens of the batch a rank holds inside the layers, as a value.

Routers and experts see rows [T, D] and nothing of the batch. What needs more (padding, the
sequence that a token belongs to, its place in it) reads the layout of the forward that runs. It
is set anew at the entry of every layer, also when backward repeats one: two forwards may be in
flight, and a repeated layer then sees its own.
"""

# Shapes.  B sequences   S tokens of a sequence   s tokens of it on this rank   T = B*s

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class PeerTokens(NamedTuple):
    """What one rank holds: T tokens, of B sequences of S tokens each."""

    tokens: int
    sequences: int
    length: int


@dataclass(frozen=True)
class TokenLayout:
    """The tokens [B, s] of this rank, flattened to [T] in that order inside MoE layers.

    What is said of whole sequences is known on every rank: cp and tp peers read the same batch.

    Attributes:
        num_sequences: B.
        length: S, tokens of each whole sequence.
        places_s: int64, place in its sequence of each token of this rank.
        valid_BS: bool, False at padding; None where nothing is padding.
        documents_BS: int64, number of the document within a packed sequence; None where a
            sequence is one document.
        peers: What every rank of ep x etp holds; None unless static shapes need it.
    """

    num_sequences: int
    length: int
    places_s: Tensor
    valid_BS: Tensor | None = None
    documents_BS: Tensor | None = None
    peers: tuple[PeerTokens, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_sequences * self.places_s.shape[0]

    def valid_T(self) -> Tensor | None:
        """Whether each token of this rank is none of the padding, bool [T]; None if all are."""
        if self.valid_BS is None:
            return None
        return self.valid_BS.index_select(1, self.places_s).reshape(-1)

    def sequence_T(self) -> Tensor:
        """Number of the sequence of each token of this rank, int64 [T]."""
        size = self.places_s.shape[0]
        return torch.arange(self.num_sequences, device=self.places_s.device).repeat_interleave(
            size, output_size=self.num_sequences * size
        )

    def part(self, start: int, stop: int) -> TokenLayout:
        """The layout of a run of this rank's tokens, as tensor parallelism deals them."""
        return replace(self, places_s=self.places_s[start:stop])


class RunningTokens:
    """The layouts of the forward that runs; None outside of models that tell their batch.

    Attributes:
        attention: What attention sees: this cp rank's tokens.
        moe: What the rest of a layer sees: this tp rank's part of them.
        in_pieces: Whether a layer is run in pieces (`pipeline.segments`), which are repeated one
            by one.
    """

    def __init__(self) -> None:
        self.attention: TokenLayout | None = None
        self.moe: TokenLayout | None = None
        self.in_pieces = False


_REPEATING: ContextVar[bool] = ContextVar("repeating", default=False)


@contextmanager
def repeating() -> Iterator[None]:
    """Say that modules inside are called a second time for one forward: hooks count it once."""
    before = _REPEATING.set(True)
    try:
        yield
    finally:
        _REPEATING.reset(before)


def in_backward() -> bool:
    """Whether a forward that has been seen is repeated: by autograd, or by who says `repeating`."""
    task: int = torch._C._current_graph_task_id()
    return task != -1 or _REPEATING.get()
