"""What the ranks of `test_dispatch` run: every dispatcher on every routing, and their reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fold.model.inspect import ExpertsSpec
from lightning_fold.model.swap import swap_experts
from lightning_fold.model.token_layout import ask_peers
from lightning_fold.moe.capacity import Capacity
from lightning_fold.moe.tokens import RunningTokens, TokenLayout
from lightning_fold.telemetry import Flight, Telemetry
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.meshes import build_meshes
from lightning_fold.verify.plan import Case

WIDTH, FFN = 6, 4
DROPPED = ("uneven_tokens", "ties", "zero_tokens_on_rank_1")
"""Routings that capacities cut."""


@dataclass(frozen=True)
class Table:
    """A routing: E, and the experts of a rank's tokens."""

    num_experts: int
    index_of: Callable[[int], Tensor]


def _spread(tokens: int, rank: int, top_k: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(31 * tokens + rank)
    return torch.rand(tokens, 8, generator=generator).topk(top_k, dim=1).indices


ROUTINGS = {
    "even": Table(8, lambda rank: _spread(5, rank)),
    "uneven_tokens": Table(8, lambda rank: _spread(2 * rank + 1, rank)),
    "zero_tokens_on_rank_1": Table(8, lambda rank: _spread(0 if rank == 1 else 5, rank)),
    "zero_tokens_anywhere": Table(8, lambda rank: _spread(0, rank)),
    "one_token_in_all": Table(8, lambda rank: _spread(int(rank == 1), rank)),
    "all_tokens_to_one_expert": Table(8, lambda rank: torch.full((5, 1), 5)),
    "one_expert_per_rank": Table(4, lambda rank: torch.full((3, 1), 3 - rank)),
    "k_equals_e": Table(4, lambda rank: torch.arange(4).expand(3, 4).contiguous()),
    "counts_that_divide_nothing": Table(8, lambda rank: _spread(7 + 4 * (rank % 2), rank, 5)),
    "ties": Table(8, lambda rank: _spread(6, 0)),
}
DROPS: dict[str, Capacity] = {
    f"{drop}_{factor}": Capacity(factor, drop=drop)
    for drop in ("probability", "position")
    for factor in (0.5, 1.0)
} | {"dropless_by_factor": Capacity(100.0), "all_dropped_but_one": Capacity(1e-9)}


@dataclass(frozen=True)
class Inputs:
    """Inputs of all ranks, equal wherever they are built."""

    hidden: list[Tensor]
    index: list[Tensor]
    weights: list[Tensor]
    upstream: list[Tensor]


def build_inputs(name: str, ranks: int) -> Inputs:
    generator = torch.Generator().manual_seed(11)
    index = [ROUTINGS[name].index_of(rank) for rank in range(ranks)]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = [draw(i.shape[0], WIDTH) for i in index]
    # Under "ties" a capacity finds equal weights everywhere.
    weights = [torch.ones(i.shape).double() if name == "ties" else draw(*i.shape) for i in index]
    upstream = [draw(i.shape[0], WIDTH) for i in index]
    return Inputs(hidden, index, [w.abs() for w in weights], upstream)


class Experts(nn.Module):
    """Stacked experts and the plainest loop over them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        shapes = (num_experts, 2 * FFN, WIDTH), (num_experts, WIDTH, FFN)
        gate_up, down = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = hidden * 0.0
        for token, (ids, scales) in enumerate(zip(index, weights, strict=True)):
            for expert, scale in zip(ids, scales, strict=True):
                row = torch.zeros_like(hidden)
                row[token] = scale * self.one(hidden[token], int(expert))
                out = out + row
        return out

    def one(self, token: Tensor, expert: int) -> Tensor:
        gate, up = (self.gate_up_proj[expert] @ token).chunk(2)
        return self.down_proj[expert] @ (nn.functional.silu(gate) * up)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def textbook_kept(index: Tensor, weights: Tensor, capacity: Capacity, num_experts: int) -> Tensor:
    """Which rows of one rank stay, expert by expert."""
    kept = torch.zeros(index.shape, dtype=torch.bool)
    room = -(-index.numel() * int(capacity.factor * 1e9) // (num_experts * 10**9))
    for expert in range(num_experts):
        rows = [(t, k) for t in range(len(index)) for k in range(index.shape[1])]
        rows = [(t, k) for t, k in rows if int(index[t, k]) == expert]
        if capacity.drop == "probability":
            rows.sort(key=lambda row: -float(weights.detach()[row]))
        for row in rows[:room]:
            kept[row] = True
    return kept


@lru_cache
def reference(name: str, ranks: int, capacity: Capacity | None = None) -> dict[str, Any]:
    """The loop over tokens, all ranks' rows one after another."""
    inputs, experts = build_inputs(name, ranks), Experts(ROUTINGS[name].num_experts)
    leaves = [*inputs.hidden, *inputs.weights, *experts.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    outs = []
    for hidden, index, weights in zip(inputs.hidden, inputs.index, inputs.weights, strict=True):
        kept = torch.ones(index.shape, dtype=torch.bool)
        if capacity is not None:
            kept = textbook_kept(index, weights, capacity, ROUTINGS[name].num_experts)
        outs.append(experts(hidden, index, weights * kept))
    torch.stack(
        [(o * u).sum() for o, u in zip(outs, inputs.upstream, strict=True)]
    ).sum().backward()
    grads = {n: _gradient(p) for n, p in experts.named_parameters()}
    of_ranks = [
        {"out": o.detach(), "hidden": _gradient(h), "weights": _gradient(w)}
        for o, h, w in zip(outs, inputs.hidden, inputs.weights, strict=True)
    ]
    return {"ranks": of_ranks, **grads}


def _gradient(leaf: Tensor) -> Tensor:
    """Zeros where no token reached a leaf: the loop never touches it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors are full of NaN: whoever reads one, or pads with one, is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Rank:
    """One rank under one mapping."""

    def __init__(self, case: Case) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.telemetry = Telemetry()
        self.comm = Comm(build_meshes(case.folding, "cpu"), self.telemetry)
        self.rank, self.world = dist.get_rank(), case.folding.world

    def results(self) -> dict[str, Any]:
        """Every dispatcher on every routing, and both forms of every capacity."""
        alone = self.comm.size("ep") * self.comm.size("etp") == 1
        names = ["local"] if alone else []
        found: dict[str, Any] = {}
        for dispatcher in [*names, "all_to_all", "all_gather", "dedup"]:
            for routing in ROUTINGS:
                found[f"{dispatcher}.{routing}"] = self.once(routing, dispatcher)
            for drop, capacity in DROPS.items():
                for routing in DROPPED:
                    key = f"{dispatcher}.{routing}.{drop}"
                    found[key] = self.once(routing, dispatcher, capacity)
        for drop, capacity in DROPS.items():
            padded = Capacity(capacity.factor, drop=capacity.drop, pad=True)
            for routing in DROPPED:
                with poisoned_memory():
                    found[f"padded.{routing}.{drop}"] = self.once(routing, "auto", padded)
        return found

    def once(
        self, routing: str, dispatcher: str, capacity: Capacity | None = None
    ) -> dict[str, Any]:
        inputs, module = build_inputs(routing, self.world), Experts(ROUTINGS[routing].num_experts)
        self.fold(module, dispatcher, capacity, tokens=len(inputs.index[self.rank]))
        hidden = inputs.hidden[self.rank].requires_grad_()
        weights = inputs.weights[self.rank].requires_grad_()
        syncs = [self.comm.host_syncs]
        out = module(hidden, inputs.index[self.rank], weights)
        syncs.append(self.comm.host_syncs)
        (out * inputs.upstream[self.rank]).sum().backward()
        syncs.append(self.comm.host_syncs)
        grads = {n: self.whole_sum(p.grad) for n, p in module.named_parameters()}
        return {
            "out": out.detach(),
            "hidden": hidden.grad,
            "weights": weights.grad,
            "syncs": [after - before for before, after in pairwise(syncs)],
            **grads,
        }

    def fold(
        self, module: nn.Module, dispatcher: str, capacity: Capacity | None, *, tokens: int
    ) -> None:
        running = RunningTokens()
        layout = TokenLayout(1, tokens, torch.arange(tokens))
        if capacity is not None and capacity.pad:
            layout = TokenLayout(1, tokens, layout.places_s, peers=ask_peers(layout, self.comm))
        running.moe = layout
        num_experts = module.gate_up_proj.shape[0]
        spec = ExpertsSpec("model.experts", module, num_experts, FFN, swiglu, None)
        swap_experts(
            [spec], comm=self.comm, dispatcher=dispatcher, tokens=running, capacity=capacity
        )

    def whole_sum(self, grad: Any) -> Tensor:
        """The gradient as FSDP2 would leave it: summed over edp, whole over ep and etp."""
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        summed = self.comm.all_reduce(local, axis="edp")
        if hasattr(grad, "to_local"):
            whole = type(grad).from_local(summed, grad.device_mesh, grad.placements)
            summed = whole.full_tensor()
        return summed.flatten(1, 2) if summed.dim() == 4 else summed

    def gaps_filled(self) -> dict[str, bool]:
        """Whether weight gradients came between the launch of some rows' gradients and the wait."""
        found = {}
        alone = self.comm.size("ep") * self.comm.size("etp") == 1
        for dispatcher in [] if alone else ["all_to_all", "all_gather", "dedup"]:
            inputs, module = build_inputs("even", self.world), Experts(8)
            self.fold(module, dispatcher, None, tokens=5)
            hidden = inputs.hidden[self.rank].requires_grad_()
            weights = inputs.weights[self.rank].requires_grad_()
            out = module(hidden, inputs.index[self.rank], weights)
            flights: list[tuple[float, float]] = []
            computed: list[float] = []
            for parameter in module.parameters():
                parameter.register_hook(lambda _, c=computed: c.append(perf_counter()))

            def landed(flight: Flight, known: Any = flights) -> None:
                known.append((flight.issued_s, perf_counter()))

            self.telemetry.subscribe(Flight, landed)
            out.sum().backward()
            self.telemetry.unsubscribe(Flight, landed)
            assert len(computed) == 2
            found[dispatcher] = all(
                any(start < moment < end for start, end in flights) for moment in computed
            )
        return found

    def nan_errors(self) -> dict[str, str]:
        """What this rank is told when rank 1 routes by NaN; nothing outside of its ep x etp."""
        told = {}
        alone = self.comm.size("ep") * self.comm.size("etp") == 1
        for dispatcher in ["local"] if alone else ["all_to_all", "all_gather", "dedup"]:
            inputs, module = build_inputs("even", self.world), Experts(8)
            self.fold(module, dispatcher, None, tokens=5)
            weights = inputs.weights[self.rank]
            if self.rank == 1:
                weights[2, 1] = float("nan")
            try:
                module(inputs.hidden[self.rank], inputs.index[self.rank], weights)
            except ValueError as error:
                told[dispatcher] = str(error)
            dist.barrier()
        return told


def run(case: Case, folder: Path) -> None:
    """Run everything under one mapping and leave its process groups."""
    rank = Rank(case)
    torch.save(
        {"results": rank.results(), "nan": rank.nan_errors(), "filled": rank.gaps_filled()},
        folder / f"rank{os.environ['RANK']}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()
