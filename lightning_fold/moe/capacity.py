"""Capacity: which routed rows an expert takes when more come than it has room for.

An expert takes C = ceil(T*K/E * factor) of the rows that T tokens send it; integers all the way,
so that host and device agree. Scope "local" counts the tokens of this rank and decides on them
(the sub-sequence decision of arXiv 2504.14960), which depends on the mapping. "sequence" counts
the tokens of each whole sequence and decides on all of them, alike under every mapping. Padding
takes no room and is never sent. Routing weights are not renormalised: what a token loses is lost.
"""

# Shapes.  T local tokens   K top-k   N = T*K routed rows   E experts   B sequences   S tokens of
#          each   A = B*S tokens of the whole batch   G groups of rows with a capacity of their own

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_fold.moe.routing import Routing
from lightning_fold.moe.tokens import PeerTokens, RunningTokens, TokenLayout
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.sequence import balanced_sizes, zigzag_sizes


@dataclass(frozen=True)
class Capacity:
    """How much an expert takes, and of what.

    Attributes:
        factor: Room relative to an even load.
        drop: "probability" keeps the rows with the largest routing weights, ties to the earlier
            token; "position" the first in token order.
        scope: Whose tokens are counted and decided on together.
        pad: Whether every expert gets exactly C rows from every rank, see `moe.dispatch.padded`.
            C is then that of the ep x etp peer with most tokens.
    """

    factor: float
    drop: Literal["probability", "position"] = "probability"
    scope: Literal["local", "sequence"] = "local"
    pad: bool = False

    def apply(self, tokens: RunningTokens, comm: Comm, routing: Routing) -> Routing:
        """The routing less the rows beyond the capacity.

        Collective over tp and cp where the scope is "sequence".

        Raises:
            ValueError: The scope or `pad` needs the batch, and the core does not tell it.
        """
        layout = self._layout(routing, tokens)
        if self.scope == "sequence":
            assert layout is not None
            kept_TK = self._keep_of_sequences(routing, layout, comm)
        else:
            valid_T = None if layout is None else layout.valid_T()
            kept_TK = self._keep_local(routing, valid_T)
        return replace(routing, kept_TK=kept_TK, slots=self._slots(routing, layout))

    def _layout(self, routing: Routing, tokens: RunningTokens) -> TokenLayout | None:
        layout = tokens.moe
        if layout is not None and layout.num_tokens == routing.index_TK.shape[0]:
            return layout
        if layout is None and self.scope == "local" and not self.pad:
            return None
        seen = "does not tell its batch" if layout is None else "tells of another batch"
        needs = "capacity_scope='sequence'" if self.scope == "sequence" else "a capacity"
        raise ValueError(
            f"{routing.layer}: {needs} needs to know which tokens a layer sees, but the model's "
            f"forward {seen}: the experts get {routing.index_TK.shape[0]} tokens and the call has "
            f"{'none' if layout is None else layout.num_tokens}. Name its argument `input_ids` or "
            "`inputs_embeds` [B, S, ...] and call experts with [B*S, D], or set "
            "capacity_factor=None.  Change `capacity_factor` or `router_options`."
        )

    def _keep_local(self, routing: Routing, valid_T: Tensor | None) -> Tensor:
        index_TK = routing.index_TK
        count = index_TK.new_full((1,), index_TK.shape[0])
        if valid_T is not None:
            count = valid_T.sum().view(1)
        room_E = self._room(count, routing).expand(routing.num_experts)
        merit = self._merit(routing.weights_TK)
        return keep_rows(index_TK, merit, valid_T=valid_T, room_G=room_E)

    def _keep_of_sequences(self, routing: Routing, layout: TokenLayout, comm: Comm) -> Tensor:
        index_AK, weights_AK = whole_sequences(routing, layout, comm)
        B, S, E = layout.num_sequences, layout.length, routing.num_experts
        valid_BS = layout.valid_BS
        if valid_BS is None:
            valid_BS = index_AK.new_ones((B, S), dtype=torch.bool)
        # One group for every sequence and expert.
        firsts_B = torch.arange(B, device=index_AK.device) * E
        group_AK = index_AK + firsts_B.repeat_interleave(S, output_size=B * S).unsqueeze(1)
        room_B = self._room(valid_BS.sum(1), routing)
        kept_AK = keep_rows(
            group_AK,
            self._merit(weights_AK),
            valid_T=valid_BS.reshape(-1),
            room_G=room_B.repeat_interleave(E, output_size=B * E),
        )
        return kept_AK.index_select(0, natural_place(layout))

    def _merit(self, weights_TK: Tensor) -> Tensor | None:
        return weights_TK.detach() if self.drop == "probability" else None

    def _slots(self, routing: Routing, layout: TokenLayout | None) -> int | None:
        if not self.pad:
            return None
        assert layout is not None
        assert layout.peers is not None, "the peers agree at the core's entry"
        E = routing.num_experts
        return max(self._most_kept(peer, routing.top_k, E) for peer in layout.peers)

    def _most_kept(self, peer: PeerTokens, top_k: int, num_experts: int) -> int:
        """Rows of one expert that a peer may keep; no layer needs to ask it."""
        counted = peer.tokens if self.scope == "local" else peer.length
        room = -(-counted * top_k * self._exact.numerator // self._denominator(num_experts))
        # A sequence's whole capacity may lie on one rank.
        groups = 1 if self.scope == "local" else peer.sequences
        return min(peer.tokens, groups * room)

    def _room(self, counts: Tensor, routing: Routing) -> Tensor:
        """C for each of several token counts, int64, on device."""
        over = counts * routing.top_k * self._exact.numerator
        # Ceiling by floors: the true quotient is never rounded.
        return -(-over).div(self._denominator(routing.num_experts), rounding_mode="floor")

    @property
    def _exact(self) -> Fraction:
        # As written: 1.1 is 11/10 and not the binary number next to it.
        return Fraction(str(self.factor))

    def _denominator(self, num_experts: int) -> int:
        return num_experts * self._exact.denominator


class CapacityFields(Protocol):
    """The fields of `FoldedConfig` that say what a capacity is."""

    @property
    def capacity_factor(self) -> float | None:
        """None for no capacity."""

    @property
    def token_drop(self) -> Literal["probability", "position"]:
        """See `Capacity.drop`."""

    @property
    def router_options(self) -> dict[str, Any] | None:
        """Keys `capacity_scope` and `pad_to_capacity`."""


def capacity_of(config: CapacityFields) -> Capacity | None:
    """The capacity of a config that has been checked; None where it sets none."""
    if config.capacity_factor is None:
        return None
    options = config.router_options or {}
    return Capacity(
        config.capacity_factor,
        drop=config.token_drop,
        scope=options.get("capacity_scope", "local"),
        pad=options.get("pad_to_capacity", False),
    )


def keep_rows(
    group_TK: Tensor, merit_TK: Tensor | None, *, valid_T: Tensor | None, room_G: Tensor
) -> Tensor:
    """Keep in every group the first rows, or the best, as many as it has room for; bool [T, K].

    Args:
        group_TK: int64, group that each row belongs to.
        merit_TK: What decides, ties to the earlier row; None for the order of rows.
        valid_T: False for tokens that take no room and are not kept; None where all count.
        room_G: int64, rows that each group has room for.
    """
    group_N, groups = group_TK.reshape(-1), room_G.shape[0]
    if valid_T is not None:
        group_N = group_N.masked_fill(~valid_T.repeat_interleave(group_TK.shape[1]), groups)
    order_N = torch.arange(group_N.shape[0], device=group_N.device)
    if merit_TK is not None:
        order_N = merit_TK.reshape(-1).argsort(descending=True, stable=True)
    order_N = order_N.index_select(0, group_N.index_select(0, order_N).argsort(stable=True))
    sorted_N = group_N.index_select(0, order_N)
    counts = group_N.new_zeros(groups + 1).scatter_add(0, group_N, torch.ones_like(group_N))
    # How many rows of its group come before a row: its place less where the group begins.
    starts = counts.cumsum(0) - counts
    before_N = torch.arange(group_N.shape[0], device=group_N.device) - starts[sorted_N]
    room = torch.nn.functional.pad(room_G, (0, 1))
    kept_N = torch.empty_like(group_N, dtype=torch.bool)
    kept_N[order_N] = before_N < room[sorted_N]
    return kept_N.view(group_TK.shape)


def whole_sequences(routing: Routing, layout: TokenLayout, comm: Comm) -> tuple[Tensor, Tensor]:
    """Experts and weights of all tokens of the batch, [A, K], in natural order, without gradient.

    Collective over tp and cp, whose peers hold parts of the same sequences.
    """
    place_T1 = natural_place(layout).unsqueeze(1)
    numbers = torch.cat([place_T1, routing.index_TK], 1)
    near, far = _sizes(layout, comm)
    whole: list[Tensor] = []
    for part in (numbers, routing.weights_TK.detach()):
        held = comm.all_gather_rows(part, near, axis="tp")
        whole.append(comm.all_gather_rows(held, far, axis="cp"))
    order_A = whole[0][:, 0].argsort()
    return whole[0][:, 1:].index_select(0, order_A), whole[1].index_select(0, order_A)


def natural_place(layout: TokenLayout) -> Tensor:
    """Place of each local token in the whole batch [B, S], flattened; int64 [T]."""
    return layout.sequence_T() * layout.length + layout.places_s.repeat(layout.num_sequences)


def _sizes(layout: TokenLayout, comm: Comm) -> tuple[list[int], list[int]]:
    """Tokens of each tp peer of this cp rank, and of each cp rank."""
    sequences = layout.num_sequences
    by_cp = zigzag_sizes(layout.length, cp=comm.size("cp"))
    by_tp = balanced_sizes(by_cp[comm.rank("cp")], comm.size("tp"))
    return [sequences * size for size in by_tp], [sequences * size for size in by_cp]
