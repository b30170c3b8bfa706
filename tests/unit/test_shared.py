"""Shared experts beside the dispatch: used for the identical tensor, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV3Config, Qwen2MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from lightning_fold.model.decoder import DecoderConfig, SparseMoeBlock
from lightning_fold.model.swap import shared_blocks
from lightning_fold.moe.shared import SharedBeside
from lightning_fold.moe.tokens import RunningTokens, TokenLayout

SHAPE = (2, 3, 8)


def decoder_block() -> nn.Module:
    return SparseMoeBlock(
        DecoderConfig(
            hidden_size=8, num_experts=4, moe_intermediate_size=4, shared_expert_intermediate_size=4
        )
    )


def deepseek_block() -> nn.Module:
    return DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=8,
            n_routed_experts=4,
            moe_intermediate_size=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
        )
    )


def qwen2_block() -> nn.Module:
    return Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            hidden_size=8,
            num_experts=4,
            moe_intermediate_size=4,
            shared_expert_intermediate_size=4,
            num_experts_per_tok=2,
        )
    )


class Rig:
    """A block whose experts stand in for a dispatch: they run what runs beside it."""

    def __init__(self, block: nn.Module) -> None:
        torch.manual_seed(3)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.block, self.tokens = block.double(), RunningTokens()
        self.order: list[str] = []
        self.repeated: list[str] = []
        names = [name for name, _ in block.named_children() if name.startswith("shared")]
        (found,) = shared_blocks(
            nn.ModuleDict({"mlp": block}), [f"mlp.{n}" for n in names]
        ).values()
        self.shared = found.experts
        inner = self.shared.forward
        self.shared.forward = self._logged(inner)
        self.beside: SharedBeside | None = None
        block.experts.forward = self._experts

    def install(self) -> None:
        self.beside = SharedBeside(self.block, self.shared, self.tokens)

    def _logged(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            self.order.append("shared")
            return inner(*args)

        return forward

    def _experts(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.order.append("leave")
        if self.beside is not None:
            self.beside.run(hidden)
        self.order.append("arrive")
        return hidden * weights.sum(1, keepdim=True)

    def __call__(self, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        """Output and gradients of one forward."""
        self.tokens.moe = TokenLayout(2, 3, torch.arange(3))
        self.order.clear()
        x = x.clone().requires_grad_()
        self.block.zero_grad()
        out = (run or self.block)(x)
        forwards = len(self.order)
        out.square().sum().backward()
        self.order, self.repeated = self.order[:forwards], self.order[forwards:]
        grads = [p.grad for p in self.block.parameters() if p.grad is not None]
        return [out.detach(), x.grad, *grads]


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    """Outputs bit by bit; gradients but for the order in which autograd sums them."""
    assert torch.equal(got[0], wanted[0])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("build", [decoder_block, deepseek_block])
def test_shared_experts_run_while_rows_travel_from_the_second_forward_on(
    build: Callable[[], nn.Module],
) -> None:
    rig, x = Rig(build()), torch.randn(*SHAPE, dtype=torch.float64)
    wanted = rig(x)
    assert rig.order == ["leave", "arrive", "shared"]
    rig.install()
    first, second = rig(x), rig(x)
    assert rig.order == ["leave", "shared", "arrive"]
    assert rig.beside.early_runs_used == 1
    for got in (first, second):
        assert_same(got, wanted)


def test_a_block_that_calls_them_first_is_left_alone() -> None:
    rig, x = Rig(qwen2_block()), torch.randn(*SHAPE, dtype=torch.float64)
    rig.install()
    for _ in range(3):
        rig(x)
        assert rig.order == ["shared", "leave", "arrive"]
    assert rig.beside.early_runs_used == 0


def test_a_block_that_changes_its_mind_gets_its_own_result() -> None:
    rig, x = Rig(decoder_block()), torch.randn(*SHAPE, dtype=torch.float64)
    rig.install()
    rig(x)
    inner = rig.block.shared_expert.forward
    rig.block.shared_expert.forward = lambda hidden: inner(hidden * 2)
    doubled = rig(x)
    plain = Rig(decoder_block())
    shared = plain.block.shared_expert.forward
    plain.block.shared_expert.forward = lambda hidden: shared(hidden * 2)
    assert torch.equal(doubled[0], plain(x)[0])
    rig(x)
    assert rig.order == ["leave", "arrive", "shared"]
    assert rig.beside.early_runs_used == 0


def test_a_forward_that_backward_repeats_does_as_before() -> None:
    rig, x = Rig(decoder_block()), torch.randn(*SHAPE, dtype=torch.float64)
    wanted = rig(x)
    rig.install()

    def repeated(x: Tensor) -> Tensor:
        # The first forward learns; its repetition must not use what it has learned.
        return checkpoint(rig.block, x, use_reentrant=False)

    for order in (["leave", "arrive", "shared"], ["leave", "shared", "arrive"]):
        assert_same(rig(x, repeated), wanted)
        assert rig.order == order
        assert rig.repeated[:2] == order[:2]
    assert rig.beside.early_runs_used == 1


def test_without_a_layout_nothing_runs_early() -> None:
    rig, x = Rig(decoder_block()), torch.randn(*SHAPE, dtype=torch.float64)
    rig.install()
    for _ in range(3):
        rig.tokens.moe = None
        rig.block(x)
    assert rig.beside.early_runs_used == 0


def test_shared_experts_with_dropout_or_none_are_not_taken() -> None:
    block = nn.ModuleDict({"shared_expert": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))})
    root = nn.ModuleDict({"mlp": block})
    assert shared_blocks(root, ["mlp.shared_expert"]) == {}
    block["shared_expert"] = nn.Linear(2, 2)
    block["shared_expert_gate"] = nn.Linear(2, 1)
    names = ["mlp.shared_expert", "mlp.shared_expert_gate"]
    assert shared_blocks(root, names)["mlp"].experts is block["shared_expert"]
