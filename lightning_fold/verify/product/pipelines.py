"""With which schedule, microbatches and layout each mapping with pp > 1 is verified.

A recipe's own schedule where it names one, else all that are built in, in turn; as many
microbatches as the batches have rows for; a layout where the small model has fewer layers than
stages. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fold.pipeline.schedules import schedule_of
from lightning_fold.pipeline.short import nearest_count
from lightning_fold.topology.folding import Folding
from lightning_fold.verify.plan_pipelines import SCHEDULES

OPTIONS = ("pipeline_schedule", "virtual_pipeline_size", "pipeline_overlap")
"""Arguments of the strategy that a recipe may choose for all pipelines."""
_PER_RANK = 2
"""Microbatches for each rank of a pipeline, where the batches have the rows."""


def pipeline_of(
    folding: Folding, *, turn: int, num_layers: int, rows: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Choose the fields of `Case` that say how a mapping with pp > 1 is run.

    Args:
        folding: The mapping.
        turn: Number of the mapping among those with pp > 1.
        num_layers: Decoder layers of the model.
        rows: Of the smallest batch.
        options: Arguments of the strategy; see `OPTIONS`.
    """
    pp, most = folding.pp, min(_PER_RANK * folding.pp, rows)
    known, overlap = [*SCHEDULES], bool(options.get("pipeline_overlap"))
    candidates = [
        (name, SCHEDULES[name])
        for name in (*known[turn % len(known) :], *known)
        # Every stage between the first and the last one gets a layer: no rank is idle.
        if num_layers >= pp * SCHEDULES[name] - 1 and _count(name, folding, most)
        if not overlap or schedule_of(name).overlaps
    ]
    name, virtual = candidates[0] if candidates else ("1f1b", 1)
    if options.get("pipeline_schedule"):
        name, virtual = options["pipeline_schedule"], options.get("virtual_pipeline_size") or 1
    stages = pp * virtual
    return {
        "schedule": name,
        "virtual_stages": virtual,
        "num_microbatches": nearest_count(name, pp=pp, vpp=virtual, num_microbatches=most),
        "layout": None if num_layers >= stages else spread(num_layers, stages),
        "overlap": overlap,
    }


def spread(num_layers: int, stages: int) -> str:
    """Write a layout of fewer layers than stages: the embedding alone, then a layer a stage."""
    own = ["E", *"t" * num_layers]
    own += [""] * (stages - len(own))
    return "|".join(own) + "L"


def _count(name: str, folding: Folding, most: int) -> bool:
    """Whether a schedule has an order for about so many microbatches."""
    pp, virtual = folding.pp, SCHEDULES[name]
    count = nearest_count(name, pp=pp, vpp=virtual, num_microbatches=most)
    return schedule_of(name).serves(pp, virtual, count)
