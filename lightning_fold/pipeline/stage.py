"""Run one stage of a model that was cut: call the core whole, with its list of layers changed.

The first own layer takes what has arrived, the last one ends the call on stages that are not the
last. Masks, rotary angles and all hooks at the core's entry run as ever, from the user's arguments.
"""

# Shapes.  B sequences   s tokens of a sequence on this rank   D model width

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fold.model.inspect import ModelParts
from lightning_fold.model.passage import Passage, StageEnd, StageOutput
from lightning_fold.pipeline.layout import StageLayers
from lightning_fold.pipeline.placement import Hollow, Placement
from lightning_fold.pipeline.probe import Anatomy, hidden_of

Part = Literal["whole", "before", "behind"]
_PARTS: tuple[Part, ...] = ("whole", "before", "behind")


class _Slot(nn.Module):
    """The place of one layer while a stage runs: runs the layer, or hands on what it gets.

    The layer stays its child also where the stage does not run it: FSDP2 looks for its units below
    the core when the core is first called.
    """

    def __init__(self, layer: nn.Module, passage: Passage, *, in_tuple: bool) -> None:
        super().__init__()
        self.layer = layer
        self.passage = passage
        self.in_tuple = in_tuple
        self.runs = self.enters = self.ends_before = self.ends_after = self.notes = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, rest, named = hidden_of(args, kwargs)
        if self.notes:
            self.passage.calls.append((rest, named, bool(args)))
        if self.enters:
            hidden = self.passage.hidden
        if self.ends_before:
            raise StageEnd(hidden)
        out: Any = (hidden,) if self.in_tuple else hidden
        if self.runs and args:
            out = self.layer(hidden, *rest, **named)
        elif self.runs:
            out = self.layer(hidden_states=hidden, **named)
        if self.ends_after:
            raise StageEnd(out[0] if self.in_tuple else out)
        return out


class StageRunner:
    """Runs the stages of one rank.

    Attributes:
        passage: What has come in for the stage that runs; read by hooks of the model.
        own: The stages of this rank, by index.
        num_stages: All of them.
        width: D.
        dtype: Of the hidden states between layers.
        upstream: By stage, (E, K) of every router of the stages before.
    """

    def __init__(
        self,
        root: nn.Module,
        parts: ModelParts,
        anatomy: Anatomy,
        placement: Placement,
        *,
        hollows: Mapping[str, Hollow],
        dtype: torch.dtype,
        upstream: Sequence[tuple[tuple[int, int], ...]],
    ) -> None:
        self.passage = Passage()
        self.width = anatomy.width
        self.dtype = dtype
        self.upstream = upstream
        self.own = {stage.index: stage for stage in placement.own}
        self.num_stages = len(placement.layout.stages)
        self._all = placement.layout.stages
        self.passage.first = next((s.index for s in placement.own if s.layers), 0)
        self._layers: Any = root.get_submodule(anatomy.container)
        self._slots = {
            (index, part): self._slots_of(stage, part, anatomy.in_tuple)
            for index, stage in self.own.items()
            for part in _PARTS
        }
        # A rank that runs a later stage too does not embed for it.
        self._ends = [
            (root.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], hollow)
            for name, hollow in hollows.items()
        ]
        parts.core.forward = _ended_early(parts.core.forward)

    def is_last(self, stage: int) -> bool:
        """Whether it owns the head, and so ends in the user's step."""
        return stage == self.num_stages - 1

    def is_above_layers(self, stage: int) -> bool:
        """Whether what it gets has been through no layer: layer 0 splits sequences over tp."""
        return not any(before.layers for before in self._all[:stage])

    def is_empty(self, stage: int) -> bool:
        """Whether it has nothing to run and hands on what it gets."""
        own = self.own[stage]
        return not own.layers and not own.embedding and not own.head

    @contextmanager
    def entered(
        self, stage: int, hidden: Tensor | None, loads: Tensor | None, part: Part = "whole"
    ) -> Iterator[None]:
        """Let calls of the core run `stage` alone, or what of it is outside of its layers.

        Args:
            stage: The stage.
            hidden: What has come in for it, or what its layers have made for the part behind them.
            loads: As `StageOutput.loads`.
            part: `before` notes in `passage.calls` what each layer would be called with, and ends;
                `behind` hands `hidden` on to what follows the layers.
        """
        passage, real = self.passage, self._layers._modules
        ends = [(owner, key, owner._modules[key]) for owner, key, _ in self._ends]
        passage.stage, passage.hidden, passage.loads = stage, hidden, loads
        passage.upstream, passage.calls = self.upstream[stage], []
        try:
            self._layers._modules = self._slots[stage, part]
            if stage > 0:
                for owner, key, hollow in self._ends:
                    owner._modules[key] = hollow
            yield
        finally:
            self._layers._modules = real
            for owner, key, module in ends:
                owner._modules[key] = module
            passage.hidden = passage.loads = None

    def _slots_of(self, stage: StageLayers, part: Part, in_tuple: bool) -> dict[str, nn.Module]:
        slots = {
            key: _Slot(layer, self.passage, in_tuple=in_tuple)
            for key, layer in self._layers._modules.items()
        }
        ordered: Sequence[_Slot] = list(slots.values())
        for i in stage.layers:
            ordered[i].runs, ordered[i].notes = part == "whole", part == "before"
        first = stage.layers[0] if stage.layers else (0 if stage.embedding else len(ordered) - 1)
        if not stage.embedding or part == "behind":
            ordered[first].enters = True
        if not stage.head or part == "before":
            end = ordered[stage.layers[-1] if stage.layers else first]
            end.ends_after, end.ends_before = bool(stage.layers), not stage.layers
        return dict(slots)


def _ended_early(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A core's forward that gives a `StageOutput` where a stage ends: hooks see it as an output."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except StageEnd as end:
            return StageOutput(end.hidden)

    run.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return run
