"""Degenerate routings of one experts container: dispatch, experts, combine, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contract.worker import Context
from lightning_fold.model.inspect import ExpertsSpec
from lightning_fold.model.swap import swap_experts
from lightning_fold.moe.tokens import RunningTokens

NUM_EXPERTS, WIDTH, FFN, TOKENS = 4, 6, 4, 5


def _even(tokens: int, rank: int) -> Tensor:
    return torch.stack(
        [(torch.arange(tokens) + rank) % 4, (torch.arange(tokens) + rank + 1) % 4], 1
    )


ROUTINGS = {
    "even": lambda rank: _even(TOKENS, rank),
    "uneven_tokens": lambda rank: _even(rank + 1, rank),
    "zero_tokens_on_rank_1": lambda rank: _even(0 if rank == 1 else TOKENS, rank),
    "zero_tokens_anywhere": lambda rank: _even(0, rank),
    "all_tokens_to_one_expert": lambda rank: torch.full((TOKENS, 1), 2),
    "one_expert_per_rank": lambda rank: torch.full((TOKENS, 1), rank),
    "k_equals_e": lambda rank: torch.arange(NUM_EXPERTS).expand(TOKENS, NUM_EXPERTS).contiguous(),
}


@dataclass(frozen=True)
class Case:
    """Inputs of all ranks, equal wherever they are built."""

    hidden: list[Tensor]
    index: list[Tensor]
    weights: list[Tensor]
    upstream: list[Tensor]


def build_case(name: str, ranks: int) -> Case:
    generator = torch.Generator().manual_seed(11)
    index = [ROUTINGS[name](rank) for rank in range(ranks)]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Case(
        hidden=[draw(i.shape[0], WIDTH) for i in index],
        index=index,
        weights=[draw(*i.shape).abs() for i in index],
        upstream=[draw(i.shape[0], WIDTH) for i in index],
    )


class Experts(nn.Module):
    """Stacked experts and the plainest loop over them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        gate_up = torch.randn(NUM_EXPERTS, 2 * FFN, WIDTH, generator=generator, dtype=torch.float64)
        down = torch.randn(NUM_EXPERTS, WIDTH, FFN, generator=generator, dtype=torch.float64)
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = []
        for token, ids, scale in zip(hidden, index, weights, strict=True):
            parts = [w * self.one(token, int(e)) for e, w in zip(ids, scale, strict=True)]
            rows.append(torch.stack(parts).sum(0))
        return torch.stack(rows) if rows else hidden * 1.0

    def one(self, token: Tensor, expert: int) -> Tensor:
        gate, up = (self.gate_up_proj[expert] @ token).chunk(2)
        return self.down_proj[expert] @ (nn.functional.silu(gate) * up)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def tokens(context: Context) -> dict[str, Any]:
    """Outputs and gradients of every routing on this rank."""
    trainer = context.trainer()
    trainer.strategy.setup_environment()
    comm = trainer.strategy.comm
    results: dict[str, Any] = {}
    for name in ROUTINGS:
        case, rank, module = build_case(name, context.world), context.rank, Experts()
        swap_experts(
            [ExpertsSpec("experts", module, 4, FFN, swiglu, None)],
            comm=comm,
            dispatcher="auto",
            tokens=RunningTokens(),
        )
        hidden, weights = case.hidden[rank].requires_grad_(), case.weights[rank].requires_grad_()
        before = comm.host_syncs
        out = module(hidden, case.index[rank], weights)
        syncs = comm.host_syncs - before
        (out * case.upstream[rank]).sum().backward()
        grads = {n: whole_sum(p.grad, comm) for n, p in module.named_parameters()}
        results[name] = {
            "out": out.detach(),
            "hidden": hidden.grad,
            "weights": weights.grad,
            "syncs": syncs,
            **grads,
        }
    return results


def whole_sum(grad: Any, comm: Any) -> Tensor:
    """The gradient as FSDP2 would leave it: summed over edp, whole over ep and etp."""
    local = grad.to_local() if hasattr(grad, "to_local") else grad
    summed = comm.all_reduce(local, axis="edp")
    if not hasattr(grad, "to_local"):
        return summed.flatten(1, 2) if summed.dim() == 4 else summed
    whole = type(grad).from_local(summed, grad.device_mesh, grad.placements).full_tensor()
    return whole.flatten(1, 2) if whole.dim() == 4 else whole


def reference(name: str, ranks: int) -> dict[str, Any]:
    """The loop over tokens, all ranks' rows one after another."""
    case, module = build_case(name, ranks), Experts()
    for tensor in (*case.hidden, *case.weights):
        tensor.requires_grad_()
    outs = [module(h, i, w) for h, i, w in zip(case.hidden, case.index, case.weights, strict=True)]
    torch.stack([(o * u).sum() for o, u in zip(outs, case.upstream, strict=True)]).sum().backward()
    grads = {n: _gradient(p) for n, p in module.named_parameters()}
    ranks_out = [
        {"out": o.detach(), "hidden": _gradient(h), "weights": _gradient(w)}
        for o, h, w in zip(outs, case.hidden, case.weights, strict=True)
    ]
    return {"ranks": ranks_out, **grads}


def _gradient(leaf: Tensor) -> Tensor:
    """Zeros where no token reached a leaf: the loop never touches it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
