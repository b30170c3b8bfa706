"""Problems with awkward sizes, and what a plain fp64 computation says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fold_kernels.activation import ACTIVATIONS
from fold_kernels.expert_mlp import Order, expert_mlp

# Relative error of a norm, by dtype, and why (kernels.md 3.6).
PRODUCT = {
    torch.float32: 1e-6,  # sums of at most a few hundred products
    torch.bfloat16: 2.5e-3,  # one rounding of the result, 1.66e-3 measured
    torch.float16: 5e-4,  # the same with 11 bits
}
LAYER = {
    torch.float32: 2e-6,
    torch.bfloat16: 6e-3,  # the activation is rounded before the second product too
    torch.float16: 1e-3,
}
# Where the experts without a row lie; rows are few and divide no block.
SIZES = {
    "first": [0, 7, 20, 5],
    "middle": [9, 0, 0, 18],
    "last": [3, 17, 1, 0],
    "one": [0, 0, 33, 0],
    "none": [0, 0, 0, 0],
}


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative error of a norm; infinite where a number is not finite."""
    got, wanted = got.detach(), wanted.detach()
    difference = (got.double() - wanted.double()).norm()
    scale = wanted.double().norm().clamp_min(1e-30)
    return float("inf") if not torch.isfinite(got).all() else float(difference / scale)


def offsets_of(sizes: Sequence[int]) -> Tensor:
    """int32 [e + 1]."""
    return torch.tensor([0, *sizes]).cumsum(0).int()


@dataclass
class Problem:
    """Operands of the experts, plain tensors; rows behind the pairs and beside them are NaN."""

    source: Tensor
    origin: Tensor
    scale: Tensor
    first: Tensor
    second: Tensor
    upstream: Tensor
    sizes: list[int]

    @classmethod
    def draw(
        cls,
        sizes: list[int],
        *,
        dtype: torch.dtype = torch.float32,
        model: int = 48,
        width: int = 40,
        halves: int = 2,
        rows: int = 13,
        device: torch.device | str = "cpu",
    ) -> Problem:
        """Weights of unit gain; several pairs share a row, the last row has none."""
        experts, pairs = len(sizes), sum(sizes)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape).to(dtype).to(device)

        return cls(
            draw(rows, model),
            (torch.arange(pairs) * 5 % (rows - 1)).to(device),
            (torch.rand(pairs) + 0.1).to(device),
            draw(experts, halves * width, model) * model**-0.5,
            draw(experts, model, width) * width**-0.5,
            draw(rows, model),
            sizes,
        )

    @property
    def offsets(self) -> Tensor:
        """Where each expert's pairs begin."""
        return offsets_of(self.sizes).to(self.source.device)


def by_expert(
    rows: Tensor, sizes: Sequence[int], product: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Each expert's rows through its own product."""
    parts = rows.split(list(sizes))
    return torch.cat([product(part, e) for e, part in enumerate(parts)])


def plain_layer(
    problem: Problem, activation: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums [S, D] and the gradients of everything, in fp64."""
    leaves = {
        name: getattr(problem, name).double().detach().requires_grad_()
        for name in ("source", "scale", "first", "second")
    }
    rows = leaves["source"][problem.origin]
    hidden = by_expert(rows, problem.sizes, lambda x, e: x @ leaves["first"][e].T)
    act = activation(hidden) * leaves["scale"].unsqueeze(1)
    out = by_expert(act, problem.sizes, lambda x, e: x @ leaves["second"][e].T)
    sums = torch.zeros_like(leaves["source"]).index_add(0, problem.origin, out)
    grads = torch.autograd.grad(sums, list(leaves.values()), problem.upstream.double())
    return sums.detach(), dict(zip(leaves, grads, strict=True))


def run_experts(
    problem: Problem, activation: str = "swiglu", **options
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums [S, D] and the gradients of everything, by the layer's own entry."""
    leaves = {
        name: getattr(problem, name).clone().requires_grad_()
        for name in ("source", "scale", "first", "second")
    }
    first = leaves["first"].unflatten(1, (2, -1))
    counts = torch.tensor(problem.sizes, device=problem.source.device)
    order = Order(problem.origin, counts, problem.sizes)
    out = expert_mlp(
        leaves["source"],
        leaves["scale"],
        first,
        leaves["second"],
        order,
        activation=ACTIVATIONS[activation],
        **options,
    )
    grads = torch.autograd.grad(out, list(leaves.values()), problem.upstream)
    return out.detach(), dict(zip(leaves, grads, strict=True))
