"""The kernels on one GPU: first whether they are right, then what they gain.

    PYTHONPATH=kernels python benchmarks/kernels_h200.py --out FOLDER [--budget 400]
    PYTHONPATH=kernels python benchmarks/kernels_h200.py --out FOLDER --dry

Kernels are compiled on all cores; ceilings are measured (a copy, a product of 8192^3); every op is
compared with fp64 (`kernel_checks.py`). Then, until the budget is spent: every op with every tile
on uniform, random and skewed routings of the layers of seven models, beside torch's grouped_mm and
one plain product of equal FLOPs; all experts with the tiles found; whole layers with router and
combine, and their memory. The aims stand beside what was measured. FOLDER gets
`kernels_gpu.json`, after every part, the lines as `kernels_gpu.txt`, and `sm_XY.json`, a table that
`LIGHTNING_FOLD_TILES` takes.
Exit status 1 if an op is wrong; speed decides nothing. Needs `kernels/` alone, not the package.

`--dry` runs all of it in Triton's interpreter, on a tiny layer: a proof of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from kernel_checks import DRY, GPU, Check, all_checks
from torch import Tensor

from fold_kernels.backend import FORCE_VARIABLE, TILES_VARIABLE
from fold_kernels.expert_mlp import Order, expert_mlp
from fold_kernels.measured import Table
from fold_kernels.ops import expert_index, route
from fold_kernels.router import RouterSpec
from fold_kernels.swiglu import swiglu
from fold_kernels.tables import OPS
from fold_kernels.tune.compile import jobs_of, precompile
from fold_kernels.tune.layers import DRY_LAYER, LAYERS, ROUTINGS, Inputs, Layer, draw_inputs
from fold_kernels.tune.machine import Budget, Machine, in_interpreter, on_gpu, origin_of, tiles_of
from fold_kernels.tune.report import LEGEND, as_json, lines_of
from fold_kernels.tune.sweep import Timing, sweep_experts, sweep_products, table_from, tiles_from

if not hasattr(F, "grouped_mm"):
    # torch 2.11 may have the private name alone.
    F.grouped_mm = torch._grouped_mm  # type: ignore[attr-defined]

# Shapes.  T tokens   K top-k   N = T*K   E experts   D model width   F expert width

FORMS = ("triton", "torch_grouped_mm")
# Shares of the budget at whose end a part stops.
PRODUCTS, EXPERTS = 0.65, 0.85
# Fractions of the rate of a plain product, by grain of the layer (kernels.md 3.4).
PRODUCT_AIMS = {"coarse": 0.75, "fine": 0.60}
WGRAD_AIMS = {"coarse": 0.70, "fine": 0.60}
LAYER_AIMS = {"coarse": 0.60, "fine": 0.50}
COPY_AIM, ROUTER_AIM, KEPT_AIM = 0.85, 0.03, 1.10


@dataclass(frozen=True)
class LayerTiming:
    """A whole layer in one form: seconds of a step, bytes kept for backward, and at the peak."""

    layer: Layer
    form: str
    seconds: float
    kept: int
    peak: int


@dataclass
class Found:
    """Everything so far; written to disk after every part."""

    origin: dict[str, str] = field(default_factory=lambda: {"device": "unknown"})
    ceilings: dict[str, float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    layers: list[LayerTiming] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Replace the file."""
        content = {
            "origin": self.origin,
            "ceilings": self.ceilings,
            "checks": [asdict(check) for check in self.checks],
            "timings": [as_json(timing) for timing in self.timings],
            "layers": [asdict(layer) for layer in self.layers],
        }
        beside = folder / "kernels_gpu.json.partial"
        beside.write_text(json.dumps(content, indent=1))
        beside.replace(folder / "kernels_gpu.json")


def compile_all(*, dry: bool) -> None:
    """Compile what the sweep launches; a dry run compiles one kernel, for an absent H200."""
    start = time.monotonic()
    jobs = jobs_of(LAYERS, tiles_of)
    jobs = jobs[:1] if dry else jobs
    major, minor = (9, 0) if dry else torch.cuda.get_device_capability()
    processes = 1 if dry else os.cpu_count() or 1
    failed = precompile(jobs, capability=10 * major + minor, processes=processes)
    say(f"compiled {len(jobs)} kernels in {time.monotonic() - start:.0f} s")
    for failure in failed:
        say(f"does not compile: {failure}")


def ceilings(machine: Machine, *, dry: bool) -> dict[str, float]:
    """Bytes per second of a copy, read and written, and FLOPs of a large product."""
    size, side = (1 << 12, 64) if dry else (1 << 31, 8192)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    copy = machine.clock(lambda: (target.copy_(source),))
    left, right = (
        torch.randn(side, side, dtype=torch.bfloat16, device=machine.device) for _ in range(2)
    )
    product = machine.clock(lambda: (left @ right,))
    return {"copy": 2 * size / copy, "product": 2 * side**3 / product}


