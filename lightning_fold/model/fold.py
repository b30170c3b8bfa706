"""Fold one model: check all, then experts, tensor parallelism, families and sharding.

Nothing is touched before all checks have passed. Afterwards every parameter that more than one
rank needs is a DTensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_fold.model.inspect import ExpertsSpec, ModelParts, find_parts
from lightning_fold.model.structure import DecoderParts, check_decoder
from lightning_fold.model.swap import swap_experts
from lightning_fold.model.tensor_parallel import TensorParallel
from lightning_fold.model.token_layout import TokenWatch
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.params import Family, assign_families, local_tensor, shard_over_data
from lightning_fold.topology import doctor
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.folding import Folding


@dataclass(frozen=True)
class FoldedModel:
    """What set-up has made of the user's model.

    Attributes:
        parts: The parts that were found.
        families: Family of every parameter name.
        halved: Names of live [E, 2, F, D] parameters.
        sharded: Modules that FSDP2 manages.
        roots: Those of them that steps call.
        tokens: Which tokens the layer that runs sees.
        num_local: Parameters that this rank stores.
        num_total: Parameters of the model.
    """

    parts: ModelParts
    families: Mapping[str, Family]
    halved: frozenset[str]
    sharded: tuple[FSDPModule, ...]
    roots: tuple[FSDPModule, ...]
    tokens: RunningTokens
    num_local: int
    num_total: int

    def describe(self, folding: Folding) -> str:
        """The block that rank 0 logs at start."""
        groups = "  ".join(
            f"{axis} {list(folding.group_of(0, axis))}"
            for axis in ("tp", "dp", "etp", "ep", "edp")
            if len(folding.group_of(0, axis)) > 1
        )
        lines = [
            f"lightning_fold: mapping {folding.mapping_id}, {folding.world} ranks",
            f"  groups of rank 0: {groups or 'none'}",
            f"  parameters: {self.num_total:,} in all, {self.num_local:,} stored by rank 0",
        ]
        num_experts = min(spec.num_experts for spec in self.parts.experts)
        best = doctor.largest_legal_ep(folding.stage_size, num_experts)
        if folding.ep * folding.etp == 1 and best > 1:
            lines.append(f"  expert_parallel_size=1; up to {best} is possible on these ranks")
        return "\n".join(lines)


def fold_model(
    module: nn.Module, *, comm: Comm, dispatcher: str, frees_after_forward: bool = False
) -> FoldedModel:
    """Fold the model in `module`. Every rank calls it with equal weights, or on meta.

    Args:
        module: The LightningModule.
        comm: Collectives.
        dispatcher: See `FoldedConfig.dispatcher`.
        frees_after_forward: See `params.shard_over_data`.

    Raises:
        ValueError: The model does not fit the mapping.
    """
    parts, decoder = check_model(module, comm.meshes.folding)
    outside = _beside_core(module, parts)
    num_total = sum(p.numel() for p in module.parameters())
    tokens = RunningTokens()
    TokenWatch(tokens, comm).install(parts)
    halved = swap_experts(parts.experts, comm=comm, dispatcher=dispatcher, tokens=tokens)
    if decoder is not None:
        TensorParallel(comm).apply(decoder)
    families = assign_families(
        [name for name, _ in module.named_parameters()],
        experts=[spec.name for spec in parts.experts],
        routers=parts.routers,
        shared=parts.shared,
    )
    units = [*(layer for _, layer in parts.layers), parts.core, *outside]
    by_param = {param: families[name] for name, param in module.named_parameters()}
    sharded = shard_over_data(
        units, families=by_param, meshes=comm.meshes, frees_after_forward=frees_after_forward
    )
    called = {id(parts.core), *(id(child) for child in outside)}
    roots = [managed for managed in sharded if id(managed) in called]
    return FoldedModel(
        parts=parts,
        families=families,
        halved=frozenset(halved),
        sharded=tuple(sharded),
        roots=tuple(roots),
        tokens=tokens,
        num_local=sum(local_tensor(p).numel() for p in module.parameters()),
        num_total=num_total,
    )


def check_model(module: nn.Module, folding: Folding) -> tuple[ModelParts, DecoderParts | None]:
    """Find the parts of the model and make sure that they fit the mapping. Changes nothing.

    Returns:
        The parts, and the decoder that tp shards; None where tp is 1.

    Raises:
        ValueError: The model does not fit the mapping.
    """
    parts = find_parts(module)
    _check_outside(module, parts, folding)
    for spec in parts.experts:
        _check_experts(spec, folding)
    return parts, check_decoder(parts, folding) if folding.tp > 1 else None


def _check_experts(spec: ExpertsSpec, folding: Folding) -> None:
    if spec.refusal is not None:
        if folding.ep * folding.etp > 1:
            raise ValueError(
                f"{spec.name} ({type(spec.module).__name__}) cannot be spread over experts ranks: "
                f"{spec.refusal}. Legal: expert_parallel_size=1 and expert_tensor_parallel_size=1."
            )
        return
    doctor.check_experts(
        spec.name,
        num_experts=spec.num_experts,
        width=spec.width,
        folding=folding,
    )


def _check_outside(module: nn.Module, parts: ModelParts, folding: Folding) -> None:
    direct = [name for name, p in module._parameters.items() if p is not None]
    if direct and folding.world > 1:
        raise ValueError(
            f"parameters directly on {type(module).__name__} ({', '.join(direct)}) would not be "
            f"averaged over ranks. Move them into a submodule, for example self.{parts.core_name}."
        )
    if folding.tp > 1 and _beside_core(module, parts):
        name = next(n for n, c in module.named_children() if c is _beside_core(module, parts)[0])
        raise ValueError(
            f"self.{name} has parameters outside self.{parts.core_name}; under "
            f"tensor_parallel_size={folding.tp} every tp rank computes it on the same tokens, and "
            f"its gradient would be counted {folding.tp} times. Move it into "
            f"self.{parts.core_name} or set tensor_parallel_size=1."
        )


def _beside_core(module: nn.Module, parts: ModelParts) -> list[nn.Module]:
    """Children beside the core that have parameters; each becomes its own FSDP2 root."""
    return [
        child
        for child in module.children()
        if child is not parts.core and any(True for _ in child.parameters())
    ]
