"""Find the parts of a user's model: the called core, experts, routers and decoder layers.

Reads structure only and changes nothing; whatever cannot be handled is refused here, before a
parameter is touched. Matching is by shape of the contract, not by class: `experts(hidden, index,
weights)` with stacked three-dimensional weights covers the Hugging Face families and any module
written the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fold_kernels.activation import geglu_tanh
from fold_kernels.swiglu import swiglu
from lightning_fold.model.adapters import Adapter, Sizes, adapter_of, refusal_of, sizes_of
from lightning_fold.model.decoder import Experts
from lightning_fold.moe.layer import FoldedExperts

ROUTER_NAMES = ("gate", "router")


@dataclass(frozen=True)
class ExpertsSpec:
    """One experts container.

    Attributes:
        name: Qualified name from the LightningModule.
        module: The container.
        num_experts: E.
        width: F, the width of one expert.
        activation: Maps [R, 2F], gate half then up half, to [R, F].
        refusal: Why the container cannot be folded; None when it can.
        adapter: How a list of experts is stacked before it is folded; None for stacked ones.
        model_width: D; 0 where the container cannot be folded and does not tell.
    """

    name: str
    module: nn.Module
    num_experts: int
    width: int
    activation: Callable[[Tensor], Tensor]
    refusal: str | None
    adapter: Adapter | None = None
    model_width: int = 0


@dataclass(frozen=True)
class ModelParts:
    """What the strategy works on; names are qualified from the LightningModule.

    Attributes:
        core_name: Attribute of the LightningModule that its steps call.
        core: That module.
        experts: Experts containers, in order of the forward.
        routers: Names of routers.
        shared: Names of shared experts and their gates.
        layers: Decoder layers with their names: the units that FSDP2 gathers together.
    """

    core_name: str
    core: nn.Module
    experts: tuple[ExpertsSpec, ...]
    routers: tuple[str, ...]
    shared: tuple[str, ...]
    layers: tuple[tuple[str, nn.Module], ...]


def find_parts(lightning_module: nn.Module) -> ModelParts:
    """Find the parts of the model in `lightning_module`.

    Raises:
        ValueError: No MoE block, several modules with MoE blocks, a compiled or a folded model.
    """
    _refuse_compiled(lightning_module)
    _refuse_folded(lightning_module)
    blocks = dict(_find_blocks(lightning_module))
    if not blocks:
        raise ValueError(_explain_no_blocks(lightning_module))
    core_name = _core_name(blocks)
    core = lightning_module.get_submodule(core_name)
    experts = tuple(_spec(lightning_module, name, module) for name, module in blocks.items())
    return ModelParts(
        core_name=core_name,
        core=core,
        experts=experts,
        routers=tuple(_siblings(lightning_module, blocks, lambda child: child in ROUTER_NAMES)),
        shared=tuple(_siblings(lightning_module, blocks, lambda child: child.startswith("shared"))),
        layers=tuple(_layers(lightning_module, blocks)),
    )


def _find_blocks(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Experts containers: stacked weights, or a list of expert modules.

    A list is found under the name `experts`, or by the adapter of the block that holds it.
    """
    adapted: set[str] = set()
    for name, module in root.named_modules():
        if (adapter := adapter_of(module)) is not None:
            adapted.add(f"{name}.{adapter.experts}")
        if name in adapted:
            yield name, module
            continue
        stacked = _is_stacked(module)
        listed = name.rpartition(".")[2] == "experts" and isinstance(module, nn.ModuleList)
        if stacked or listed:
            yield name, module


def _is_stacked(module: nn.Module) -> bool:
    down = module._parameters.get("down_proj")
    first = module._parameters.get("gate_up_proj", module._parameters.get("up_proj"))
    return all(p is not None and p.dim() == 3 for p in (down, first))


def _spec(root: nn.Module, name: str, module: nn.Module) -> ExpertsSpec:
    block = root.get_submodule(name.rpartition(".")[0])
    adapter = adapter_of(block)
    if adapter is not None and block._modules.get(adapter.experts) is module:
        return _adapted(name, module, block, adapter)
    refusal = _refusal(module)
    if not _is_stacked(module):
        num_experts = len(module) if isinstance(module, nn.ModuleList) else 0
        return ExpertsSpec(name, module, num_experts, 0, swiglu, refusal)
    down = module._parameters["down_proj"]
    assert down is not None
    num_experts, model_width, width = down.shape
    return ExpertsSpec(
        name, module, num_experts, width, _activation(module), refusal, model_width=model_width
    )


def _adapted(name: str, module: nn.Module, block: nn.Module, adapter: Adapter) -> ExpertsSpec:
    refusal = refusal_of(adapter, block)
    count = len(module) if isinstance(module, nn.ModuleList) else 0
    sizes = sizes_of(adapter, block) if refusal is None else Sizes(count, 0, 0)
    return ExpertsSpec(
        name,
        module,
        sizes.num_experts,
        sizes.width,
        _gated(adapter.activation),
        refusal,
        adapter,
        sizes.model_width,
    )


