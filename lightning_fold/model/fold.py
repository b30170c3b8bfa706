"""Fold one model: check all, then experts, tensor parallelism, families and sharding.

Nothing is touched before all checks have passed. Afterwards every parameter that more than one
rank needs is a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fold_kernels.expert_forms import Precision
from lightning_fold.model.adapters import stack_block
from lightning_fold.model.balance import Balance
from lightning_fold.model.context import ContextParallel, check_context
from lightning_fold.model.expert_precision import check_precision
from lightning_fold.model.inspect import ExpertsSpec, ModelParts, find_parts
from lightning_fold.model.linear import defer_linears
from lightning_fold.model.passage import Passage
from lightning_fold.model.recompute import Mode, apply_recompute, check_recompute
from lightning_fold.model.routers import Router
from lightning_fold.model.routing import apply_routing, install_balance, plan_routing
from lightning_fold.model.structure import DecoderParts, check_decoder
from lightning_fold.model.swap import shared_blocks, swap_experts
from lightning_fold.model.tensor_parallel import TensorParallel
from lightning_fold.model.token_layout import TokenWatch
from lightning_fold.moe.capacity import Capacity
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.params import (
    Family,
    assign_families,
    local_tensor,
    shard_over_data,
)
from lightning_fold.params.sentinel import Watched, watch_list
from lightning_fold.router_options import RouterOptions
from lightning_fold.topology import doctor
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.folding import Folding
from lightning_fold.topology.layer_foldings import check_layers


@dataclass(frozen=True)
class FoldedModel:
    """What set-up has made of the user's model.

    Attributes:
        parts: The parts that were found.
        families: Family of every parameter name.
        watched: What the sentinel knows of every parameter.
        halved: Names of live [E, 2, F, D] parameters.
        sharded: Modules that FSDP2 manages.
        roots: Those of them that steps call.
        tokens: Which tokens the layer that runs sees.
        num_local: Parameters that this rank stores.
        num_total: Parameters of the model.
        watch: Tells what a forward with given arguments would see.
        passage: What comes in for the pipeline stage that runs; None without pipelines.
        balance: What keeps its experts evenly loaded; None where nothing does.
        added: Names of buffers that the user's model did not have.
    """

    parts: ModelParts
    families: Mapping[str, Family]
    watched: tuple[Watched, ...]
    halved: frozenset[str]
    sharded: tuple[FSDPModule, ...]
    roots: tuple[FSDPModule, ...]
    tokens: RunningTokens
    num_local: int
    num_total: int
    watch: TokenWatch
    passage: Passage | None = None
    balance: Balance | None = None
    added: frozenset[str] = frozenset()

    def describe(self, folding: Folding) -> str:
        """The block that rank 0 logs at start."""
        groups = "  ".join(
            f"{axis} {list(folding.group_of(0, axis))}"
            for axis in ("pp", "tp", "cp", "dp", "etp", "ep", "edp")
            if len(folding.group_of(0, axis)) > 1
        )
        lines = [
            f"lightning_fold: mapping {folding.mapping_id}, {folding.world} ranks",
            f"  groups of rank 0: {groups or 'none'}",
            f"  parameters: {self.num_total:,} in all, {self.num_local:,} stored by rank 0",
        ]
        num_experts = min((spec.num_experts for spec in self.parts.experts), default=1)
        best = doctor.largest_legal_ep(folding.stage_size, num_experts)
        if folding.ep * folding.etp == 1 and best > 1:
            lines.append(f"  expert_parallel_size=1; up to {best} is possible on these ranks")
        return "\n".join(lines)


class StageParts(Protocol):
    """What a cut leaves of a model on this rank."""

    @property
    def parts(self) -> ModelParts:
        """Of the stages of this rank."""

    @property
    def decoder(self) -> DecoderParts | None:
        """What tensor parallelism shards of them."""

    @property
    def passage(self) -> Passage:
        """What comes in for the stage that runs."""


Cutter = Callable[[nn.Module, ModelParts, DecoderParts | None, Sequence[Router]], StageParts]


def fold_model(
    module: nn.Module,
    *,
    comm: Comm,
    dispatcher: str,
    capacity: Capacity | None = None,
    router: RouterOptions | None = None,
    layer_foldings: Mapping[int, Folding] | None = None,
    context_method: str = "all_gather",
    activation_checkpointing: Mode = "none",
    expert_precision: Precision = "bf16",
    frees_after_forward: bool = False,
    cut: Cutter | None = None,
) -> FoldedModel:
    """Fold the model in `module`. Every rank calls it with equal weights, or on meta.

    Args:
        module: The LightningModule.
        comm: Collectives.
        dispatcher: See `FoldedConfig.dispatcher`.
        capacity: What an expert takes; None is all.
        router: Who routes, and what balances the experts; None leaves both to the model.
        layer_foldings: Foldings of single decoder layers, by number.
        context_method: See `FoldedConfig.context_parallel_method`.
        activation_checkpointing: See `FoldedConfig.activation_checkpointing`.
        expert_precision: See `FoldedConfig.expert_precision`.
        frees_after_forward: See `params.shard_over_data`.
        cut: Leaves this rank the parts of its pipeline stages; None where it has all.

    Raises:
        ValueError: The model does not fit the mapping.
    """
    foldings = layer_foldings or {}
    parts, decoder = check_model(
        module,
        comm.meshes.folding,
        foldings,
        context_method=context_method,
        expert_precision=expert_precision,
    )
    check_recompute(parts, activation_checkpointing)
    routing = plan_routing(module, parts, router or RouterOptions(), comm.meshes.folding)
    parts = _stack_lists(module, parts)
    outside = _beside_core(module, parts)
    num_total = sum(p.numel() for p in module.parameters())
    tokens = RunningTokens()
    routing = apply_routing(routing, tokens)
    own_foldings = experts_foldings(parts, foldings)
    stage = None if cut is None else cut(module, parts, decoder, routing.routers)
    if stage is not None:
        parts, decoder = stage.parts, stage.decoder
    watch = TokenWatch(tokens, comm, asks_peers=capacity is not None and capacity.pad)
    watch.install(parts)
    shared = shared_blocks(module, parts.shared)
    comms = _layer_comms(parts, own_foldings, comm)
    halved = swap_experts(
        parts.experts,
        comm=comm,
        dispatcher=dispatcher,
        tokens=tokens,
        layer_comms=comms,
        capacity=capacity,
        shared=shared,
        precision=expert_precision,
    )
    if decoder is not None:
        TensorParallel(comm, tokens).apply(decoder)
    if comm.size("cp") > 1:
        ContextParallel(comm, tokens, context_method).apply(parts)
    passage = None
    if stage is not None:
        passage = stage.passage
        # Schedules may put weight gradients off; without one that does, nothing changes.
        defer_linears(parts.core)
    balance = install_balance(routing, parts, comm=comm, tokens=tokens, passage=passage)
    apply_recompute(parts, activation_checkpointing, tokens)
    families = _families(module, parts)
    watched = watch_list(module, families=families, comm=comm, layer_comms=comms)
    sharded, roots = _shard(parts, outside, watched, comm, frees_after_forward)
    return FoldedModel(
        parts=parts,
        families=families,
        watched=tuple(watched),
        halved=frozenset(halved),
        sharded=sharded,
        roots=roots,
        tokens=tokens,
        num_local=sum(local_tensor(p).numel() for p in module.parameters()),
        num_total=num_total,
        watch=watch,
        passage=passage,
        balance=balance,
        added=routing.adds_bias,
    )


def _layer_comms(
    parts: ModelParts, own_foldings: Mapping[str, Folding], comm: Comm
) -> dict[str, Comm]:
    """Collectives of experts in layers with their own folding, by the container's name."""
    return {
        spec.name: Comm(comm.meshes.of(own_foldings[spec.name]), comm.telemetry)
        for spec in parts.experts
        if spec.name in own_foldings
    }


