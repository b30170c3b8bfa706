"""Ring attention: keys and values travel from rank to rank, and nobody ever holds all of them.

For cp = 4, rank 1 attends in four steps to the keys of ranks 1, 0, 3, 2; while it works on one
block, the next one is on the wire. Partial results are joined by an online softmax in at least
fp32. Backward makes the same tour, and the gradient of a block travels with it until it is home.
Invariant: one message a step each way, whatever is masked. Scores of one pair of chunks, (S/2cp)^2
a head, are the largest tensor. Dropout is refused: its masks would have to be replayed.
"""

# Shapes.  B sequences   S tokens of a sequence   s of them on this rank   H query heads
#          G key/value heads   R query heads of one of them   q queries   k keys   C head width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_fold.model.context.rule import AttentionRule
from lightning_fold.topology.comm import Comm, Pending
from lightning_fold.topology.sequence import zigzag_chunks

AXIS = "cp"


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, comm: Comm, rule: AttentionRule
) -> Tensor:
    """Attend from this rank's places to all. Collective over cp, forward and backward.

    Arguments and result are those of `dense.gathered_attention`.
    """
    assert rule.dropout == 0, "set-up refuses dropout under ring attention"
    out: Tensor = _Ring.apply(query, key, value, _Tour(comm, rule))
    return out


@dataclass(frozen=True)
class _Tour:
    """Whose block is here at which step, and which pairs of chunks of it are to be computed."""

    comm: Comm
    rule: AttentionRule

    @property
    def steps(self) -> range:
        return range(self.comm.size(AXIS))

    def chunks(self, step: int) -> tuple[range, range]:
        """Places of the keys that are here at a step."""
        cp, rank = self.comm.size(AXIS), self.comm.rank(AXIS)
        return zigzag_chunks(self.rule.layout.length, cp=cp, rank=(rank - step) % cp)

    def size(self, step: int) -> int:
        return sum(len(chunk) for chunk in self.chunks(step))

    def pairs(self, step: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Rows of own queries, rows of the keys that are here, and their mask [., 1, 1, q, k]."""
        for query_rows, queries in _rows(self.chunks(0)):
            for key_rows, keys in _rows(self.chunks(step)):
                if not self.rule.is_empty(queries, keys):
                    mask = self.rule.mask(queries, keys)
                    yield query_rows, key_rows, None if mask is None else mask.unsqueeze(2)

    def send_on(self, block: Tensor, step: int) -> Pending:
        """Hand the block of a step to the next rank and get that of the step after it."""
        shape = (*block.shape[:2], self.size(step + 1), *block.shape[3:])
        return self.comm.start_shift(block, shape=shape, axis=AXIS)


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tour: _Tour) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        grouped = _grouped(query, key.shape[1]).to(wide)
        # The running softmax: weighted sum of values, and log of the sum of weights.
        out = grouped.new_zeros(*grouped.shape[:-1], value.shape[-1])
        log_sum = grouped.new_full((*grouped.shape[:-1], 1), -torch.inf)
        block = torch.cat((key, value), dim=-1)
        for step in tour.steps:
            ahead = tour.send_on(block, step) if step + 1 < len(tour.steps) else None
            for rows, keys, mask in tour.pairs(step):
                part = block[:, :, None, keys].to(wide).split([key.shape[-1], value.shape[-1]], -1)
                scores = _scores(grouped[..., rows, :], part[0], mask, tour.rule.scaling)
                _join(out[..., rows, :], log_sum[..., rows, :], scores, part[1])
            block = block if ahead is None else ahead.wait()
        ctx.tour = tour
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out.flatten(1, 2).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, log_sum = ctx.saved_tensors
        grouped, grad = (_grouped(x, key.shape[1]).to(out.dtype) for x in (query, grad))
        saved = _Saved(grouped, grad, log_sum, (grad * out).sum(-1, keepdim=True))
        widths = [key.shape[-1], value.shape[-1]]
        query_grad = torch.zeros_like(grouped)
        block = torch.cat((key, value), dim=-1)
        home: Pending | None = None
        tour: _Tour = ctx.tour
        for step in tour.steps:
            ahead = tour.send_on(block, step) if step + 1 < len(tour.steps) else None
            block_grad = _block_gradient(saved, block.to(out.dtype), widths, query_grad, tour, step)
            if home is not None:
                block_grad += home.wait()
            # The gradient follows its block; after the last step it has one way left, home.
            home = tour.send_on(block_grad, step)
            block = block if ahead is None else ahead.wait()
        assert home is not None
        key_grad, value_grad = home.wait().to(key.dtype).split(widths, dim=-1)
        return query_grad.flatten(1, 2).to(query.dtype), key_grad, value_grad, None


@dataclass(frozen=True)
class _Saved:
    """What backward knows of this rank's queries, in at least fp32.

    Attributes:
        query: [B, G, R, s, C].
        grad: Of the output, [B, G, R, s, C].
        log_sum: Log of the sum of weights, [B, G, R, s, 1].
        total: Row sums of output * gradient, [B, G, R, s, 1].
    """

    query: Tensor
    grad: Tensor
    log_sum: Tensor
    total: Tensor


def _block_gradient(
    saved: _Saved, block: Tensor, widths: list[int], query_grad: Tensor, tour: _Tour, step: int
) -> Tensor:
    """Gradient of one block of keys and values from own queries; adds to that of the queries."""
    block_grad = torch.zeros_like(block)
    scaling = tour.rule.scaling
    for rows, keys, mask in tour.pairs(step):
        key, value = block[:, :, None, keys].split(widths, dim=-1)
        query, grad = saved.query[..., rows, :], saved.grad[..., rows, :]
        scores = _scores(query, key, mask, scaling)
        # A query that sees nothing has no weights: exp(-inf - 0).
        weights = (scores - _finite(saved.log_sum[..., rows, :])).exp()
        score_grad = weights * (grad @ value.mT - saved.total[..., rows, :]) * scaling
        query_grad[..., rows, :] += score_grad @ key
        # Heads that share a key sum up.
        key_grad, value_grad = (score_grad.mT @ query).sum(2), (weights.mT @ grad).sum(2)
        block_grad[:, :, keys] += torch.cat((key_grad, value_grad), dim=-1)
    return block_grad


def _join(out: Tensor, log_sum: Tensor, scores: Tensor, value: Tensor) -> None:
    """Add one block to the running softmax, in place."""
    joined = torch.logaddexp(log_sum, scores.logsumexp(-1, keepdim=True))
    finite = _finite(joined)
    out.mul_((log_sum - finite).exp()).add_((scores - finite).exp() @ value)
    log_sum.copy_(joined)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = query @ key.mT * scaling
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _finite(log_sum: Tensor) -> Tensor:
    """Zero in place of -inf, which would make a NaN of -inf - -inf."""
    return log_sum.masked_fill(log_sum == -torch.inf, 0.0)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(1, (kv_heads, -1))


def _rows(chunks: tuple[range, range]) -> list[tuple[slice, range]]:
    """Each chunk with the rows of a rank's tensors that it is in."""
    early, late = chunks
    border = len(early)
    return [(slice(0, border), early), (slice(border, border + len(late)), late)]
