"""Experts as a list of modules behind an adapter: stacked exactly, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fold import register_experts
from lightning_fold.model.adapters import StackedExperts, adapter_of, stack_block
from lightning_fold.model.fold import check_model
from lightning_fold.model.inspect import find_parts
from lightning_fold.topology.folding import Folding
from lightning_fold.verify.product.plain import as_folded

EP2 = Folding.from_world(2, ep=2)
WIDTH, INNER = 6, 4


class Expert(nn.Module):
    def __init__(self, inner: int = INNER, bias: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, inner, bias=bias)
        self.b = nn.Linear(WIDTH, inner, bias=False)
        # Stored transposed: an adapter returns any view.
        self.c = nn.Parameter(torch.randn(inner, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (nn.functional.silu(self.a(x)) * self.b(x)) @ self.c


class Block(nn.Module):
    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.pick = nn.Linear(WIDTH, len(experts))
        self.team = nn.ModuleList(experts)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.pick(x).softmax(-1).topk(2)
        return index, weights

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        index, weights = self.route(rows)
        out = self.extra(rows)
        for number, expert in enumerate(self.team):
            token, slot = (index == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(rows[token]) * weights[token, slot, None])
        return out.view_as(x)


class Derived(Block):
    pass


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert()])


register_experts(
    Block,
    experts="team",
    route=Block.route,
    weights=lambda e: (e.a.weight, e.b.weight, e.c.T),
    merge=lambda block, hidden, out: out + block.extra(hidden),
)


def holder(block: nn.Module) -> nn.Module:
    root = nn.Module()
    root.model = nn.Sequential(block)
    return root


@pytest.mark.parametrize("kind", [Block, Derived])
def test_a_stacked_block_computes_what_the_loop_did(kind: type[Block]) -> None:
    torch.manual_seed(0)
    block = kind([Expert() for _ in range(4)]).double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    expected = block(x)
    expected.square().sum().backward()
    grads = as_folded(block_root := holder(block), gradients(block_root))
    adapter = adapter_of(block)
    assert adapter is not None
    block.zero_grad()
    stacked = stack_block(block, adapter)
    out = block(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=0)
    out.square().sum().backward()
    now = gradients(block_root)
    assert set(now) == set(grads)
    for name, grad in now.items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-10, atol=1e-13)
    assert isinstance(stacked, StackedExperts)
    assert adapter_of(block) is None


def gradients(root: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in root.named_parameters() if p.grad is not None}


def test_an_adapted_block_is_found_with_its_sizes_and_left_as_it_is() -> None:
    root = holder(Block([Expert() for _ in range(4)]))
    parts, _ = check_model(root, EP2)
    (spec,) = parts.experts
    assert (spec.name, spec.num_experts, spec.width, spec.refusal) == (
        "model.0.team",
        4,
        INNER,
        None,
    )
    assert isinstance(root.model[0].team, nn.ModuleList)


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        ([], "empty"),
        ([Expert(), Expert(inner=3)], r"differ in shape \(2 kinds\)"),
        ([Expert(bias=True)], "an expert has 76 parameters, of which the adapter stacks 72"),
    ],
)
def test_experts_that_cannot_be_stacked_are_refused_where_they_are_spread(
    experts: list[nn.Module], reason: str
) -> None:
    root = holder(Block(experts) if experts else empty_block())
    with pytest.raises(ValueError, match=rf"model\.0\.team.*{reason}"):
        check_model(root, EP2)
    assert check_model(root, Folding.from_world(1))[0].experts[0].refusal is not None


def empty_block() -> Block:
    block = Block([Expert()])
    block.team = nn.ModuleList()
    return block


def test_a_list_without_an_adapter_names_the_way_to_one() -> None:
    (spec,) = find_parts(holder(Unknown())).experts
    assert "register_experts" in str(spec.refusal)


def test_uneven_experts_are_refused_as_for_any_model() -> None:
    with pytest.raises(ValueError, match="3 experts cannot be split over ep=2"):
        check_model(holder(Block([Expert() for _ in range(3)])), EP2)


def test_only_classes_of_modules_are_registered() -> None:
    wrong: Any = Block([Expert()])
    with pytest.raises(TypeError, match="Change `kind`"):
        register_experts(wrong, route=Block.route, weights=lambda e: e)