@dataclass(frozen=True)
class Step:
    """Forward of a layer, and backward of its output."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], tuple[Tensor, ...]]

    def both(self) -> tuple[Tensor, ...]:
        """What is timed."""
        return self.backward(self.forward())


def layer_step(inputs: Inputs) -> Step:
    """Router, order, experts and combine."""
    x, layer = inputs.x, inputs.layer
    router_ED = (torch.randn(layer.experts, layer.model) * layer.model**-0.5).to(x.source_SD)
    gate_up = x.gate_up_eOD.unflatten(1, (2, -1))
    leaves = [t.detach().requires_grad_() for t in (x.source_SD, router_ED, gate_up, x.down_eDF)]
    spec = RouterSpec(layer.top_k)

    def forward() -> Tensor:
        rows_TD, router, first, second = leaves
        weights_TK, index_TK = route(F.linear(rows_TD, router).float(), spec)
        order_N, _, counts_E = expert_index(index_TK, layer.experts)
        order = Order(order_N // layer.top_k, counts_E, counts_E.tolist())
        weights_N = weights_TK.reshape(-1).index_select(0, order_N)
        return expert_mlp(rows_TD, weights_N, first, second, order, activation=swiglu)

    def backward(out_TD: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out_TD, leaves, inputs.upstream_TD)

    return Step(forward, backward)


def time_layers(
    layers: tuple[Layer, ...], machine: Machine, budget: Budget, table: Table
) -> Iterator[LayerTiming]:
    """Step and memory of whole layers, in both forms."""
    for layer in layers:
        if budget.left <= 0:
            say(f"the budget is spent before the layer of {layer.name}")
            return
        inputs = draw_inputs(layer, "random", machine.device)
        step = layer_step(inputs)
        for form in FORMS:
            os.environ[FORCE_VARIABLE] = form
            with tiles_from(table):
                seconds = machine.clock(step.both)
                kept, peak = memory_of(step, machine.device)
            yield LayerTiming(layer, form, seconds, kept, peak)
        del os.environ[FORCE_VARIABLE]


def memory_of(step: Step, device: torch.device) -> tuple[int, int]:
    """Bytes between forward and backward without the output, and the most there are; 0 on a CPU."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = step.forward()
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    grads = step.backward(out)
    peak = torch.cuda.max_memory_allocated() - before
    del out, grads
    return kept, peak


def layer_lines(found: Found) -> Iterator[str]:
    """One line for each layer and form."""
    yield (
        f"{'whole layer':<16} {'form':<17} {'ms':>8} {'TFLOP/s':>8} {'/dense':>7} {'kept GiB':>9} "
        f"{'of 2TD+4TKF':>11} {'peak GiB':>9}"
    )
    for timing in found.layers:
        layer, dense = timing.layer, dense_seconds(found, timing.layer)
        over = f"{dense / timing.seconds:.2f}" if dense else ""
        yield (
            f"{layer.name:<16} {timing.form:<17} {timing.seconds * 1e3:>8.2f} "
            f"{layer.flop / timing.seconds / 1e12:>8.0f} {over:>7} {timing.kept / 2**30:>9.2f} "
            f"{timing.kept / layer.kept_bytes:>11.2f} {timing.peak / 2**30:>9.2f}"
        )


def dense_seconds(found: Found, layer: Layer) -> float | None:
    """Time of plain products of equal FLOPs, all six of a layer; None unless all were timed."""
    calls: dict[tuple[str, str], list[float]] = {}
    for timing in found.timings:
        if timing.layer == layer and "dense" in timing.baselines:
            call = timing.op, timing.variant
            calls.setdefault(call, []).append(timing.baselines["dense"])
    return sum(map(statistics.median, calls.values())) if len(calls) == 6 else None


