"""What one MoE layer keeps from forward to backward, against the closed form, in bf16.

Rows and first product: 2TD + 4TKF bytes where experts are whole, R(2D + 4F) for R rows that arrived
from other ranks (SonicMoE, arXiv 2512.14080). Orders and routing weights come on top: 8 bytes an
index, so the larger F, the less they are. `benchmarks/kernels_cpu.py` prints the same of real
widths, and the peak.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fold_kernels.swiglu import swiglu
from lightning_fold.model.inspect import ExpertsSpec
from lightning_fold.model.swap import swap_experts
from lightning_fold.moe.experts import ExpertRows, run_experts
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.telemetry import Telemetry
from lightning_fold.topology.comm import Comm

# Shapes.  T tokens   K top-k   R rows that arrived   E experts   D model width   F expert width
T, K, E, D, F = 256, 4, 8, 128, 96
BF16 = torch.bfloat16
SLACK = 1.10


class Alone(Comm):
    """A rank without peers."""

    def __init__(self) -> None:
        self.telemetry, self.host_syncs = Telemetry(), 0

    def size(self, axis: str) -> int:
        return 1

    def rank(self, axis: str) -> int:
        return 0

    @property
    def global_rank(self) -> int:
        return 0


class Experts(nn.Module):
    """Stacked weights, as models hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * F, D, dtype=BF16) * D**-0.5)
        self.down_proj = nn.Parameter(torch.randn(E, D, F, dtype=BF16) * F**-0.5)


class Kept:
    """Bytes that autograd keeps between entry and exit, each storage once, some tensors aside."""

    def __init__(self, *aside: Tensor) -> None:
        self.aside = {x.untyped_storage().data_ptr() for x in aside}
        self.sizes: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.aside:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self) -> Kept:
        self.hooks.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self.hooks.__exit__(*reason)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def inputs(dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    weights, index = torch.rand(T, E).topk(K, dim=1)
    tokens = torch.randn(T, D, dtype=dtype).requires_grad_()
    return tokens, index, weights.requires_grad_()


def layer_bytes(dispatcher: str, *, recompute: bool = False) -> int:
    """What one folded layer keeps."""
    experts = Experts()
    spec = ExpertsSpec("experts", experts, E, F, swiglu, None)
    swap_experts([spec], comm=Alone(), dispatcher=dispatcher, tokens=RunningTokens())
    experts.forward.recompute = recompute
    tokens, index, weights = inputs()
    with Kept(experts.gate_up_proj, experts.down_proj) as kept:
        out = experts.forward(tokens, index, weights)
    # All of it is needed: the graph lives.
    torch.autograd.grad(out, (tokens, weights), torch.randn_like(out))
    return kept.bytes


def test_a_layer_whose_experts_are_whole_keeps_rows_and_first_product() -> None:
    closed = 2 * T * D + 4 * T * K * F
    assert closed <= layer_bytes("local") <= SLACK * closed


def test_a_layer_whose_rows_travel_keeps_what_arrived_and_first_product() -> None:
    arrived = T * K
    closed = 2 * arrived * D + 4 * arrived * F
    assert closed <= layer_bytes("all_to_all") <= SLACK * closed


@pytest.mark.parametrize("dispatcher", ["local", "all_to_all"])
def test_recomputation_drops_the_first_product(dispatcher: str) -> None:
    dropped = layer_bytes(dispatcher) - layer_bytes(dispatcher, recompute=True)
    assert dropped == 4 * T * K * F


@pytest.mark.parametrize("sizes", [[64, 0, 300, 7], [0, 0, 1, 0], [500, 500, 500, 500]], ids=str)
def test_experts_keep_rows_that_arrived_from_anywhere(sizes: list[int]) -> None:
    arrived, experts = sum(sizes), Experts()
    rows = ExpertRows(
        torch.randn(arrived, D, dtype=BF16).requires_grad_(),
        torch.arange(arrived),
        torch.rand(arrived).requires_grad_(),
        torch.tensor(sizes),
        sizes,
    )
    first = experts.gate_up_proj.unflatten(1, (2, F))[: len(sizes)]
    second = experts.down_proj[: len(sizes)]
    with Kept(first, second) as kept:
        run_experts(rows, gate_up_e2FD=first, down_eDF=second, activation=swiglu)
    # A routing weight in fp32 and an index are 12 bytes a row.
    assert kept.bytes == arrived * (2 * D + 4 * F + 12)


def test_hugging_face_s_experts_keep_several_times_as_much() -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K
    )
    for implementation in ("grouped_mm", "eager"):
        config._experts_implementation = implementation
        experts, plain = Qwen3MoeExperts(config), Experts()
        experts.gate_up_proj, experts.down_proj = plain.gate_up_proj, plain.down_proj
        tokens, index, weights = inputs()
        with Kept(*experts.parameters()) as kept:
            experts(tokens, index, weights.to(BF16))
        assert kept.bytes > 2 * layer_bytes("local"), implementation
