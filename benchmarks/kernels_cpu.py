"""The expert path on a CPU, over its own products and over plain grouped GEMMs, and its memory.

    python benchmarks/kernels_cpu.py [--rounds 24]

`expert_mlp`, forward and backward, on rows that are there: routing is given and its order computed
before. Shapes, products and rounds are those of `moe_layer.py`: one thread, fp32, 2048 tokens of
width 256, every ratio of two times of one round.

    /floor    time of the products alone, per expert and preallocated, over the row's
    /plain    time of the layer as a user writes it with F.grouped_mm, the quicker of two, over
              the row's

Every row's outputs and gradients are compared before it is timed. Then, in bf16: what backward
keeps over 2TD + 4TKF bytes, and the most that a step holds beside parameters and inputs, by
counting storages, so it is the same in every run. Aims: /floor 0.92 coarse, 0.85 fine; /plain
0.97; kept 1.10. The peak stands beside that of Hugging Face's experts and has no aim: of a problem
this small, most of it is the buffer of a batch, which does not grow with the tokens. The last line
has the figures; exit status 1 if one misses its aim.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe_layer import (
    SHAPES,
    TOKENS,
    WIDTH,
    Problem,
    Result,
    Row,
    Shape,
    compare,
    floor_row,
    layer_row,
    layers_of,
    time_rounds,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fold_kernels.expert_mlp import Order, expert_mlp
from fold_kernels.permute import sort_by_expert
from fold_kernels.swiglu import swiglu
from lightning_fold.telemetry import Telemetry
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.folding import Folding
from lightning_fold.topology.meshes import build_meshes

# Shapes.  T tokens   K top-k   N = T*K pairs in expert order   E experts   D model width
#          F expert width

EXPERTS, PLAIN = "expert_mlp", ("grouped_mm, index_add", "grouped_mm, gather and sum")
FLOOR_AIMS = {"coarse": 0.92, "fine": 0.85}
PLAIN_AIM, KEPT_AIM = 0.97, 1.10


@dataclass(frozen=True)
class Placed:
    """A problem's pairs in expert order.

    Attributes:
        order: Row of every pair, and counts.
        inverse_N: Place of every pair, token by token.
        weights_N: Routing weights in that order.
        ends_E: int32, where each expert's pairs end.
    """

    order: Order
    inverse_N: Tensor
    weights_N: Tensor
    ends_E: Tensor

    @classmethod
    def of(cls, problem: Problem) -> Placed:
        """Computed once, before anything is timed."""
        shape = problem.shape
        order_N, inverse_N = sort_by_expert(problem.index)
        counts_E = torch.bincount(problem.index.flatten(), minlength=shape.experts)
        return cls(
            Order(order_N // shape.top_k, counts_E, counts_E.tolist()),
            inverse_N,
            problem.weights.flatten()[order_N],
            counts_E.cumsum(0).int(),
        )

    def leaves(self, problem: Problem) -> tuple[Tensor, ...]:
        """Tokens, routing weights in expert order, both weights."""
        operands = problem.tokens, self.weights_N, problem.gate_up, problem.down
        return tuple(x.clone().requires_grad_() for x in operands)

    def as_given(self, result: Result) -> Result:
        """The gradient of the routing weights token by token, as `compare` wants it."""
        out, tokens, weights_N, *rest = result
        return out, tokens, weights_N[self.inverse_N], *rest


def expert_row(problem: Problem, placed: Placed) -> Row:
    """The path of this package."""
    leaves = placed.leaves(problem)
    tokens, weights, gate_up, down = leaves

    def run() -> Result:
        halves = gate_up.unflatten(1, (2, -1))
        out = expert_mlp(tokens, weights, halves, down, placed.order, activation=swiglu)
        return out, *torch.autograd.grad(out, leaves, problem.upstream)

    return run


def plain_row(problem: Problem, placed: Placed, *, gathers: bool) -> Row:
    """The layer in a few lines of torch; rows come home by a sum of gathered ones, or index_add."""
    leaves = placed.leaves(problem)
    tokens, weights, gate_up, down = leaves
    origin, ends = placed.order.origin_R, placed.ends_E

    def run() -> Result:
        hidden = F.grouped_mm(tokens[origin], gate_up.mT, offs=ends)
        gate, up = hidden.chunk(2, dim=1)
        rows = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends) * weights.unsqueeze(1)
        if gathers:
            out = rows[placed.inverse_N].view(TOKENS, -1, WIDTH).sum(1)
        else:
            out = torch.zeros_like(tokens).index_add(0, origin, rows)
        return out, *torch.autograd.grad(out, leaves, problem.upstream)

    return run


def rows_of(problem: Problem, placed: Placed) -> dict[str, Row]:
    """Everything that is timed, by name."""
    rows = {"floor": floor_row(problem), EXPERTS: expert_row(problem, placed)}
    plain = {
        name: plain_row(problem, placed, gathers=gathers)
        for name, gathers in zip(PLAIN, (False, True), strict=True)
    }
    return rows | plain


def speed(shape: Shape, rounds: int) -> dict[str, float]:
    """Ratios of one shape; prints a line a row."""
    problem = Problem.of(shape, 0)
    placed = Placed.of(problem)
    rows = rows_of(problem, placed)
    # Bound early: each has its own `run`.
    compared = {
        name: (lambda run=run: placed.as_given(run()))
        for name, run in rows.items()
        if name != "floor"
    }
    compare(problem, compared, 1)
    seconds = time_rounds(rows, rounds)
    quicker = min(PLAIN, key=lambda name: statistics.median(seconds[name]))
    print(f"{shape.name}: {shape.experts} experts, top-{shape.top_k}, width {shape.width}")
    for name, times in seconds.items():
        line = f"  {name:28s} {statistics.median(times) * 1e3:8.1f} ms"
        for base, label in (("floor", "floor"), (quicker, "plain")):
            low, middle, high = statistics.quantiles(ratios(seconds, base, name), n=4)
            line += f"   /{label} {middle:.3f} ({low:.3f} to {high:.3f})"
        print(line)
    print("json:", json.dumps({"shape": shape.name, "seconds": seconds}), flush=True)
    return {
        "floor": statistics.median(ratios(seconds, "floor", EXPERTS)),
        "plain": statistics.median(ratios(seconds, quicker, EXPERTS)),
    }


def ratios(seconds: dict[str, list[float]], base: str, name: str) -> list[float]:
    """Time of the base over a row's, round by round."""
    return [a / b for a, b in zip(seconds[base], seconds[name], strict=True)]


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make and that still live, and their most at once.

    What a single operation allocates and frees inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.before: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what came out."""
        inputs, _ = torch.utils._pytree.tree_flatten((args, kwargs or {}))
        known = {x.untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_flatten(out)[0]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in known:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: kept for key, kept in self.live.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def memory_of(run: Row, parameters: tuple[Tensor, ...]) -> tuple[int, int]:
    """Bytes that a forward keeps for its backward, and the most that both hold."""
    local = (getattr(x, "_local_tensor", x) for x in parameters)
    others = {x.untyped_storage().data_ptr() for x in local}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in others:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    with LiveBytes() as counted:
        run()
    return sum(kept.values()), counted.peak


def memory(shape: Shape, comm: Any) -> dict[str, float]:
    """Kept bytes over the closed form, and the peak over Hugging Face's; prints a line a layer."""
    problem = Problem.of(shape, 0)
    names = ("gate_up", "down", "tokens", "weights", "upstream")
    problem = replace(problem, **{name: getattr(problem, name).bfloat16() for name in names})
    closed = 2 * TOKENS * WIDTH + 4 * TOKENS * shape.top_k * shape.width
    print(f"{shape.name}, bf16: 2TD + 4TKF = {closed / 2**20:.2f} MiB")
    peaks, over = {}, {}
    for name, experts in layers_of(problem, comm):
        parameters = (experts.gate_up_proj, experts.down_proj)
        kept, peaks[name] = memory_of(layer_row(problem, experts), parameters)
        over[name] = kept / closed
        print(
            f"  {name:28s} kept {kept / 2**20:8.2f} MiB, {over[name]:5.2f} of it; at the peak "
            f"{peaks[name] / 2**20:8.2f} MiB",
            flush=True,
        )
    figures = {"kept": over["folded"]}
    if theirs := [peak for name, peak in peaks.items() if name != "folded"]:
        figures["peak"] = peaks["folded"] / min(theirs)
    return figures


def misses(shape: Shape, figures: dict[str, float]) -> Iterator[str]:
    """What is not as it should be."""
    least = {"floor": FLOOR_AIMS[shape.name], "plain": PLAIN_AIM}
    most = {"kept": KEPT_AIM}
    for name, figure in figures.items():
        if figure < least.get(name, figure) or figure > most.get(name, figure):
            yield f"{shape.name}: {name} {figure:.3f}, aim {least.get(name) or most[name]:.2f}"


def main() -> int:
    """Time and count both shapes; 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    found, missed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        comm = Comm(build_meshes(Folding.from_id("tp1cp1dp1pp1-etp1ep1edp1"), "cpu"), Telemetry())
        print(f"torch {torch.__version__}, {platform.machine()}, 1 thread, {rounds} rounds")
        for shape in SHAPES:
            found[shape.name] = speed(shape, rounds) | memory(shape, comm)
            missed.extend(misses(shape, found[shape.name]))
        dist.destroy_process_group()
    print("\n".join(f"missed: {line}" for line in missed) or "all aims are met")
    figures = (
        " ".join([name, *(f"{key} {figure:.3f}" for key, figure in of_shape.items())])
        for name, of_shape in found.items()
    )
    print("; ".join(figures))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
