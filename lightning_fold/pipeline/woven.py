"""Which stages run in pieces: planned before the model is folded, checked when it is.

A stage is woven if every layer with experts can be run in pieces (`segments`, `segment_probe`);
layers without are one piece each. Otherwise the whole stage runs plainly, which set-up says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_fold.model.balance import Balance
from lightning_fold.model.fold import FoldedModel
from lightning_fold.model.inspect import ModelParts
from lightning_fold.model.token_rng import has_randomness
from lightning_fold.moe.dispatch.base import SegmentedDispatcher
from lightning_fold.moe.layer import FoldedExperts
from lightning_fold.pipeline.layout import StageLayers
from lightning_fold.pipeline.placement import Placement
from lightning_fold.pipeline.probe import Anatomy, plain_attributes
from lightning_fold.pipeline.segment_probe import reason_against
from lightning_fold.pipeline.segments import MoeLayer, Segments, moe_layers

PieceOrDense = tuple[nn.Module, Segments | None]
"""A layer, and its pieces; None for one that is a single piece."""


@dataclass(frozen=True)
class Weaving:
    """The stages of this rank that run in pieces.

    Attributes:
        stages: By number, their layers in order.
        reasons: By number, why another stage with layers runs plainly.
        in_tuple: Whether layers return a tuple around their hidden states.
        is_random: Whether each microbatch needs random numbers of its own.
        repeats: Whether pieces run again in backward: `activation_checkpointing="full"`.
    """

    stages: Mapping[int, tuple[PieceOrDense, ...]]
    reasons: Mapping[int, str]
    in_tuple: bool
    is_random: bool
    repeats: bool


@dataclass(frozen=True)
class WeavingPlan:
    """What is known before folding.

    Attributes:
        layers: This rank's layers by place: in pieces, None for a dense one, or why not.
        names: Of the layers.
        own: This rank's stages.
        in_tuple: As `Weaving`.
        is_random: Whether anything in the model draws random numbers, as far as one can see.
    """

    layers: Mapping[int, MoeLayer | str | None]
    names: Sequence[str]
    own: Sequence[StageLayers]
    in_tuple: bool
    is_random: bool

    def finish(self, folded: FoldedModel, *, repeats: bool) -> Weaving:
        """Take the folded model; nothing of what was planned is left open."""
        stages: dict[int, tuple[PieceOrDense, ...]] = {}
        reasons: dict[int, str] = {}
        modules = dict(folded.parts.layers)
        for stage in self.own:
            against = [why for i in stage.layers if (why := self._reason(i)) is not None]
            if against:
                reasons[stage.index] = against[0]
            elif stage.layers:
                stages[stage.index] = tuple(
                    (modules[self.names[i]], _pieces(self.layers[i], folded.balance))
                    for i in stage.layers
                )
        # A piece that is run again has to draw the same, also what nobody knows of.
        return Weaving(stages, reasons, self.in_tuple, self.is_random or repeats, repeats)

    def _reason(self, i: int) -> str | None:
        found = self.layers[i]
        if isinstance(found, str):
            return f"{self.names[i]}: {found}"
        if found is None:
            return None
        experts = found.experts.forward
        if not isinstance(experts, FoldedExperts):
            return f"{self.names[i]}: its experts are not folded"
        if not isinstance(experts.dispatcher, SegmentedDispatcher):
            kind = type(experts.dispatcher).__name__
            return f"{self.names[i]}: {kind} is no SegmentedDispatcher, so nothing fits in between"
        return None


def plan_weaving(
    root: nn.Module, parts: ModelParts, anatomy: Anatomy, placement: Placement, *, tp: int
) -> WeavingPlan:
    """Try this rank's layers out. Local; ranks of one stage find the same.

    Args:
        root: The LightningModule, whole and not folded.
        parts: Its parts.
        anatomy: What `probe` has found.
        placement: Which stages are whose.
        tp: Degree of tensor parallelism.
    """
    own = tuple(placement.own)
    is_random = has_randomness(parts.core)
    every = moe_layers(root, parts, in_tuple=anatomy.in_tuple)
    known: dict[Any, str | None] = {}
    layers: dict[int, MoeLayer | str | None] = {}
    for i in sorted({i for stage in own for i in stage.layers}):
        found = every[i]
        if is_random and tp > 1:
            found = "under tensor parallelism its random numbers are drawn a layer at a time"
        if isinstance(found, MoeLayer):
            key = _kind(found)
            if key not in known:
                known[key] = reason_against(found, anatomy.calls[i], anatomy.width)
            found = known[key] or found
        layers[i] = found
    names = [name for name, _ in parts.layers]
    return WeavingPlan(layers, names, own, anatomy.in_tuple, is_random)


def _kind(moe: MoeLayer) -> Any:
    """Equal for layers that are built alike."""
    modules = tuple((name, type(module)) for name, module in moe.layer.named_modules())
    shapes = tuple((name, p.shape) for name, p in moe.layer.named_parameters())
    hooks = tuple(bool(m._forward_hooks or m._forward_pre_hooks) for m in moe.layer.modules())
    # A rate of dropout or a scale may differ from layer to layer; so does a layer's number.
    attributes = tuple(
        (name, key, value)
        for name, module in moe.layer.named_modules()
        for key, value in plain_attributes(module).items()
        if "idx" not in key
    )
    return modules, shapes, hooks, attributes


def _pieces(found: MoeLayer | str | None, balance: Balance | None) -> Segments | None:
    if not isinstance(found, MoeLayer):
        return None
    return Segments(found, (lambda into: nullcontext()) if balance is None else balance.collecting)
