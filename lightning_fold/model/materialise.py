"""Values for a model that was built, folded and sharded without any: one parameter at a time.

The model's own initialisers run on a skeleton, a twin of the module tree from before folding, in
which a single parameter is real and all others are on meta. Each draw is seeded by (seed, name,
expert), so a value is the same under every mapping, and a rank keeps its own part alone. Sends
nothing. A rank holds its shards and the parameter that is being drawn; of a stack of experts, one
expert.
"""

# Shapes.  E experts   F expert width   D model width

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fold.checkpoint.owned import owned_index, part_of
from lightning_fold.checkpoint.tensor_entry import DimIndex
from lightning_fold.model.on_meta import INITIALISERS, values_set_outside
from lightning_fold.params import local_tensor, with_local


class Skeleton:
    """The module tree as the user built it, on meta; shares nothing that folding changes.

    Args:
        module: The LightningModule, in its final dtypes, before folding.

    Attributes:
        root: The twin of `module`.
        written: Where the value of a parameter is set, by name, if by no initialiser.

    Raises:
        ValueError: A parameter has values already, or a plain attribute is a tensor without.
    """

    def __init__(self, module: nn.Module) -> None:
        _check_on_meta(module)
        self.written = values_set_outside(module)
        self.root = _twin(module, {}, {})

    def chain(self, name: str) -> list[nn.Module]:
        """The module `name` and all around it, innermost first."""
        parts = name.split(".") if name else []
        return [self.root.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1)]


@dataclass(frozen=True)
class Draw:
    """What decides an initial value, beside the model.

    Attributes:
        seed: Equal on all ranks.
        stacks: Number of experts of each parameter that holds them as its first dimension.
        halved: Names of live [E, 2, F, D] parameters.
        given: Names of parameters and buffers that get their values elsewhere.
    """

    seed: int
    stacks: Mapping[str, int]
    halved: Collection[str]
    given: Collection[str]


def materialise(module: nn.Module, skeleton: Skeleton, *, draw: Draw, device: torch.device) -> None:
    """Replace every meta parameter and buffer of the folded `module` by a real one. Local.

    Tied parameters stay tied; the first name decides. Afterwards `module.to(device)` has to run,
    which tells FSDP2 about the new shards.

    Raises:
        ValueError: No initialiser fills a parameter or buffer, or it fails on its own; names it.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for key, param in owner._parameters.items():
            places.setdefault(id(param), []).append((owner, key))
    state = torch.get_rng_state()
    try:
        for name, param in list(module.named_parameters()):
            local = torch.empty(local_tensor(param).shape, dtype=param.dtype, device=device)
            if name not in draw.given:
                _check_unwritten(name, skeleton)
                _fill(local, name, owned_index(param), skeleton, draw)
            real = nn.Parameter(with_local(param, local), param.requires_grad)
            for owner, key in places[id(param)]:
                owner._parameters[key] = real
        for name, owner in module.named_modules():
            _fill_buffers(owner, name, skeleton, draw, device)
    finally:
        torch.set_rng_state(state)


def _check_unwritten(name: str, skeleton: Skeleton) -> None:
    if where := skeleton.written.get(name):
        raise ValueError(
            f"{name}: its value is set at {where}, and under meta_init=True values come from "
            "initialisers alone, which would give it another. Move that into an "
            "`init_weights(module)` of the model or a `reset_parameters()` of the module, or leave "
            "`meta_init` out."
        )


def _check_on_meta(module: nn.Module) -> None:
    real = [name for name, param in module.named_parameters() if not param.is_meta]
    if real:
        count = sum(1 for _ in module.parameters())
        raise ValueError(
            f"of {count} parameters, {len(real)} have values on this rank "
            f"already ({', '.join(real[:3])}), where meta_init=True or a model partly on meta asks "
            "for none: they would be whole before they are sharded, and drawn again. Build all in "
            '`configure_model` or under torch.device("meta"), or leave `meta_init` out.'
        )
    for name, owner in module.named_modules():
        for key, value in vars(owner).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(
                    f"{name}.{key} ({type(owner).__name__}) is a tensor on meta and neither a "
                    "parameter nor a buffer, so nothing can give it a value. Create it under "
                    'torch.device("cpu"), or the model in `configure_model`.'
                )


def _twin(
    module: nn.Module, modules: dict[int, nn.Module], tensors: dict[int, Tensor]
) -> nn.Module:
    """A module with the same attributes but for parameters, buffers and children of its own."""
    if id(module) in modules:
        return modules[id(module)]
    twin: nn.Module = object.__new__(type(module))
    modules[id(module)] = twin
    twin.__dict__.update(module.__dict__)

    def copied(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            # A buffer with values may be read by an initialiser.
            other = tensor.detach().clone()
            is_param = isinstance(tensor, nn.Parameter)
            tensors[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if is_param else other
        return tensors[id(tensor)]

    twin._parameters = {key: copied(param) for key, param in module._parameters.items()}
    twin._buffers = {key: copied(buffer) for key, buffer in module._buffers.items()}
    twin._modules = {
        key: None if child is None else _twin(child, modules, tensors)
        for key, child in module._modules.items()
    }
    return twin


def _fill(
    local: Tensor, name: str, index: Sequence[DimIndex], skeleton: Skeleton, draw: Draw
) -> None:
    """Draw this rank's part of one parameter."""
    owner, _, key = name.rpartition(".")
    chain = skeleton.chain(owner)
    shape = chain[0]._parameters[key].shape  # type: ignore[union-attr]
    if name not in draw.stacks:
        local.copy_(part_of(_drawn(chain, owner, key, shape, _seed(draw.seed, name)), index))
        return
    for row, expert in enumerate(torch.arange(draw.stacks[name])[index[0]].tolist()):
        seed = _seed(draw.seed, name, expert)
        value = _drawn(chain, owner, key, torch.Size([1, *shape[1:]]), seed)
        value = value.unflatten(1, (2, -1)) if name in draw.halved else value
        local[row : row + 1].copy_(part_of(value, [slice(0, 1), *index[1:]]))


