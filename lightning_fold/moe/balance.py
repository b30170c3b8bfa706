"""How evenly routers spread tokens, and the losses that push towards an even load: pure formulas.

f counts what is dispatched: the choice with bias, groups and all. P is the mean score without bias
and limits, normalised over all experts. Padding is in neither. Each formula states its unit:

    per_sequence   one sequence: E/(K*T) sum c*P; mean over the sequences, summed over layers
    per_layer      one microbatch of one dp rank: E/(K*T) sum c*P, summed over layers
    model          the same tokens, all layers as one: E sum f*P, f summing to K (Hugging Face's)
    global_batch   all dp ranks of one forward: P of its tokens, f of all microbatches since the
                   optimizer's last step; E sum f*P, f summing to 1, summed over layers

At an even load a layer gives 1, `model` K. All are equal on every tp and cp peer: counts and scores
are summed over them first, and each peer's gradient reaches its own tokens.
"""

# Shapes.  B sequences   T local tokens   K top-k   E all experts

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fold_kernels.router import ScoreKind, scores_of
from lightning_fold.moe.tokens import TokenLayout
from lightning_fold.topology.comm import Comm, sum_gradient_over, sum_over

PEERS = ("tp", "cp")
"""Axes over which the tokens of a sequence are spread."""


PACKED = torch.float64
"""What loads travel in: counts stay exact, and each layer may have scores of its own dtype."""


@dataclass(frozen=True)
class Routed:
    """What one router said of the local tokens.

    Attributes:
        logits_TE: With gradient.
        index_TK: The chosen experts.
        scores: Turns logits into scores.
        layout: Which tokens they are; None makes them one sequence without padding.
    """

    logits_TE: Tensor
    index_TK: Tensor
    scores: ScoreKind
    layout: TokenLayout | None

    def with_logits(self, logits_TE: Tensor) -> Routed:
        """The same decision with the history of these logits."""
        return replace(self, logits_TE=logits_TE)

    @property
    def num_sequences(self) -> int:
        """B."""
        return 1 if self.layout is None else self.layout.num_sequences

    def padding_T(self) -> Tensor | None:
        """True at padding; None where there is none."""
        valid_T = None if self.layout is None else self.layout.valid_T()
        return None if valid_T is None else ~valid_T


