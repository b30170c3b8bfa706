"""Batches with fewer rows than a schedule needs microbatches, such as the last one of an epoch.

Owns which number of microbatches is run instead, and the order where none is legal. Time is lost,
results are not.
"""

from __future__ import annotations

from lightning_fold.pipeline import orders
from lightning_fold.pipeline.registry import Schedule, schedule_of
from lightning_fold.pipeline.schedules import Plan, plan_of

_THERE_AND_BACK = Schedule(orders.there_and_back, "v", (2,))


def is_too_few(name: str, *, pp: int, vpp: int, num_microbatches: int) -> bool:
    """Whether a schedule has no order for so few microbatches."""
    return not schedule_of(name).serves(pp, vpp, num_microbatches)


def nearest_count(name: str, *, pp: int, vpp: int, num_microbatches: int) -> int:
    """The largest legal number of microbatches up to the given one, or that where none is."""
    counts = range(num_microbatches, 0, -1)
    legal = (n for n in counts if not is_too_few(name, pp=pp, vpp=vpp, num_microbatches=n))
    return next(legal, num_microbatches)


def actions_of_few(name: str, *, pp: int, vpp: int, num_microbatches: int) -> Plan:
    """List all forwards, then all backwards, for zbv's or dualpipev's stages where they lie.

    Without pairs, also where the schedule itself would weave.
    """
    return plan_of(name, _THERE_AND_BACK, pp, vpp, num_microbatches, None, False)
