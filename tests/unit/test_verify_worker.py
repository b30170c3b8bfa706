"""What a rank of the suite leaves behind between two cases."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

from lightning_fold.verify.worker import leave_groups


class Owner:
    """Can be watched; a SimpleNamespace cannot."""

    strategy: SimpleNamespace


def test_a_case_leaves_no_circle_of_references_behind() -> None:
    """A Trainer is one, and keeps process groups alive, whose threads poll."""
    trainer = Owner()
    trainer.strategy = SimpleNamespace(trainer=trainer)
    alive = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert alive() is not None
        leave_groups()
        assert alive() is None
    finally:
        gc.enable()
