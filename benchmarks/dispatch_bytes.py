"""Bytes on the wire of one MoE layer, counted at the c10d calls, against a closed form.

What is counted: elements times element size that a rank hands to a collective of more than one
rank, forward and backward apart, host numbers included. An all-gather hands over a rank's rows, a
reduce-scatter the rows of all peers, an all-to-all the rows it sends, its own share with them.
Uneven gathers go over Gloo as an all-to-all of copies, and so hand over a rank's rows once a peer;
uneven reduce-scatters as an all-to-all, which hands over the same as the even one. The closed form
knows the routing table of all ranks and nothing of the dispatchers' code. Every difference is an
error: exit status 1.

    python benchmarks/dispatch_bytes.py            2 and 4 ranks, all (ep, etp)
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_fold.telemetry import CollectiveBytes, Telemetry
from lightning_fold.topology.folding import Folding, divisors
from lightning_fold.verify.launch import run_world
from lightning_fold.verify.plan import Case

# Shapes.  T tokens of a rank   K top-k   E experts   P ep ranks   Q etp ranks

NUM_EXPERTS, TOP_K, WIDTH, FFN = 16, 4, 32, 8
FLOAT, INT32, INT64 = 4, 4, 8
TOKENS = {"uneven": (37, 0, 53, 8), "even": (24, 24, 24, 24)}
SLOTS_FACTOR = 1.25


def routing_table(world: int, tokens: Sequence[int]) -> list[Tensor]:
    """Experts of every rank's tokens, [T, K]; "even" sends each expert the same number."""
    generator = torch.Generator().manual_seed(5)
    if len(set(tokens[:world])) == 1:
        places = torch.arange(tokens[0] * TOP_K).view(-1, TOP_K) % NUM_EXPERTS
        return [places for _ in range(world)]
    draw = [torch.rand(t, NUM_EXPERTS, generator=generator) for t in tokens[:world]]
    return [scores.topk(TOP_K, dim=1).indices for scores in draw]


