"""Time of one MoE layer, forward and backward, against a dense MLP and against its own products.

    python benchmarks/moe_layer.py [--rounds 24] [--ranks 1 2 4] [--quick]

Tables of ratios, one a shape and number of ranks, one thread a rank, fp32, 2048 tokens a rank of
width 256:

    /dense    time of a dense SwiGLU MLP of equal FLOPs over the row's; 1.00 is the dense limit
    /floor    time of the layer's products alone, per expert and preallocated, over the row's

All rows of a table run in one process per rank, in rounds that interleave them in changing order;
a ratio compares two times of one round. Medians of the rounds, and their quartiles. Every row
has the same weights and tokens, and its outputs and gradients are compared before it is timed.
Routing is given, so dispatch and combine count and the router does not. With several ranks, each
has its own tokens and experts are spread over all of them (ep); the dense MLP runs on all ranks
at once, a time is that of the slowest rank. Aims of issue 4: /floor 0.90 coarse, 0.80 fine on one
rank; /dense 0.90 coarse, 0.60 fine on two.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# Shapes.  T tokens of a rank   K top-k   E all experts   e local experts   D model width
#          F expert width
TOKENS, WIDTH = 2048, 256


@dataclass(frozen=True)
class Shape:
    """A layer: number of experts, of experts a token takes, and their width."""

    name: str
    experts: int
    top_k: int
    width: int


SHAPES = (Shape("coarse", 8, 2, 512), Shape("fine", 64, 8, 64))
Result = tuple[Tensor, ...]
"""Output [T, D], then gradients: tokens, routing weights, gate_up [E, 2F, D], down [E, D, F]."""


@dataclass(frozen=True)
class Problem:
    """Weights that all ranks know, and this rank's tokens, routing and upstream gradient."""

    shape: Shape
    gate_up: Tensor
    down: Tensor
    tokens: Tensor
    index: Tensor
    weights: Tensor
    upstream: Tensor

    @classmethod
    def of(cls, shape: Shape, rank: int) -> Problem:
        """Uniform random routing; the same weights on all ranks."""
        shared = torch.Generator().manual_seed(0)
        own = torch.Generator().manual_seed(1 + rank)
        scores = torch.rand(TOKENS, shape.experts, generator=own)
        weights, index = scores.topk(shape.top_k, dim=1)
        return cls(
            shape,
            torch.randn(shape.experts, 2 * shape.width, WIDTH, generator=shared) * WIDTH**-0.5,
            torch.randn(shape.experts, WIDTH, shape.width, generator=shared) * shape.width**-0.5,
            torch.randn(TOKENS, WIDTH, generator=own),
            index,
            weights / weights.sum(1, keepdim=True),
            torch.randn(TOKENS, WIDTH, generator=own),
        )

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Tokens and routing weights that ask for gradients."""
        return self.tokens.clone().requires_grad_(), self.weights.clone().requires_grad_()


Row = Callable[[], Result]


def dense_row(problem: Problem) -> Row:
    """A dense SwiGLU MLP: every token meets as many weights as in its experts."""
    inner = problem.shape.top_k * problem.shape.width
    tokens, _ = problem.leaves()
    first = torch.randn(2 * inner, WIDTH).mul_(WIDTH**-0.5).requires_grad_()
    second = torch.randn(WIDTH, inner).mul_(inner**-0.5).requires_grad_()

    def run() -> Result:
        gate, up = F.linear(tokens, first).chunk(2, dim=1)
        out = F.linear(F.silu(gate) * up, second)
        return torch.autograd.grad(out, (tokens, first, second), problem.upstream)

    return run


def floor_row(problem: Problem) -> Row:
    """The products of the layer and nothing else: operands and results lie there."""
    sizes = torch.bincount(problem.index.flatten(), minlength=problem.shape.experts).tolist()
    pairs, width = sum(sizes), problem.shape.width
    rows, grads = (torch.randn(pairs, WIDTH).split(sizes) for _ in range(2))
    hidden = torch.randn(pairs, 2 * width).split(sizes)
    act = torch.randn(pairs, width).split(sizes)
    grad_gate_up, grad_down = torch.empty_like(problem.gate_up), torch.empty_like(problem.down)
    weights = list(zip(problem.gate_up, problem.down, grad_gate_up, grad_down, strict=True))
    # Results overwrite operands of the same shape, which would grow or vanish over many rounds.
    out_rows, out_hidden, out_act = (
        torch.empty(pairs, w).split(sizes) for w in (WIDTH, 2 * width, width)
    )

    def run() -> Result:
        for e, (gate_up, down, _, _) in enumerate(weights):
            torch.mm(rows[e], gate_up.t(), out=out_hidden[e])
            torch.mm(act[e], down.t(), out=out_rows[e])
        for e, (gate_up, down, grad_first, grad_second) in enumerate(weights):
            torch.mm(grads[e], down, out=out_act[e])
            torch.mm(grads[e].t(), act[e], out=grad_second)
            torch.mm(hidden[e].t(), rows[e], out=grad_first)
            torch.mm(hidden[e], gate_up, out=out_rows[e])
        return ()

    return run


def huggingface_experts(problem: Problem, implementation: str) -> Any:
    """Experts of transformers' Qwen3-MoE."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=problem.shape.width,
        num_experts=problem.shape.experts,
        num_experts_per_tok=problem.shape.top_k,
    )
    config._experts_implementation = implementation
    return with_weights(Qwen3MoeExperts(config), problem)


