"""How one attention layer of the running forward weighs keys: scale, dropout, and who sees whom.

One rule for every method of context parallelism, over places in the whole sequences: a method
names the run of queries and the run of keys that it has at hand. Invariant: the blocks of a
sequence, put together, are the mask of the model in a single process.
"""

# Shapes.  B sequences   S tokens of a sequence   q queries   k keys

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fold.moe.tokens import TokenLayout


@dataclass(frozen=True)
class AttentionRule:
    """What a method needs to know beside queries, keys and values.

    Attributes:
        layout: Of the forward.
        scaling: Factor of the scores.
        dropout: Probability with which a weight is dropped.
        window: Newest places that a query sees, its own included; None sees all before it.
        sees_itself: Whether padding sees itself. Without it, a query whose keys are all padding
            gets zeros, as torch's SDPA gives.
    """

    layout: TokenLayout
    scaling: float
    dropout: float = 0.0
    window: int | None = None
    sees_itself: bool = False

    def is_plain(self) -> bool:
        """Whether nothing but the order of tokens decides what a query sees."""
        layout = self.layout
        return self.window is None and layout.valid_BS is None and layout.documents_BS is None

    def first_key(self, queries: range) -> int:
        """The earliest place that any of the queries may see."""
        return 0 if self.window is None else max(0, queries.start - self.window + 1)

    def is_empty(self, queries: range, keys: range) -> bool:
        """Whether no query may see any of the keys, by their places alone."""
        if not queries or not keys:
            return True
        return keys.start >= queries.stop or keys.stop <= self.first_key(queries)

    def mask(self, queries: range, keys: range) -> Tensor | None:
        """True where a query may see a key, bool [B or 1, 1, q, k]; None where all may.

        Args:
            queries: Run of places.
            keys: Run of places.
        """
        device = self.layout.places_s.device
        places_q1 = torch.arange(queries.start, queries.stop, device=device)[:, None]
        places_k = torch.arange(keys.start, keys.stop, device=device)
        rules: list[Tensor] = []
        if keys.stop - 1 > queries.start:
            rules.append((places_k <= places_q1)[None, None])
        if self.window is not None and keys.start < queries.stop - self.window:
            rules.append((places_k > places_q1 - self.window)[None, None])
        if (documents_BS := self.layout.documents_BS) is not None:
            of_query, of_key = (documents_BS[:, run.start : run.stop] for run in (queries, keys))
            rules.append((of_query[:, :, None] == of_key[:, None, :])[:, None])
        if (valid_BS := self.layout.valid_BS) is not None:
            rules.append(valid_BS[:, None, None, keys.start : keys.stop])
        return self._joined(rules, itself=places_k == places_q1)

    def _joined(self, rules: list[Tensor], itself: Tensor) -> Tensor | None:
        if not rules:
            return None
        seen = rules[0]
        for rule in rules[1:]:
            seen = seen & rule
        if self.sees_itself and self.layout.valid_BS is not None:
            seen = seen | itself
        return seen.expand(-1, -1, *itself.shape)