@dataclass(frozen=True)
class Bytes:
    """Bytes that a rank hands to collectives, forward and backward."""

    forward: int
    backward: int

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True)
class ClosedForm:
    """Bytes of one rank from the routing table alone.

    Attributes:
        folding: The mapping; experts of ep rank p are those from p * E/P on.
        table: Of all ranks.
        rank: Whose bytes.
    """

    folding: Folding
    table: Sequence[Tensor]
    rank: int

    @cached_property
    def ep_peers(self) -> tuple[int, ...]:
        """Ranks of this rank's ep group."""
        return self.folding.group_of(self.rank, "ep")

    @cached_property
    def etp_peers(self) -> tuple[int, ...]:
        """Ranks of this rank's etp group."""
        return self.folding.group_of(self.rank, "etp")

    def of(self, dispatcher: str) -> Bytes:
        """Bytes of a layer with this dispatcher."""
        if dispatcher == "padded":
            return self._exchanged(self._padded_rows, widths=(WIDTH * FLOAT, FLOAT), ids=0)
        if dispatcher == "all_gather":
            return self._gathered_all()
        if dispatcher == "local":
            return Bytes(0, 0)
        once = dispatcher == "dedup"
        weights, ids = (TOP_K * FLOAT, TOP_K * INT32) if once else (FLOAT, 0)
        rows = self._distinct_rows if once else self._routed_rows
        numbers = self._numbers(NUM_EXPERTS // self.folding.ep + 2)
        return numbers + self._exchanged(rows, widths=(WIDTH * FLOAT, weights), ids=ids)

    # Rows that one rank sends to one ep rank.

    def _routed_rows(self, source: int, target: int) -> int:
        return int((self._targets(source) == target).sum())

    def _distinct_rows(self, source: int, target: int) -> int:
        return int((self._targets(source) == target).any(1).sum())

    def _padded_rows(self, source: int, target: int) -> int:
        most = max(len(index) for index in self.table)
        slots = min(most, -(-most * TOP_K * 5 // (NUM_EXPERTS * 4)))
        return slots * NUM_EXPERTS // self.folding.ep

    def _targets(self, source: int) -> Tensor:
        return self.table[source] // (NUM_EXPERTS // self.folding.ep)

    # Bytes.

    def _numbers(self, columns: int) -> Bytes:
        """Row counts, told over ep and passed on over etp; no gradient."""
        ep, etp = self.folding.ep, self.folding.etp
        rows = (ep if ep > 1 else 0) + (ep if etp > 1 else 0)
        return Bytes(rows * columns * INT64, 0)

    def _exchanged(self, rows: Any, *, widths: tuple[int, int], ids: int) -> Bytes:
        """All-to-all over ep, gather over etp, and both ways back.

        Gradients of rows and weights come back the way outputs do; numbers of experts have none.
        """
        ep, etp = self.folding.ep, self.folding.etp
        mine = self.ep_peers.index(self.rank)
        sent = sum(rows(self.rank, p) for p in range(ep))
        held = {
            peer: sum(rows(source, mine) for source in self.folding.group_of(peer, "ep"))
            for peer in self.etp_peers
        }
        away = sent if ep > 1 else 0
        back = held[self.rank] if ep > 1 else 0
        spread = gather_rows(held[self.rank], list(held.values())) if etp > 1 else 0
        summed = sum(held.values()) if etp > 1 else 0
        there, home = away + spread, summed + back
        row, weight = widths
        return Bytes(
            forward=there * (row + weight + ids) + home * row,
            backward=home * (row + weight) + there * row,
        )

    def _gathered_all(self) -> Bytes:
        """Gather over ep, then etp; reduce-scatter over etp, then ep."""
        ep, etp = self.folding.ep, self.folding.etp
        near = [len(self.table[peer]) for peer in self.ep_peers]
        far = [
            sum(len(self.table[source]) for source in self.folding.group_of(peer, "ep"))
            for peer in self.etp_peers
        ]
        own, gathered = len(self.table[self.rank]), sum(near)
        there = gather_rows(own, near) if ep > 1 else 0
        there += gather_rows(gathered, far) if etp > 1 else 0
        home = (sum(far) if etp > 1 else 0) + (gathered if ep > 1 else 0)
        row, weight, ids = WIDTH * FLOAT, TOP_K * FLOAT, TOP_K * INT32
        numbers = ((ep > 1) + (ep if etp > 1 else 0)) * (NUM_EXPERTS + 2) * INT64
        return Bytes(
            forward=numbers + there * (row + weight + ids) + home * row,
            backward=home * (row + weight) + there * row,
        )


def gather_rows(own: int, sizes: Sequence[int]) -> int:
    """Rows handed over by a gather: once if all sizes are equal, else once a peer."""
    return own if len(set(sizes)) == 1 else own * len(sizes)


def mappings(world: int) -> Iterator[Folding]:
    """All (ep, etp) of a world; attention is data parallel."""
    for ep in divisors(world):
        for etp in divisors(world // ep):
            yield Folding.from_world(world, ep=ep, etp=etp)


def dispatchers(folding: Folding) -> list[str]:
    """Names of the dispatchers that serve a mapping."""
    alone = ["local"] if folding.ep * folding.etp == 1 else []
    return [*alone, "all_to_all", "all_gather", "dedup", "padded"]


# ------------------------------------------------------------ on the ranks


class Experts(nn.Module):
    """Stacked weights; folding gives them their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * FFN, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, FFN))


def measure(case: Case, folder: Path) -> None:
    """Count the bytes of every dispatcher and table on this rank."""
    import torch.distributed as dist

    from lightning_fold.topology.comm import Comm
    from lightning_fold.topology.meshes import build_meshes

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    comm = Comm(build_meshes(case.folding, "cpu"), Telemetry())
    found = {
        f"{tokens}.{name}": run_layer(comm, name, routing_table(case.folding.world, counts))
        for tokens, counts in TOKENS.items()
        for name in dispatchers(case.folding)
    }
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_layer(comm: Any, name: str, table: Sequence[Tensor]) -> tuple[int, int]:
    """Forward and backward of one layer; bytes of each."""
    from lightning_fold.model.inspect import ExpertsSpec
    from lightning_fold.model.swap import swap_experts
    from lightning_fold.model.token_layout import ask_peers
    from lightning_fold.moe.capacity import Capacity
    from lightning_fold.moe.tokens import RunningTokens, TokenLayout

    index, module, running = table[comm.global_rank], Experts(), RunningTokens()
    layout = TokenLayout(1, len(index), torch.arange(len(index)))
    capacity = Capacity(SLOTS_FACTOR, pad=True) if name == "padded" else None
    if capacity is not None:
        layout = TokenLayout(1, len(index), layout.places_s, peers=ask_peers(layout, comm))
    running.moe = layout
    swap_experts(
        [ExpertsSpec("experts", module, NUM_EXPERTS, FFN, _gated, None)],
        comm=comm,
        dispatcher="auto" if name == "padded" else name,
        tokens=running,
        capacity=capacity,
    )
    seen: list[int] = []
    handler = lambda event: seen.append(event.num_bytes)  # noqa: E731
    comm.telemetry.subscribe(CollectiveBytes, handler)
    hidden = torch.randn(len(index), WIDTH, requires_grad=True)
    weights = torch.rand(index.shape, requires_grad=True)
    out = module(hidden, index, weights)
    forward = sum(seen)
    out.sum().backward()
    comm.telemetry.unsubscribe(CollectiveBytes, handler)
    return forward, sum(seen) - forward


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


# ------------------------------------------------------------ the table


def compare(world: int, folder: Path) -> Iterator[tuple[str, str, str, Bytes, Bytes]]:
    """Mapping, tokens, dispatcher, counted and closed form, summed over the ranks if all agree."""
    cases = [Case("decoder", folding.mapping_id) for folding in mappings(world)]
    ran = run_world(world, cases, folder, run=measure)
    if ran.failure is not None:
        raise RuntimeError(ran.failure)
    for case in cases:
        ranks = [torch.load(folder / case.key / f"rank{rank}.pt") for rank in range(world)]
        for key in ranks[0]:
            tokens, _, name = key.partition(".")
            table = routing_table(world, TOKENS[tokens])
            counted = [Bytes(*rank[key]) for rank in ranks]
            wanted = [ClosedForm(case.folding, table, rank).of(name) for rank in range(world)]
            # The rank that is off, where one is; else the busiest.
            at = max(range(world), key=lambda r: (counted[r] != wanted[r], wanted[r].forward))
            yield case.mapping, tokens, name, counted[at], wanted[at]


def main() -> int:
    """Print the table; 1 if a cell is off."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    worlds = parser.parse_args().ranks
    table = Table(title=f"bytes a layer, busiest rank: E={NUM_EXPERTS} K={TOP_K} D={WIDTH} fp32")
    for column in ("mapping", "tokens", "dispatcher", "forward", "backward", "closed form", ""):
        table.add_column(column, justify="right" if "ward" in column else "left")
    wrong = 0
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            for mapping, tokens, name, counted, wanted in compare(world, Path(folder)):
                wrong += counted != wanted
                form = f"{wanted.forward:,} / {wanted.backward:,}"
                cells = (mapping, tokens, name, f"{counted.forward:,}", f"{counted.backward:,}")
                table.add_row(*cells, form, "equal" if counted == wanted else "OFF")
    console = Console(width=140)
    console.print(table)
    console.print(f"{wrong} of {table.row_count} rows are off")
    return int(wrong > 0)


if __name__ == "__main__":
    # Ranks find `measure` by the name of its module, which "__main__" is not.
    import dispatch_bytes

    sys.exit(dispatch_bytes.main())