def _seed(seed: int, name: str, expert: int | None = None) -> int:
    text = f"{seed}/{name}/{'' if expert is None else expert}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@torch.no_grad()
def _drawn(chain: list[nn.Module], owner: str, key: str, shape: torch.Size, seed: int) -> Tensor:
    """One parameter of chain[0], real for as long as the initialisers run."""
    twin = chain[0]
    meta = twin._parameters[key]
    assert meta is not None
    # Not-a-number shows what an initialiser leaves out; integers have none.
    attempts = _attempts(chain) if meta.is_floating_point() else []
    try:
        for attempt in attempts:
            unset = torch.full(shape, torch.nan, dtype=meta.dtype)
            twin._parameters[key] = nn.Parameter(unset, meta.requires_grad)
            torch.default_generator.manual_seed(seed)
            _run(attempt, f"{owner}.{key}", twin)
            value = twin._parameters[key]
            if value is not None and value.shape == shape and not bool(value.sum().isnan()):
                return value.detach()
    finally:
        twin._parameters[key] = meta
    raise ValueError(_explain_unset(f"{owner}.{key}", twin, "parameter"))


@torch.no_grad()
def _fill_buffers(
    owner: nn.Module, name: str, skeleton: Skeleton, draw: Draw, device: torch.device
) -> None:
    """Give the meta buffers of one module the values that its initialisers compute."""
    unset = {k: b for k, b in owner._buffers.items() if b is not None and b.is_meta}
    for key in [k for k in unset if f"{name}.{k}" in draw.given]:
        owner._buffers[key] = torch.empty_like(unset.pop(key), device=device)
    for attempt in _attempts(skeleton.chain(name)) if unset else []:
        # What is equal whatever was there before has been written.
        both = [_computed(attempt, name, unset, fill, skeleton, draw.seed) for fill in (0, 1)]
        for key in list(unset):
            if torch.equal(both[0][key], both[1][key]):
                owner._buffers[key] = both[0][key].to(device)
                del unset[key]
    if unset:
        raise ValueError(_explain_unset(f"{name}.{next(iter(unset))}", owner, "buffer"))


def _computed(
    attempt: list[Callable[[], Any]],
    name: str,
    unset: dict[str, Tensor],
    fill: int,
    skeleton: Skeleton,
    seed: int,
) -> dict[str, Any]:
    twin = skeleton.chain(name)[0]
    before = dict(twin._buffers)
    try:
        for key, meta in unset.items():
            twin._buffers[key] = torch.full(meta.shape, fill, dtype=meta.dtype)
        torch.default_generator.manual_seed(_seed(seed, name))
        _run(attempt, name, twin)
        return {key: twin._buffers[key] for key in unset}
    finally:
        twin._buffers.update(before)


def _attempts(chain: list[nn.Module]) -> list[list[Callable[[], Any]]]:
    """What may fill a tensor of chain[0]: the model's initialiser, then also the module's own."""
    reset = getattr(chain[0], "reset_parameters", None)
    model = _model_initialiser(chain)
    return [attempt for attempt in (model, [reset, *model] if callable(reset) else []) if attempt]


def _model_initialiser(chain: list[nn.Module]) -> list[Callable[[], Any]]:
    """The nearest initialiser of modules, on all from the innermost to its own, as `apply` does."""
    for depth, module in enumerate(chain):
        for attribute in INITIALISERS:
            method = getattr(module, attribute, None)
            if callable(method) and _takes_module(method):
                return [partial(method, inner) for inner in chain[: depth + 1]]
    return []


def _takes_module(method: Callable[..., Any]) -> bool:
    """Tell `init_weights(module)` from methods of this name that take something else."""
    arguments = inspect.signature(method).parameters.values()
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [a.name for a in arguments if a.default is a.empty and a.kind not in starred]
    return required in (["module"], ["m"])


def _run(attempt: list[Callable[[], Any]], what: str, owner: nn.Module) -> None:
    try:
        for initialise in attempt:
            initialise()
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"{what} ({type(owner).__name__}): its initialiser fails where meta_init=True runs it "
            "for one parameter, of a stack of experts for one expert, and all others are on meta: "
            f"{type(error).__name__}: {line}. Write it with whole-tensor operations on each "
            "parameter, or leave `meta_init` out."
        ) from error


def _explain_unset(what: str, owner: nn.Module, kind: str) -> str:
    return (
        f"{what} ({type(owner).__name__}): nothing gives this {kind} a value under "
        "meta_init=True. Give the module a `reset_parameters()`, or the model an "
        f"`init_weights(module)`, that fills it; or leave `meta_init` out."
    )
