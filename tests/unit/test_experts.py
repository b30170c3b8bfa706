"""The expert computation on rows that have arrived."""

import pytest
import torch
from torch import nn

from lightning_fold.moe.experts import ExpertRows, run_experts
from lightning_fold.moe.layer import compute_dtype

# Shapes.  S rows that arrived   R pairs in expert order   e local experts
#          D model width   F local expert width
D, F = 6, 4


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def _inputs(sizes: list[int]) -> tuple[ExpertRows, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    rows = ExpertRows(
        source_SD=torch.randn(3, D, dtype=torch.float64, requires_grad=True),
        # Rows serve several experts, or none.
        origin_R=torch.arange(sum(sizes)) % 2,
        weights_R=torch.rand(sum(sizes), dtype=torch.float64, requires_grad=True),
        counts_e=torch.tensor(sizes),
        sizes=sizes,
    )
    gate_up = torch.randn(len(sizes), 2, F, D, dtype=torch.float64, requires_grad=True)
    return rows, gate_up, torch.randn(len(sizes), D, F, dtype=torch.float64, requires_grad=True)


def _loop(rows: ExpertRows, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    experts = [e for e, size in enumerate(rows.sizes) for _ in range(size)]
    out = [torch.zeros(D, dtype=torch.float64) for _ in rows.source_SD]
    for origin, weight, e in zip(rows.origin_R.tolist(), rows.weights_R, experts, strict=True):
        row = rows.source_SD[origin]
        hidden = nn.functional.silu(gate_up[e, 0] @ row) * (gate_up[e, 1] @ row)
        out[origin] = out[origin] + weight * (down[e] @ hidden)
    return torch.stack(out)


@pytest.mark.parametrize("sizes", [[2, 0, 3], [0, 4, 0], [1, 1, 1]], ids=str)
def test_rows_and_gradients_match_a_loop(sizes: list[int]) -> None:
    rows, gate_up, down = _inputs(sizes)
    out = run_experts(rows, gate_up_e2FD=gate_up, down_eDF=down, activation=swiglu)
    wanted = _loop(rows, gate_up, down)
    torch.testing.assert_close(out, wanted)
    leaves = (rows.source_SD, rows.weights_R, gate_up, down)
    upstream = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad(out, leaves, upstream),
        torch.autograd.grad(wanted, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_no_pairs_give_zeros_and_zero_gradients() -> None:
    rows, gate_up, down = _inputs([0, 0])
    out = run_experts(rows, gate_up_e2FD=gate_up, down_eDF=down, activation=swiglu)
    assert torch.equal(out, torch.zeros(3, D, dtype=torch.float64))
    out.sum().backward()
    assert torch.equal(gate_up.grad, torch.zeros_like(gate_up))
    assert torch.equal(down.grad, torch.zeros_like(down))


def test_width_shards_sum_to_the_whole() -> None:
    rows, gate_up, down = _inputs([2, 3])
    whole = run_experts(rows, gate_up_e2FD=gate_up, down_eDF=down, activation=swiglu)
    parts = [
        run_experts(
            rows, gate_up_e2FD=gate_up[:, :, half], down_eDF=down[:, :, half], activation=swiglu
        )
        for half in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_compute_dtype_follows_autocast_but_keeps_double() -> None:
    x = torch.zeros(1)
    assert compute_dtype(x) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(x) == torch.bfloat16
        assert compute_dtype(x.double()) == torch.float64
