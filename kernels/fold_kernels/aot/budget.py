"""What kernels may cost: registers and shared memory in a committed file, one kernel a line.

A rise above the budget fails, so that a regression is either mended or shows in review.
`python -m fold_kernels.aot --write` writes what it finds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fold_kernels.aot.gate import Readout

BUDGET = Path(__file__).with_name("budget.json")

# By name of a kernel: registers, bytes of shared memory.
Costs = dict[str, list[int]]


def target_of(version: str, capability: int) -> str:
    """Key of the budgets of one compiler and architecture."""
    return f"triton {version} sm_{capability}"


def costs_of(readouts: Mapping[str, Readout]) -> Costs:
    """What the budget says of kernels, by name."""
    return {name: [found.registers, found.shared] for name, found in readouts.items()}


def overruns(costs: Costs, budget: Costs) -> dict[str, str]:
    """Kernels that cost more than their budget, have none, or have one but are not shipped."""
    lines = dict.fromkeys(sorted(budget.keys() - costs.keys()), "is not shipped; use --write")
    for name, cost in costs.items():
        if name not in budget:
            lines[name] = "has no budget; use --write"
        elif any(spent > limit for spent, limit in zip(cost, budget[name], strict=True)):
            lines[name] = f"costs {cost} > budget {budget[name]}: registers, shared memory"
    return lines


def load(path: Path = BUDGET) -> dict[str, Costs]:
    """Budgets by target; none without a file."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(target: str, costs: Costs, path: Path = BUDGET) -> None:
    """Replace the budgets of one target."""
    path.write_text(to_text({**load(path), target: costs}))


def to_text(budgets: Mapping[str, Costs]) -> str:
    """JSON with one kernel a line: a review sees what changed."""
    sections = []
    for target, costs in sorted(budgets.items()):
        lines = [f"    {json.dumps(name)}: {json.dumps(costs[name])}" for name in sorted(costs)]
        sections.append(f"  {json.dumps(target)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(sections) + "\n}\n"
