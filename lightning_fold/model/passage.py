"""What crosses the borders of a pipeline stage, as values that the model's hooks understand.

A stage calls the user's core whole. Where it is not the last one, the call ends early, and what
its hooks then see is a `StageOutput` and no output of the model.
"""

# Shapes.  B sequences   s tokens of a sequence on this rank   D model width   E experts   K top-k

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class StageOutput(NamedTuple):
    """What a stage hands to the next one; a named tuple, so that FSDP2's hooks find the tensors.

    Attributes:
        hidden: [B, s, D].
        loads: What the routers so far say of the balance, flat; None where nobody asks.
    """

    hidden: Tensor
    loads: Tensor | None = None


class StageEnd(BaseException):
    """Ends the call of a core behind a stage's last layer.

    Not an `Exception`: code of the model that catches those must not swallow it.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class Passage:
    """What has come in for the stage that runs.

    Attributes:
        stage: The stage.
        first: The first stage of this rank that has layers.
        hidden: [B, s, D] of the stage before; None on the first.
        loads: As `StageOutput.loads`.
        upstream: (E, K) of every router of the stages before.
        calls: What the stage's layers would be called with: their other arguments, and whether
            they get hidden states by position.
    """

    stage: int = 0
    first: int = 0
    hidden: Tensor | None = None
    loads: Tensor | None = None
    upstream: tuple[tuple[int, int], ...] = ()
    calls: list[tuple[tuple[Any, ...], Mapping[str, Any], bool]] = field(default_factory=list)