def _families(module: nn.Module, parts: ModelParts) -> dict[str, Family]:
    return assign_families(
        [name for name, _ in module.named_parameters()],
        experts=[spec.name for spec in parts.experts],
        routers=parts.routers,
        shared=parts.shared,
    )


def _shard(
    parts: ModelParts,
    outside: Sequence[nn.Module],
    watched: Sequence[Watched],
    comm: Comm,
    frees_after_forward: bool,
) -> tuple[tuple[FSDPModule, ...], tuple[FSDPModule, ...]]:
    """The modules that FSDP2 manages from here on, and those of them that steps call."""
    # A container without a forward is no unit; the core's unit takes its parameters.
    layers = [m for _, m in parts.layers if not isinstance(m, nn.ModuleDict | nn.ModuleList)]
    sharded = shard_over_data(
        [*layers, parts.core, *outside],
        families={w.current: w.family for w in watched},
        meshes=comm.meshes,
        layer_meshes={w.current: w.comm.meshes for w in watched},
        frees_after_forward=frees_after_forward,
    )
    called = {id(parts.core), *(id(child) for child in outside)}
    return tuple(sharded), tuple(managed for managed in sharded if id(managed) in called)


def _stack_lists(module: nn.Module, parts: ModelParts) -> ModelParts:
    """Stack the experts of every block that has an adapter; the parts as they are then."""

    def stacked(spec: ExpertsSpec) -> ExpertsSpec:
        if spec.adapter is None or spec.refusal is not None:
            return spec
        block = module.get_submodule(spec.name.rpartition(".")[0])
        return replace(spec, module=stack_block(block, spec.adapter), adapter=None)

    return replace(parts, experts=tuple(stacked(spec) for spec in parts.experts))


