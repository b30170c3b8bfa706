"""Random numbers of a step that runs in another order on every stage.

The user's code before the core is run twice on the last stage, and draws the same both times; the
layers of each stage draw their own, by microbatch and stage. Whatever the order of a schedule, all
ranks of a pipeline leave a step with the same generator. Local.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# An odd multiplier keeps the seeds of different stages apart modulo 2**63.
_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Generators:
    """States of the default generators: of the host, and of the current GPU if there is one."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls) -> Generators:
        """Their states now."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Draw from here on what was drawn after this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


def draw_seed() -> int:
    """A number that all ranks with the same generator draw alike."""
    return int(torch.randint(2**62, ()))


def seed_stage(seed: int, stage: int) -> None:
    """Let the layers of `stage` draw their own numbers for the microbatch of `seed`."""
    # By generator: `torch.manual_seed` seeks out every backend, a millisecond a call.
    number = (seed + stage * _STRIDE) % 2**63
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
