"""Leave a rank of a whole model what its stages own: every parameter keeps its global name.

Layers of other stages become placeholders at their own indices, embedding and head on other ranks
too, so names, hooks and the code of the model stay what they are. A tied weight stays on both
ends. `stage.StageRunner` then runs one stage of what is left.
"""

# Shapes.  E experts   K top-k   D model width

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_fold.checkpoint.whole import WholeModel
from lightning_fold.model.inspect import ModelParts
from lightning_fold.model.passage import Passage
from lightning_fold.model.routers import Router
from lightning_fold.model.structure import DecoderParts
from lightning_fold.pipeline.placement import Foreign, Hollow, Placement
from lightning_fold.pipeline.probe import Anatomy, refuse
from lightning_fold.pipeline.stage import StageRunner


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
    owners, twins = _owners(root, parts, anatomy, placement)
    whole = WholeModel.of(root, owners)
    first = root.get_submodule(anatomy.before[0]) if anatomy.before else parts.core
    dtype = next(first.parameters()).dtype
    ends = _End(anatomy.before, 0), _End(anatomy.after, len(placement.layout.stages) - 1)
    tied = {name.rpartition(".")[0] for name in _tied_names(root, anatomy)}
    hollows: dict[str, Hollow] = {}
    for end in ends:
        is_here = any(stage.index == end.stage for stage in placement.own)
        is_other_end = any(stage.index == other.stage for other in ends for stage in placement.own)
        for name in end.names:
            module = root.get_submodule(name)
            stand: nn.Module = Foreign(name, module)
            if end.stage == 0:
                stand = hollows[name] = Hollow(module, _width(parts, name, module, anatomy), dtype)
            if not is_here and not (name in tied and is_other_end):
                _put(root, name, stand)
    _drop_layers(root, parts, placement)
    upstream = _upstream(parts, routers, placement)
    stages = StageRunner(
        root, parts, anatomy, placement, hollows=hollows, dtype=dtype, upstream=upstream
    )
    left = _left(root, parts, placement)
    return CutModel(left, _left_decoder(decoder, left, placement), whole, stages, twins)


@dataclass(frozen=True)
class _End:
    """Modules beside the layers at one end of the model, and the stage that owns them."""

    names: tuple[str, ...]
    stage: int


def _owners(
    root: nn.Module, parts: ModelParts, anatomy: Anatomy, placement: Placement
) -> tuple[Callable[[str], tuple[int, ...]], tuple[str, ...]]:
    """Ranks that hold a name, and the names of parameters that both ends hold."""
    first, last = placement.ranks[0], placement.ranks[-1]
    layers = {
        f"{name}.": placement.ranks_of(lambda stage, i=i: i in stage.layers)  # type: ignore[misc]
        for i, (name, _) in enumerate(parts.layers)
    }
    tied = _tied_names(root, anatomy)

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

    named = {name for name, _ in root.named_parameters()}
    twins = tuple(sorted(named & tied)) if first != last else ()
    return of, twins


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


def _left(root: nn.Module, parts: ModelParts, placement: Placement) -> ModelParts:
    own = sorted(i for stage in placement.own for i in stage.layers)
    layers = tuple(parts.layers[i] for i in own)

    def here(names: Collection[str]) -> tuple[str, ...]:
        return tuple(n for n in names if any(n.startswith(f"{layer}.") for layer, _ in layers))

    kept = set(here([spec.name for spec in parts.experts]))
    return replace(
        parts,
        layers=layers,
        experts=tuple(spec for spec in parts.experts if spec.name in kept),
        routers=here(parts.routers),
        shared=here(parts.shared),
    )


def _left_decoder(
    decoder: DecoderParts | None, left: ModelParts, placement: Placement
) -> DecoderParts | None:
    if decoder is None:
        return None
    names = {name for name, _ in left.layers}
    has_first = any(stage.index == 0 for stage in placement.own)
    has_last = any(stage.index == len(placement.ranks) - 1 for stage in placement.own)
    head, embedding = decoder.lm_head, decoder.embed_tokens
    tied = None not in (head, embedding) and head.weight is embedding.weight  # type: ignore[union-attr]
    has_embedding = has_first or (has_last and tied)
    return replace(
        decoder,
        layers=tuple(layer for layer in decoder.layers if layer.name in names),
        starts=0 in {i for stage in placement.own for i in stage.layers},
        embed_tokens=embedding if has_embedding else None,
        norm=decoder.norm if has_last else None,
        lm_head=head if has_last or (has_first and tied) else None,
    )