def check_model(
    module: nn.Module,
    folding: Folding,
    layer_foldings: Mapping[int, Folding] | None = None,
    *,
    context_method: str = "all_gather",
    expert_precision: Precision = "bf16",
) -> tuple[ModelParts, DecoderParts | None]:
    """Find the parts of the model and make sure that they fit the mapping. Changes nothing.

    Args:
        module: The LightningModule.
        folding: The mapping.
        layer_foldings: Foldings of single decoder layers, by number.
        context_method: See `FoldedConfig.context_parallel_method`.
        expert_precision: See `FoldedConfig.expert_precision`.

    Returns:
        The parts, and the decoder that tp shards; None where tp is 1.

    Raises:
        ValueError: The model does not fit the mapping.
    """
    parts = find_parts(module)
    _check_outside(module, parts, folding)
    own = experts_foldings(parts, layer_foldings or {})
    for spec in parts.experts:
        _check_experts(spec, own.get(spec.name, folding))
        check_precision(spec, own.get(spec.name, folding), expert_precision)
    decoder = check_decoder(parts, folding) if folding.tp > 1 else None
    if folding.cp > 1:
        check_context(parts, folding, context_method)
    return parts, decoder


def experts_foldings(
    parts: ModelParts, layer_foldings: Mapping[int, Folding]
) -> dict[str, Folding]:
    """Folding of every experts container in a layer that has its own, by the container's name.

    Raises:
        ValueError: A layer is not in the model or has no experts.
    """
    numbers = {
        spec.name: number
        for spec in parts.experts
        for number, (layer, _) in enumerate(parts.layers)
        if spec.name.startswith(f"{layer}.")
    }
    moe = {number: name for name, number in numbers.items()}
    check_layers(layer_foldings, num_layers=len(parts.layers), moe=moe)
    return {
        name: layer_foldings[number] for name, number in numbers.items() if number in layer_foldings
    }


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
    if folding.pp > 1 and _beside_core(module, parts):
        name = next(n for n, c in module.named_children() if c is _beside_core(module, parts)[0])
        raise ValueError(
            f"self.{name} has parameters outside self.{parts.core_name}; under "
            f"pipeline_parallel_size={folding.pp} the stages divide self.{parts.core_name}, and "
            f"nothing says which of them has self.{name}. Move it into self.{parts.core_name}, or "
            "change `pipeline_parallel_size` to 1."
        )
    shared = folding.tp * folding.cp
    if shared > 1 and _beside_core(module, parts):
        name = next(n for n, c in module.named_children() if c is _beside_core(module, parts)[0])
        raise ValueError(
            f"self.{name} has parameters outside self.{parts.core_name}; under tp*cp = "
            f"{folding.tp}*{folding.cp} = {shared} ranks compute it on the same tokens, and its "
            f"gradient would be counted {shared} times. Move it into self.{parts.core_name}, or "
            f"set tensor_parallel_size=1 and context_parallel_size=1."
        )


def _beside_core(module: nn.Module, parts: ModelParts) -> list[nn.Module]:
    """Children beside the core that have parameters; each becomes its own FSDP2 root."""
    return [
        child
        for child in module.children()
        if child is not parts.core and any(True for _ in child.parameters())
    ]
