"""The pipeline stages of a model, seen from one rank: who holds what, and the way to rank 0.

Invariant: every rank of a stage holds the same names, so each pp group learns the same from its
own ranks, and all go through names in one order: whoever waits for a stage waits for what that
stage does next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fold.checkpoint.peers import Peers
from lightning_fold.checkpoint.whole import TensorMeta, WholeModel

Result = TypeVar("Result")


@dataclass(frozen=True)
class Held:
    """A tensor of this rank's stage.

    Attributes:
        meta: Of the whole tensor in the user's shape.
        whole: Gathers it over the stage.
    """

    meta: TensorMeta
    whole: Callable[[], Tensor]


@dataclass(frozen=True)
class Stages:
    """This rank's place among the stages.

    Attributes:
        whole: The model before the cut.
        group: Ranks at this rank's position in every stage, in the order of the stages (axis pp).
        device: Where tensors of the group travel.
    """

    whole: WholeModel
    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """This rank's stage."""
        return dist.get_rank(self.group)

    @property
    def reaches_writer(self) -> bool:
        """Whether rank 0 of the world is in the group, to which tensors travel in it."""
        return dist.get_global_rank(self.group, 0) == 0

    def writes(self, name: str) -> bool:
        """Whether this stage stands for all that hold `name`; each does for one nobody knew of."""
        return self.whole.owners.get(name, (self.rank,))[0] == self.rank

    def check(self, module: nn.Module) -> None:
        """Make sure that the cut has left what `whole` says. Local."""
        names = {*module.state_dict(), *(name for name, _ in module.named_parameters())}
        owned = (name for name, stages in self.whole.owners.items() if self.rank in stages)
        lost = [name for name in owned if name not in names]
        assert not lost, f"stage {self.rank} has lost {', '.join(lost[:3])}"

    def gather(self, tell: Callable[[], Result], *, what: str) -> list[Result]:
        """What every stage tells, in the order of the stages. Collective over pp.

        Raises:
            ValueError: As `Peers.all_or_none`; equal on all ranks, as stages fail as one.
            CheckpointError: Likewise.
        """
        return Peers(self.group).all_or_none(tell, what=what)

    def collect(
        self, own: Mapping[str, Any], *, order: Callable[[Sequence[Sequence[str]]], Sequence[str]]
    ) -> dict[str, Any]:
        """Values of all stages, on CPU on rank 0 of the world; `{}` on the others.

        Collective over all ranks; one tensor at a time is whole and travels.

        Args:
            own: What this stage stands for, `Held`s among it; equal on all ranks of the stage.
            order: Of the result, from the names of every stage.
        """
        told = {name: v.meta if isinstance(v, Held) else v for name, v in own.items()}
        stages = self.gather(lambda: told, what="collecting the stages' tensors")
        source = {name: stage for stage in reversed(range(len(stages))) for name in stages[stage]}
        is_writer = dist.get_rank() == 0
        collected = {}
        for name in order([list(names) for names in stages]):
            stage = source[name]
            value = stages[stage][name]
            if isinstance(value, TensorMeta):
                held = own[name].whole() if stage == self.rank else None
                value = self._bring(held, value, stage=stage)
            if is_writer:
                collected[name] = value
        return collected

    def _bring(self, held: Tensor | None, meta: TensorMeta, *, stage: int) -> Tensor | None:
        """One tensor from a rank of `stage` to rank 0, as bytes, which every backend knows."""
        if not self.reaches_writer or self.rank not in (0, stage):
            return None
        if stage == 0:
            assert held is not None, "the writing rank has gathered what its stage holds"
            return held.cpu().clone()
        num_bytes = math.prod(meta.shape) * meta.dtype.itemsize
        if held is not None:
            data = held.detach().to(self.device).contiguous().view(-1).view(torch.uint8)
            if num_bytes:
                dist.send(data, group=self.group, group_dst=0)
            return None
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if num_bytes:
            dist.recv(data, group=self.group, group_src=stage)
        return data.view(meta.dtype).view(meta.shape).cpu()
