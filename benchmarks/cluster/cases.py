"""What is compared: mappings, schedules and sizes, grouped by how the ranks lie on the nodes.

    neighbours   node 0: ranks 0 1 2 3   node 1: 4 5 6 7    tp inside; a pipeline may cross
    across       node 0: ranks 0 1 4 5   node 1: 2 3 6 7    a stage's ep crosses, its pipeline not

Sizes are as small as they can be with slept compute well above what Python and torch take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.cluster.launch import Placement
from lightning_fold.config import FoldedConfig
from lightning_fold.topology.folding import Folding
from lightning_fold.verify.plan_pipelines import SCHEDULES

NEIGHBOURS = Placement((0, 0, 0, 0, 1, 1, 1, 1))
ACROSS = Placement((0, 0, 1, 1, 0, 0, 1, 1))
WORLD, PER_NODE = 8, 4

HIDDEN, HEADS = 64, 4
EXPERTS, TOP_K, WIDTH = 32, 8, 16
SLOWDOWN = 2600.0

OVERLAPPED = ("1f1b", "interleaved_1f1b", "dualpipev")
_DEGREES = {
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


@dataclass(frozen=True)
class Case:
    """One run of some steps.

    Attributes:
        name: Unique; names the pictures.
        strategy: Arguments of FoldedMoEStrategy.
        layers: Of the decoder.
        rows: Sequences of one dp rank and step.
        length: Tokens of a sequence.
        exchanges: Whether rows are sent; False is the lower bound.
        steps: Measured ones, after a first one that is not.
    """

    name: str
    strategy: Mapping[str, Any]
    layers: int
    rows: int
    length: int
    exchanges: bool = True
    steps: int = 2

    @property
    def folding(self) -> Folding:
        """Its mapping."""
        return Folding.from_world(
            WORLD, **{axis: self.strategy.get(name, 1) for axis, name in _DEGREES.items()}
        )

    @property
    def has_stages(self) -> bool:
        """Whether it is a pipeline."""
        return self.folding.pp > 1

    @property
    def tokens(self) -> int:
        """Tokens of a step on all ranks."""
        return self.rows * self.length * self.folding.dp


def has_overlap() -> bool:
    """Whether the product can weave a forward with a backward."""
    return "pipeline_overlap" in {field.name for field in fields(FoldedConfig)}


def folding_cases() -> list[Case]:
    """EP across nodes, as without folding, and inside a node: the same attention, TP4 DP2."""
    moe = {"unfolded": (4, 2), "folded": (1, 4)}
    sizes: dict[str, Any] = {"layers": 4, "rows": 8, "length": 128}
    return [
        Case(
            f"folding.{name}",
            {
                "tensor_parallel_size": 4,
                "expert_tensor_parallel_size": etp,
                "expert_parallel_size": ep,
                "router": "balanced",
            },
            **sizes,
        )
        for name, (etp, ep) in moe.items()
    ]


def schedule_cases() -> list[Case]:
    """Every schedule with slots of 100 ms: PP4 DP2, ep inside a node.

    The simulator knows no exchanges, which a plain action has within its time and a woven one
    between its pieces: so woven lists are held against it without any.
    """
    sizes: dict[str, Any] = {"layers": 8, "rows": 8, "length": 80, "steps": 1}
    cases = []
    for name in SCHEDULES:
        plain = _strategy(name, pp=4, ep=2, num_microbatches=8)
        cases.append(Case(f"schedules.{name}", plain, **sizes))
        if has_overlap() and name in OVERLAPPED:
            woven = plain | {"pipeline_overlap": True}
            cases.append(Case(f"schedules.{name}.woven", woven, **sizes))
            cases.append(Case(f"schedules.{name}.woven.bound", woven, exchanges=False, **sizes))
    return cases


def overlap_cases(num_microbatches: int = 16) -> list[Case]:
    """Plain, woven, and without exchanges: PP2 DP4, whose ep crosses the nodes."""
    sizes: dict[str, Any] = {"layers": 4, "rows": num_microbatches, "length": 64}
    cases = []
    for name in OVERLAPPED:
        plain = _strategy(name, pp=2, ep=4, num_microbatches=num_microbatches)
        cases.append(Case(f"overlap.{name}.plain", plain, steps=1, **sizes))
        if has_overlap():
            woven = plain | {"pipeline_overlap": True}
            cases.append(Case(f"overlap.{name}.woven", woven, **sizes))
        cases.append(Case(f"overlap.{name}.bound", plain, exchanges=False, steps=1, **sizes))
    return cases


def _strategy(schedule: str, *, pp: int, ep: int, num_microbatches: int) -> dict[str, Any]:
    return {
        "pipeline_parallel_size": pp,
        "expert_parallel_size": ep,
        "pipeline_schedule": schedule,
        "virtual_pipeline_size": SCHEDULES[schedule],
        "num_microbatches": num_microbatches,
        "router": "balanced",
    }


PLACEMENTS = {"neighbours": NEIGHBOURS, "across": ACROSS}


def cases_of(placement: str) -> list[Case]:
    """Everything that is run with one placement of `PLACEMENTS`."""
    if placement == "across":
        return overlap_cases()
    return [*folding_cases(), *schedule_cases()]
