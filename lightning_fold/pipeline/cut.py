"""Leave a rank of a whole model what its stages own: every parameter keeps its global name.

Layers of other stages become placeholders at their own indices, embedding and head on other ranks
too, so names, hooks and the code of the model stay what they are. A tied weight stays on both
ends. `stage.StageRunner` then runs one stage of what is left.
"""

# Shapes.  E experts   K top-k   D model width

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from lightning_fold.checkpoint.whole import WholeModel
from lightning_fold.model.inspect import ModelParts
from lightning_fold.model.passage import Passage
from lightning_fold.model.routers import Router
from lightning_fold.model.structure import DecoderParts
from lightning_fold.pipeline.placement import Foreign, Hollow, Placement
from lightning_fold.pipeline.probe import Anatomy, refuse
from lightning_fold.pipeline.stage import StageRunner

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class CutModel:
    """A model of which this rank has its stages alone: `model.fold.StageParts`.

    Attributes:
        parts: Those that are left; layers in order of the forward.
        decoder: The same for tensor parallelism; None where tp is 1.
        whole: What the model was.
        stages: Runs a stage.
        twins: Names of parameters that the first and the last stage both hold.
    """

    parts: ModelParts
    decoder: DecoderParts | None
    whole: WholeModel
    stages: StageRunner
    twins: tuple[str, ...]

    @property
    def passage(self) -> Passage:
        """What comes in for the stage that runs."""
        return self.stages.passage


def cut(
    root: nn.Module,
    parts: ModelParts,
    decoder: DecoderParts | None,
    routers: Sequence[Router] = (),
    *,
    anatomy: Anatomy,
    placement: Placement,
) -> CutModel:
    """Take from `root` what other stages own. Local; ranks agree by construction.

    Args:
        root: The LightningModule, whole, in its final dtypes.
        parts: Its parts.
        decoder: What `check_decoder` has found of it.
        routers: Those that are watched, in order of the forward.
        anatomy: Where it can be cut.
        placement: Which stages are whose.

    Raises:
        ValueError: A module that runs before the layers returns no [B, S, D].
    """
    tied = _tied_names(root, anatomy)
    owners = _owners(parts, anatomy, placement, tied)
    whole = WholeModel.of(root, owners)
    is_divided = placement.ranks[0] != placement.ranks[-1]
    twins = tuple(sorted(tied.intersection(whole.parameters))) if is_divided else ()
    first = root.get_submodule(anatomy.before[0]) if anatomy.before else parts.core
    dtype = next(first.parameters()).dtype
    hollows = {
        name: Hollow(module, _width(parts, name, module, anatomy), dtype)
        for name in anatomy.before
        for module in [root.get_submodule(name)]
    }
    shared = {name.rpartition(".")[0] for name in tied}
    has_end = placement.has_first or placement.has_last
    for name in (*anatomy.before, *anatomy.after):
        is_here = placement.has_first if name in hollows else placement.has_last
        if not is_here and not (name in shared and has_end):
            _put(root, name, hollows.get(name) or Foreign(name, root.get_submodule(name)))
    _drop_layers(root, parts, placement)
    upstream = _upstream(parts, routers, placement)
    stages = StageRunner(
        root, parts, anatomy, placement, hollows=hollows, dtype=dtype, upstream=upstream
    )
    kept = {id(module) for module in root.modules()}
    return CutModel(_left(parts, kept), _left_decoder(decoder, kept), whole, stages, twins)


def _owners(
    parts: ModelParts, anatomy: Anatomy, placement: Placement, tied: Collection[str]
) -> Callable[[str], tuple[int, ...]]:
    """Ranks that hold a name; both ends hold a tied one."""
    first, last = placement.ranks[0], placement.ranks[-1]
    layers = {
        f"{name}.": placement.ranks_of(lambda stage, i=i: i in stage.layers)  # type: ignore[misc]
        for i, (name, _) in enumerate(parts.layers)
    }

    def of(name: str) -> tuple[int, ...]:
        for prefix, ranks in layers.items():
            if name.startswith(prefix):
                return ranks
        if name in tied:
            return tuple(dict.fromkeys((first, last)))
        owner = name.rpartition(".")[0]
        if owner in anatomy.before or owner in anatomy.after:
            return (first,) if owner in anatomy.before else (last,)
        return tuple(range(max(placement.ranks) + 1))

    return of


def _tied_names(root: nn.Module, anatomy: Anatomy) -> set[str]:
    """Names of parameters that modules at both ends of the model share."""
    at: dict[int, dict[str, set[str]]] = {}
    for end in ("before", "after"):
        for owner in getattr(anatomy, end):
            for key, param in root.get_submodule(owner)._parameters.items():
                if param is not None:
                    at.setdefault(id(param), {}).setdefault(end, set()).add(f"{owner}.{key}")
    return {name for ends in at.values() if len(ends) == 2 for n in ends.values() for name in n}


def _width(parts: ModelParts, name: str, module: nn.Module, anatomy: Anatomy) -> int:
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if all(p.dim() == 1 for p in module.parameters()):
        return anatomy.width
    raise refuse(
        parts,
        f"{name} ({type(module).__name__}) runs before the layers and is neither an nn.Embedding "
        "nor a norm, so its place cannot be kept on other stages",
    )


def _upstream(
    parts: ModelParts, routers: Sequence[Router], placement: Placement
) -> list[tuple[tuple[int, int], ...]]:
    kinds: list[list[tuple[int, int]]] = []
    for stage in placement.layout.stages:
        inside = tuple(f"{parts.layers[i][0]}." for i in stage.layers)
        own = [r for r in routers if inside and r.name.startswith(inside)]
        kinds.append([(router.num_experts, router.spec.top_k) for router in own])
    return [tuple(kind for before in kinds[:s] for kind in before) for s in range(len(kinds))]


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, key = name.rpartition(".")
    root.get_submodule(owner)._modules[key] = module


def _drop_layers(root: nn.Module, parts: ModelParts, placement: Placement) -> None:
    own = {i for stage in placement.own for i in stage.layers}
    for i, (name, layer) in enumerate(parts.layers):
        if i not in own:
            _put(root, name, Foreign(name, layer))


def _left(parts: ModelParts, kept: Collection[int]) -> ModelParts:
    """The parts whose modules, by their ids, are still in the tree."""
    layers = tuple((name, layer) for name, layer in parts.layers if id(layer) in kept)
    inside = tuple(f"{name}." for name, _ in layers)
    return replace(
        parts,
        layers=layers,
        experts=tuple(spec for spec in parts.experts if id(spec.module) in kept),
        routers=tuple(name for name in parts.routers if name.startswith(inside)),
        shared=tuple(name for name in parts.shared if name.startswith(inside)),
    )


def _left_decoder(decoder: DecoderParts | None, kept: Collection[int]) -> DecoderParts | None:
    if decoder is None:
        return None

    def left(module: Module | None) -> Module | None:
        return module if id(module) in kept else None

    return replace(
        decoder,
        layers=tuple(layer for layer in decoder.layers if id(layer.module) in kept),
        starts=id(decoder.layers[0].module) in kept,
        embed_tokens=left(decoder.embed_tokens),
        norm=left(decoder.norm),
        lm_head=left(decoder.lm_head),
    )
