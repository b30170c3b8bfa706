"""How a run ends when a rank fails, hangs, is killed or is told to leave.

Owns the last words of a run and the exit of its processes. Invariant: every rank ends, within
seconds of the first failure, and names it; a signal saves once, on all ranks at the same batch.
Computes nothing and takes no part in a step but the one flag that Lightning broadcasts anyway.
"""

from lightning_fold.faults.failure import PREFIX, RankFailedError, marked
from lightning_fold.faults.guard import Guard

__all__ = ["PREFIX", "Guard", "RankFailedError", "marked"]