@dataclass(frozen=True)
class Load:
    """Sums of one layer over tokens.

    Attributes:
        counts_BE: int64, routed rows.
        probs_BE: Sum of the normalised scores, with gradient.
        squares: Sum of the squared logsumexp of the logits, with gradient.
        top_k: K.
    """

    counts_BE: Tensor
    probs_BE: Tensor
    squares: Tensor
    top_k: int

    @property
    def tokens_B(self) -> Tensor:
        """Tokens that are no padding; at least 1, so that nothing is divided by zero."""
        return (self.counts_BE.sum(1) // self.top_k).clamp(min=1)

    def merged(self) -> Load:
        """All sequences as one."""
        counts, probs = (x.sum(0, keepdim=True) for x in (self.counts_BE, self.probs_BE))
        return replace(self, counts_BE=counts, probs_BE=probs)


def count_routed(routed: Routed) -> Tensor:
    """Routed rows of each local sequence and expert, int64 [B, E], without padding."""
    num_tokens, top_k = routed.index_TK.shape
    rows, width = routed.num_sequences, routed.logits_TE.shape[1]
    ones_TK = torch.ones_like(routed.index_TK)
    padding_T = routed.padding_T()
    if padding_T is not None:
        ones_TK = ones_TK.masked_fill(padding_T.unsqueeze(1), 0)
    each = (rows, num_tokens // rows * top_k)
    zeros_BE = ones_TK.new_zeros(rows, width)
    return zeros_BE.scatter_add(1, routed.index_TK.reshape(each), ones_TK.view(each))


def local_load(routed: Routed) -> Load:
    """Sums over this rank's tokens."""
    (num_tokens, width), rows = routed.logits_TE.shape, routed.num_sequences
    scores_TE = scores_of(routed.logits_TE, routed.scores)
    if routed.scores != "softmax":
        scores_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    squares_T = routed.logits_TE.to(scores_TE.dtype).logsumexp(dim=-1).square()
    padding_T = routed.padding_T()
    if padding_T is not None:
        # Filled, not multiplied: a NaN at padding must not spread.
        scores_TE = scores_TE.masked_fill(padding_T.unsqueeze(1), 0)
        squares_T = squares_T.masked_fill(padding_T, 0)
    probs_BE = scores_TE.view(rows, num_tokens // rows, width).sum(1)
    return Load(count_routed(routed), probs_BE, squares_T.sum(), routed.index_TK.shape[1])


def sum_over_peers(loads: Sequence[Load], comm: Comm) -> list[Load]:
    """Sums over the whole sequences. Collective over tp and cp, one all-reduce of each kind."""
    sizes = [load.probs_BE.numel() for load in loads]
    counts = torch.cat([load.counts_BE.flatten() for load in loads])
    values = torch.cat(
        [load.probs_BE.flatten() for load in loads] + [load.squares.view(1) for load in loads]
    )
    for axis in PEERS:
        if comm.size(axis) > 1:
            counts = comm.all_reduce(counts, axis=axis)
            values = sum_over(values, comm, axis)
    *probs, squares = values.split([*sizes, len(loads)])
    return [
        replace(
            load,
            counts_BE=count.view_as(load.counts_BE),
            probs_BE=prob.view_as(load.probs_BE),
            squares=square,
        )
        for load, count, prob, square in zip(
            loads, counts.split(sizes), probs, squares.unbind(), strict=True
        )
    ]


def packed(load: Load) -> Tensor:
    """A load as flat numbers, fp64 [2*B*E + 1], that travel with their gradient between stages."""
    parts = (load.counts_BE, load.probs_BE, load.squares)
    return torch.cat([part.flatten().to(PACKED) for part in parts])


def unpacked(
    flat: Tensor, kinds: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype
) -> list[Load]:
    """Loads out of several packed ones, one for each (E, K) of `kinds`, of `rows` sequences."""
    loads = []
    for part, (width, top_k) in zip(flat.split(packed_sizes(kinds, rows)), kinds, strict=True):
        counts, probs, squares = part.split([rows * width, rows * width, 1])
        counts_BE = counts.detach().round().long().view(rows, width)
        probs_BE = probs.to(dtype).view(rows, width)
        loads.append(Load(counts_BE, probs_BE, squares[0].to(dtype), top_k))
    return loads


def packed_sizes(kinds: Sequence[tuple[int, int]], rows: int) -> list[int]:
    """Elements of packed loads of `rows` sequences."""
    return [2 * rows * width + 1 for width, _ in kinds]


def per_sequence(load: Load) -> Tensor:
    """Mean over the sequences of one layer's losses; a sequence of padding alone counts as 0."""
    return _switch_B(load).mean()


def per_layer(load: Load) -> Tensor:
    """One layer's loss over all tokens of the microbatch."""
    return _switch_B(load.merged()).sum()


def model(loads: Sequence[Load]) -> Tensor:
    """Hugging Face's `load_balancing_loss_func`: the tokens of all layers in one sum."""
    merged = [load.merged() for load in loads]
    tokens = torch.stack([load.tokens_B for load in merged]).sum()
    counts_E = torch.stack([load.counts_BE[0] for load in merged]).sum(0)
    probs_E = torch.stack([load.probs_BE[0] for load in merged]).sum(0)
    # Integers divided by integers would be fp32 whatever the scores are.
    share_E = counts_E.to(probs_E.dtype) / tokens
    return len(counts_E) * (share_E * probs_E / tokens).sum()


def global_batch(load: Load, seen_E: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
    """One layer's loss over the tokens of all dp ranks. Collective over dp, backward too.

    Every dp rank's loss holds the whole of it and is divided by dp, but its backward reaches its
    own tokens alone. So the sum over dp has a sum over dp as its gradient; without that one the
    gradient is 1/dp of what it should be (`test_global_batch_is_invariant_to_dp`).

    Args:
        load: Summed over peers.
        seen_E: int64, counts of the microbatches before this one, over all dp ranks.
        comm: Collectives.

    Returns:
        The loss, and the counts with this microbatch.
    """
    merged = load.merged()
    counts_E, probs_E = merged.counts_BE[0], merged.probs_BE[0]
    if comm.size("dp") > 1:
        counts_E = comm.all_reduce(counts_E, axis="dp")
        probs_E = sum_gradient_over(sum_over(probs_E, comm, "dp"), comm, "dp")
    tokens = (counts_E.sum() // load.top_k).clamp(min=1)
    seen_E = seen_E + counts_E
    share_E = seen_E.to(probs_E.dtype) / seen_E.sum().clamp(min=1)
    return len(seen_E) * (share_E * probs_E / tokens).sum(), seen_E


def z_loss(load: Load) -> Tensor:
    """Mean over the microbatch's tokens of the squared logsumexp of one layer's logits."""
    return load.squares / load.merged().tokens_B[0]


def sum_over_ranks(counts: Tensor, comm: Comm) -> Tensor:
    """Counts of all tokens of a step, each of which one rank holds. Collective over the stage."""
    return comm.all_reduce(counts, axis="stage")


def bias_step(counts_E: Tensor) -> Tensor:
    """Direction of the expert bias: sign(mean - count), exact in integers; int64."""
    return (counts_E.sum() - len(counts_E) * counts_E).sign()


def _switch_B(load: Load) -> Tensor:
    """E/(K*T) * sum of counts * mean scores, of every sequence."""
    tokens_B = load.tokens_B.to(load.probs_BE.dtype)
    scale_B = load.counts_BE.shape[1] / (load.top_k * tokens_B)
    return scale_B * (load.counts_BE * load.probs_BE).sum(1) / tokens_B
