"""Context-parallel attention that gathers first: keys and values (all_gather), or heads (ulysses).

    all_gather   a rank keeps its queries and gets the keys and values of all places
    ulysses      a rank keeps all places of 1/cp of the heads; the outputs travel back

Both then attend run by run of queries, each to the keys up to the run's end, so that nothing
behind the causal border is computed. Sequences that cp does not divide travel unevenly.
"""

# Shapes.  B sequences   S tokens of a sequence   s of them on this rank   H query heads
#          G key/value heads   C head width   h heads of a rank inside ulysses

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_fold.model.context.rule import AttentionRule
from lightning_fold.topology.comm import Comm, exchange_rows, gather_rows
from lightning_fold.topology.sequence import zigzag_chunks, zigzag_places, zigzag_sizes

AXIS = "cp"


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, *, comm: Comm, rule: AttentionRule
) -> Tensor:
    """Attend from this rank's places to all. Collective over cp.

    Args:
        query: [B, H, s, C].
        key: [B, G, s, C].
        value: [B, G, s, C]; its C may be another one.
        comm: Collectives.
        rule: Of this layer and forward.

    Returns:
        [B, H, s, C of the values].
    """
    length, cp = rule.layout.length, comm.size(AXIS)
    # One message: half as many collectives, and an order that all ranks share in backward.
    both = torch.cat((key, value), dim=-1).movedim(2, 0).contiguous()
    both = gather_rows(both, comm, zigzag_sizes(length, cp=cp), AXIS)
    both = both.index_select(0, rows_of_places(length, cp, both.device)).movedim(0, 2)
    key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    runs = zigzag_chunks(length, cp=cp, rank=comm.rank(AXIS))
    return attend_runs(query, key, value, runs=runs, rule=rule)


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, *, comm: Comm, rule: AttentionRule
) -> Tensor:
    """Attend with 1/cp of the heads from all places; cp divides H. Collective over cp.

    Arguments and result are those of `gathered_attention`.
    """
    length, cp = rule.layout.length, comm.size(AXIS)
    # Fewer key/value heads than ranks are sent several times: as often as ranks need them.
    copies = math.lcm(key.shape[1], cp) // key.shape[1]
    key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    sizes = zigzag_sizes(length, cp=cp)
    rows = rows_of_places(length, cp, query.device)
    query, key, value = (
        _to_heads(x, comm, sizes).index_select(2, rows) for x in (query, key, value)
    )
    runs = [range(length)]
    if not rule.is_plain():
        # A mask of all pairs at once would take S * S bytes a sequence.
        chunks = [zigzag_chunks(length, cp=cp, rank=rank) for rank in range(cp)]
        runs = [*(early for early, _ in chunks), *(late for _, late in reversed(chunks))]
    out = attend_runs(query, key, value, runs=runs, rule=rule)
    return _to_places(out.index_select(2, rows.argsort()), comm, sizes)


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, *, runs: Sequence[range], rule: AttentionRule
) -> Tensor:
    """Attend from runs of places, in the order in which `query` holds them, to whole sequences."""
    parts = []
    for run, part in zip(runs, query.split([len(run) for run in runs], dim=2), strict=True):
        if run:
            keys = range(rule.first_key(run), run.stop)
            seen = (x[:, :, keys.start : keys.stop] for x in (key, value))
            parts.append(_attend(part, *seen, queries=run, keys=keys, rule=rule))
    if parts:
        return torch.cat(parts, dim=2)
    # No place at all: every input still gets its (zero) gradient, so that its collective runs.
    empty = query[..., :1] * key[:, :1, :0, :1].sum() * value[:, :1, :0, :1].sum()
    return empty.expand(*query.shape[:3], value.shape[3])


@functools.lru_cache(maxsize=16)
def rows_of_places(length: int, cp: int, device: torch.device) -> Tensor:
    """Which row of what all cp ranks hold, rank after rank, each place of the sequence is in."""
    places = [p for rank in range(cp) for p in zigzag_places(length, cp=cp, rank=rank)]
    return torch.tensor(places, device=device).argsort()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, queries: range, keys: range, rule: AttentionRule
) -> Tensor:
    mask = None if rule.is_plain() else rule.mask(queries, keys)
    longer = len(keys) > len(queries)
    if mask is None and longer and _get_current_dispatch_mode() is not None:
        # The subclass below cannot be made under a dispatch mode, which recomputation is.
        pairs = torch.ones(len(queries), len(keys), dtype=torch.bool, device=query.device)
        mask = pairs.tril(len(keys) - len(queries))
    if mask is not None:
        # Fused kernels take a mask or grouped heads, not both.
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    elif longer:
        mask = causal_lower_right(len(queries), len(keys))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=rule.dropout,
        is_causal=mask is None and len(queries) > 1,
        scale=rule.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _to_heads(x: Tensor, comm: Comm, sizes: Sequence[int]) -> Tensor:
    """[B, H, s, C] of this rank's places to [B, h, S, C] of its heads, rank after rank."""
    heads, own = x.shape[1], x.shape[2]
    share = heads // len(sizes)
    rows = x.permute(1, 2, 0, 3).reshape(heads * own, x.shape[0], x.shape[3])
    recv = [share * size for size in sizes]
    rows = exchange_rows(rows, comm, send=[share * own] * len(sizes), recv=recv, axis=AXIS)
    parts = zip(rows.split(recv), sizes, strict=True)
    whole = torch.cat([part.view(share, size, *rows.shape[1:]) for part, size in parts], dim=1)
    return whole.permute(2, 0, 1, 3)


def _to_places(x: Tensor, comm: Comm, sizes: Sequence[int]) -> Tensor:
    """The way back: [B, h, S, C], rank after rank, to [B, H, s, C]."""
    share, own, cp = x.shape[1], sizes[comm.rank(AXIS)], len(sizes)
    rows = x.permute(2, 1, 0, 3).flatten(0, 1)
    send, recv = [size * share for size in sizes], [own * share] * cp
    rows = exchange_rows(rows, comm, send=send, recv=recv, axis=AXIS)
    whole = rows.view(cp, own, share, *rows.shape[1:]).permute(3, 0, 2, 1, 4)
    return whole.reshape(x.shape[0], cp * share, own, x.shape[3])