def _refusal(module: nn.Module) -> str | None:
    """Why a container cannot be folded; transformers sets the flags on its experts classes."""
    if not _is_stacked(module):
        return (
            "its experts are a list of modules, not stacked [E, 2F, D] and [E, D, F] weights, and "
            "no adapter says how to stack them (`lightning_fold.register_experts`)"
        )
    if "gate_up_proj" not in module._parameters:
        return "its experts have no gate (`up_proj` only)"
    flags = {
        "is_transposed": "its weights are stored transposed, as [E, D, 2F]",
        "has_post_expert_norm": "it normalises inside each expert",
    }
    for flag, reason in flags.items():
        if getattr(module, flag, False):
            return reason
    if not getattr(module, "is_concatenated", True):
        return "gate and up rows are interleaved in its weights"
    extra = sorted(set(module._parameters) - {"gate_up_proj", "down_proj"})
    extra += [
        name for name, _ in module.named_children() if list(module.get_submodule(name).parameters())
    ]
    if extra:
        return f"it has further parameters ({', '.join(extra)})"
    gate_up, down = cast("Tensor", module.gate_up_proj), cast("Tensor", module.down_proj)
    if gate_up.shape[1] != 2 * down.shape[2] or gate_up.shape[2] != down.shape[1]:
        shapes = f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
        return f"its weights {shapes} are not [E, 2F, D] and [E, D, F]"
    return None


def _activation(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """What the container computes between its two products."""
    gate: Any = getattr(module, "_apply_gate", None)
    function = getattr(gate, "__func__", gate)
    if function is None or function is Experts._apply_gate or _is_default_gate(function):
        return _gated(getattr(module, "act_fn", None))
    return gate


def _is_default_gate(function: Any) -> bool:
    """Whether it is transformers' own: `act_fn(gate) * up`."""
    return _is_named(function, "transformers.integrations.moe", "_default_apply_gate")


def _is_silu(act_fn: Any) -> bool:
    plain = act_fn is None or act_fn is nn.functional.silu or type(act_fn) is nn.SiLU
    return plain or _is_named(type(act_fn), "transformers.activations", "SiLUActivation")


def _is_named(value: Any, module: str, name: str) -> bool:
    # By name: importing transformers would cost seconds where the model is none of its.
    return (getattr(value, "__module__", ""), getattr(value, "__name__", "")) == (module, name)


def _gated(act_fn: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    if _is_silu(act_fn):
        return swiglu
    if _is_named(type(act_fn), "transformers.activations", "GELUTanh"):
        return geglu_tanh
    activation = cast("Callable[[Tensor], Tensor]", act_fn)

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


def _core_name(blocks: dict[str, nn.Module]) -> str:
    owners = sorted({name.partition(".")[0] for name in blocks})
    if len(owners) > 1 or any("." not in name for name in blocks):
        raise ValueError(
            f"MoE blocks must lie in one submodule of the LightningModule, the one that its steps "
            f"call; found them under {', '.join(owners)}. Put the model under one attribute, for "
            f"example `self.model`."
        )
    return owners[0]


def _siblings(
    root: nn.Module, blocks: dict[str, nn.Module], wanted: Callable[[str], bool]
) -> Iterator[str]:
    for name in blocks:
        parent = name.rpartition(".")[0]
        for child, _ in root.get_submodule(parent).named_children():
            if wanted(child):
                yield f"{parent}.{child}"


def _layers(root: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Items of the outermost ModuleLists that hold experts, dense-first layers included."""
    seen: set[str] = set()
    for block in blocks:
        parts = block.split(".")
        for depth in range(1, len(parts)):
            name = ".".join(parts[:depth])
            if isinstance(root.get_submodule(name), nn.ModuleList) and name not in seen:
                seen.add(name)
                yield from (
                    (f"{name}.{i}", m) for i, m in root.get_submodule(name).named_children()
                )
                break
            if name in seen:
                break


def _refuse_compiled(root: nn.Module) -> None:
    for name, module in root.named_modules():
        compiled = isinstance(module, torch._dynamo.OptimizedModule)
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{name or type(root).__name__} is wrapped by torch.compile. The strategy replaces "
                "forwards and shards parameters at set-up, which a compiled graph would not see. "
                "Pass the module uncompiled."
            )


def _refuse_folded(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if isinstance(module.__dict__.get("forward"), FoldedExperts):
            raise ValueError(
                f"{name} was folded by another FoldedMoEStrategy, and its parameters are that "
                "one's shards. Use the Trainer that folded it, or build the module again and load "
                "its weights with `ckpt_path`."
            )


def _explain_no_blocks(root: nn.Module) -> str:
    names = [
        f"  {n}: {type(m).__name__}" for n, m in root.named_modules() if n and n.count(".") < 4
    ]
    tree = "\n".join(names[:24]) + ("\n  ..." if len(names) > 24 else "")
    return (
        f"{type(root).__name__} has no MoE block: no submodule holds stacked expert weights "
        f"(`gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F]). Build the model in __init__ or "
        f"configure_model, or train it with another strategy, for example 'ddp'. Modules seen:\n"
        f"{tree or '  none'}"
    )
