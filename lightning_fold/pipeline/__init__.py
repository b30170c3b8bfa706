"""Pipelines: which stage owns what, and when it computes.

`schedules` lists what every rank does, `simulate` puts such a list on a clock, `timeline` holds
what either the clock or a run has seen.
"""

from lightning_fold.pipeline.actions import Action, B, F, I, W
from lightning_fold.pipeline.schedules import (
    SCHEDULES,
    Plan,
    actions_of,
    check_schedule,
    register_schedule,
)
from lightning_fold.pipeline.simulate import Costs, simulate
from lightning_fold.pipeline.timeline import Span, Timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "B",
    "Costs",
    "F",
    "I",
    "Plan",
    "Span",
    "Timeline",
    "W",
    "actions_of",
    "check_schedule",
    "register_schedule",
    "simulate",
]