def aim_lines(found: Found) -> Iterator[str]:
    """Every aim beside the worst figure that was measured."""
    for grain in PRODUCT_AIMS:
        own = [timing for timing in found.timings if timing.layer.grain == grain]
        for op in OPS:
            aims = WGRAD_AIMS if op == "wgrad" else PRODUCT_AIMS
            ratios = [t.over("dense") or 0.0 for t in own if t.op == op]
            yield _aim(f"{grain} {op} over a plain product", min, ratios, aims[grain])
        layers = [t for t in found.layers if t.layer.grain == grain and t.form == "triton"]
        rates = [(dense_seconds(found, t.layer) or 0.0) / t.seconds for t in layers]
        yield _aim(f"{grain} layer over plain products", min, rates, LAYER_AIMS[grain])
    for op in ("combine_rows", "gather_rows"):
        rates = [t.moved / t.seconds / found.ceilings["copy"] for t in _of(found, op)]
        yield _aim(f"{op} over the copy", min, rates, COPY_AIM)
    for op in (*OPS, "experts"):
        gains = [t.over("replaced") or 0.0 for t in _of(found, op)]
        yield _aim(f"{op} over what it replaces", min, gains, 1.0)
    steps = {t.layer: t.seconds for t in found.layers if t.form == "triton"}
    shares = [t.seconds / steps[t.layer] for t in _of(found, "router_topk") if t.layer in steps]
    yield _aim("router, of a layer's step", max, shares, ROUTER_AIM)
    kept = [t.kept / t.layer.kept_bytes for t in found.layers if t.form == "triton" and t.kept]
    yield _aim("kept bytes over 2TD + 4TKF", max, kept, KEPT_AIM)


def _of(found: Found, op: str) -> list[Timing]:
    return [timing for timing in found.timings if timing.op == op]


def _aim(what: str, worst: Callable[[list[float]], float], figures: list[float], aim: float) -> str:
    bound = "at least" if worst is min else "at most"
    if not figures:
        return f"aim: {what}: {bound} {aim:.2f}, not measured"
    figure = worst(figures)
    met = figure >= aim if worst is min else figure <= aim
    return f"aim: {what}: {bound} {aim:.2f}, worst {figure:.2f}: {'met' if met else 'MISSED'}"


def measure(found: Found, folder: Path, budget: Budget, *, dry: bool) -> None:
    """Run all parts in order, into `found`."""
    machine = in_interpreter() if dry else on_gpu()
    layers = (DRY_LAYER,) if dry else LAYERS
    routings = ROUTINGS[-1:] if dry else ROUTINGS
    found.origin, found.ceilings = origin_of(machine), ceilings(machine, dry=dry)
    say(
        f"ceilings: copy {found.ceilings['copy'] / 1e12:.2f} TB/s, product "
        f"{found.ceilings['product'] / 1e12:.0f} TFLOP/s"
    )
    for check in all_checks(machine.device, machine.tiles, DRY if dry else GPU):
        found.checks.append(check)
        if not check.passed:
            say(f"WRONG: {check.name}: {check.error:.1e} over {check.bound:.1e}")
    say(f"{len(found.checks)} checks done, {budget.left:.0f} s left")
    found.write(folder)
    found.timings.extend(sweep_products(layers, routings, machine, budget.part(PRODUCTS), say))
    found.write(folder)
    table = write_table(found, folder, machine)
    part = budget.part(EXPERTS)
    found.timings.extend(sweep_experts(layers, routings, machine, part, table, say))
    found.write(folder)
    write_table(found, folder, machine)
    found.layers.extend(time_layers(layers, machine, budget, table))
    found.write(folder)


def report(found: Found, folder: Path) -> None:
    """Print the tables and the aims, and leave them in a file."""
    lines = [*lines_of(found.timings), LEGEND, *layer_lines(found), *aim_lines(found)]
    (folder / "kernels_gpu.txt").write_text("\n".join(lines) + "\n")
    say("\n".join(lines))
    passed = sum(check.passed for check in found.checks)
    say(f"{passed} of {len(found.checks)} checks passed on {found.origin['device']}")


def write_table(found: Found, folder: Path, machine: Machine) -> Table:
    """The table of what was timed so far, also as a file."""
    major, minor = machine.capability
    table = table_from(found.timings, capability=machine.capability, origin=found.origin)
    table.write(folder / f"sm_{major}{minor}.json")
    return table


def say(line: str) -> None:
    """Print at once: a run that is stopped shows how far it came."""
    print(line, flush=True)


def main() -> int:
    """Compile, measure, print; the exit status says whether all ops are right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds, all parts together")
    parser.add_argument("--dry", action="store_true", help="in the interpreter, without a GPU")
    options = parser.parse_args()
    if not (options.dry or torch.cuda.is_available()):
        parser.error("there is no GPU; `--dry` runs the script without one")
    options.out.mkdir(parents=True, exist_ok=True)
    budget = Budget(options.budget)
    for variable in (FORCE_VARIABLE, TILES_VARIABLE):
        os.environ.pop(variable, None)
    compile_all(dry=options.dry)
    if options.dry:
        # Before triton is imported, and after other processes have compiled.
        assert "triton" not in sys.modules, "triton was imported before it was told to interpret"
        os.environ["TRITON_INTERPRET"] = "1"
        from fold_kernels.interpreter import install

        install()
    found = Found()
    try:
        measure(found, options.out, budget, dry=options.dry)
    finally:
        # What was measured before an error still counts.
        report(found, options.out)
    return 0 if all(check.passed for check in found.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