def folded_experts(problem: Problem, comm: Any, dispatcher: str) -> Any:
    """This package's layer, swapped in as the strategy does it."""
    from fold_kernels.swiglu import swiglu
    from lightning_fold.model.inspect import ExpertsSpec
    from lightning_fold.model.swap import swap_experts
    from lightning_fold.moe.tokens import RunningTokens

    experts = with_weights(nn.Module(), problem)
    shape = problem.shape
    spec = ExpertsSpec("experts", experts, shape.experts, shape.width, swiglu, None)
    swap_experts([spec], comm=comm, dispatcher=dispatcher, tokens=RunningTokens())
    return experts


def with_weights(module: Any, problem: Problem) -> Any:
    """Give an experts container the problem's weights."""
    module.gate_up_proj = nn.Parameter(problem.gate_up.clone())
    module.down_proj = nn.Parameter(problem.down.clone())
    return module


def layer_row(problem: Problem, experts: Any) -> Row:
    """Forward and backward of an experts container."""
    tokens, weights = problem.leaves()
    params = experts.gate_up_proj, experts.down_proj

    def run() -> Result:
        out = experts.forward(tokens, problem.index, weights)
        return out, *torch.autograd.grad(out, (tokens, weights, *params), problem.upstream)

    return run


def compare(problem: Problem, rows: dict[str, Row], world: int) -> None:
    """Refuse to time rows that disagree with a plain loop over experts in fp64."""
    wanted = reference(problem)
    for grad in wanted[3:]:
        dist.all_reduce(grad)
    local = problem.shape.experts // world
    own = slice(dist.get_rank() * local, (dist.get_rank() + 1) * local)
    for name, run in rows.items():
        if name in ("dense", "floor"):
            continue
        for what, got, want in zip(
            ("output", "tokens", "weights", "gate_up", "down"), run(), wanted, strict=True
        ):
            got = getattr(got, "_local_tensor", got).detach().double()
            want = want if got.numel() == want.numel() else want[own]
            error = float((got.flatten() - want.flatten()).norm() / want.norm())
            assert error < 1e-5, f"{name}: {what} is off by {error:.1e}"


def reference(problem: Problem) -> list[Tensor]:
    """A plain loop over experts, fp64."""
    leaves = [problem.tokens, problem.weights, problem.gate_up, problem.down]
    tokens, weights, gate_up, down = (x.double().requires_grad_() for x in leaves)
    out = torch.zeros_like(tokens)
    for e in range(problem.shape.experts):
        token, slot = torch.where(problem.index == e)
        gate, up = (tokens[token] @ gate_up[e].T).chunk(2, dim=1)
        part = (F.silu(gate) * up) @ down[e].T
        out = out.index_add(0, token, part * weights[token, slot, None])
    grads = torch.autograd.grad(out, (tokens, weights, gate_up, down), problem.upstream.double())
    return [out.detach(), *grads]


def rows_of(problem: Problem, comm: Any, world: int) -> dict[str, Row]:
    """Everything that is timed on this number of ranks."""
    from lightning_fold.dispatchers import BUILT_IN

    rows = {"dense": dense_row(problem), "floor": floor_row(problem)}
    if world > 1:
        names = [name for name in BUILT_IN if name != "local"]
        folded = {f"folded {name}": folded_experts(problem, comm, name) for name in names}
        return rows | {name: layer_row(problem, experts) for name, experts in folded.items()}
    return rows | {name: layer_row(problem, experts) for name, experts in layers_of(problem, comm)}


def layers_of(problem: Problem, comm: Any) -> Iterator[tuple[str, Any]]:
    """Experts containers on one rank: this package's, and Hugging Face's if they are installed."""
    yield "folded", folded_experts(problem, comm, "auto")
    if importlib.util.find_spec("transformers") is not None:
        yield "huggingface grouped_mm", huggingface_experts(problem, "grouped_mm")
        yield "huggingface loop", huggingface_experts(problem, "eager")


def time_rounds(rows: dict[str, Row], rounds: int) -> dict[str, list[float]]:
    """Seconds of every row in every round; those of the slowest rank."""
    names, seconds = list(rows), {name: [] for name in rows}
    for index in range(rounds + 1):
        # The order turns: whatever one row leaves in caches favours no other.
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            start = time.perf_counter()
            rows[name]()
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            # The first round warms up.
            if index:
                seconds[name].append(float(took))
    return seconds


def lines_of(seconds: dict[str, list[float]]) -> Iterator[str]:
    """The table's rows."""
    for name, times in seconds.items():
        text = f"  {name:24s} {statistics.median(times) * 1e3:8.1f} ms"
        for base in ("dense", "floor"):
            ratios = [a / b for a, b in zip(seconds[base], times, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            text += f"   /{base} {middle:.2f} ({low:.2f} to {high:.2f})"
        yield text


def measure(rank: int, world: int, rounds: int, store: str) -> None:
    """One rank: time both shapes; rank 0 prints."""
    from lightning_fold.telemetry import Telemetry
    from lightning_fold.topology.comm import Comm
    from lightning_fold.topology.folding import Folding
    from lightning_fold.topology.meshes import build_meshes

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    folding = Folding.from_id(f"tp1cp1dp{world}pp1-etp1ep{world}edp1")
    comm = Comm(build_meshes(folding, "cpu"), Telemetry())
    for shape in SHAPES:
        problem = Problem.of(shape, rank)
        rows = rows_of(problem, comm, world)
        compare(problem, rows, world)
        seconds = time_rounds(rows, rounds)
        if rank == 0:
            size = f"{shape.experts} experts, top-{shape.top_k}, width {shape.width}"
            print(f"{shape.name}: {size}; {world} rank(s), {rounds} rounds")
            print("\n".join(lines_of(seconds)), flush=True)
            print("json:", json.dumps({"shape": shape.name, "ranks": world, "seconds": seconds}))
    dist.destroy_process_group()


def main() -> None:
    """Measure on every number of ranks in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--quick", action="store_true", help="5 rounds, on 1 and 2 ranks")
    arguments = parser.parse_args()
    rounds, ranks = (5, [1, 2]) if arguments.quick else (arguments.rounds, arguments.ranks)
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, 1 thread a rank"
    )
    if importlib.util.find_spec("megatron") is None:
        print("megatron-core: not installed")
    for world in ranks:
        with tempfile.TemporaryDirectory() as folder:
            arguments_of_rank = (world, rounds, f"{folder}/store")
            torch.multiprocessing.spawn(measure, arguments_of_rank, nprocs=world)


if __name__ == "__main__":
    main()
