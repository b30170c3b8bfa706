"""Try out on a few tokens where a model can be cut: no layer runs, nothing is changed.

A core can be cut between its layers if it does nothing there: each layer takes exactly what the
one before has returned, and what else it takes does not hang on the hidden states. Both are
observed on a call in which every layer is replaced by one that hands on a tensor of its own.
What has parameters and runs before the first layer belongs to the first stage, what runs after
the last layer to the last one.
"""

# Shapes.  B sequences   S tokens   D model width

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_fold.model.inspect import ModelParts
from lightning_fold.model.structure import SLICED_OUTPUTS

_TOKENS = 4


@dataclass(frozen=True)
class Anatomy:
    """Where a core can be cut.

    Attributes:
        container: Name of the list of layers.
        before: Names of modules with parameters of their own that run before the layers.
        after: The same behind the layers.
        in_tuple: Whether a layer returns a tuple around its hidden states.
        width: D.
        calls: Other arguments of each layer, and whether it gets hidden states by position, as
            seen on [1, 4] tokens.
    """

    container: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    in_tuple: bool
    width: int
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any], bool], ...] = ()


@dataclass
class _Seen:
    """One call."""

    order: list[int] = field(default_factory=list)
    taken: list[Tensor] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    extras: list[list[Any]] = field(default_factory=list)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], bool]] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    first_after: tuple[str, Any] | None = None


class _Stand(nn.Module):
    """Stands for one layer, and notes its call."""

    def __init__(self, index: int, layer: nn.Module, seen: _Seen, *, in_tuple: bool) -> None:
        super().__init__()
        self.index, self.seen, self.in_tuple = index, seen, in_tuple
        self.__dict__.update(plain_attributes(layer))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, rest, named = hidden_of(args, kwargs)
        out = hidden.clone() if isinstance(hidden, Tensor) else hidden
        self.seen.order.append(self.index)
        self.seen.taken.append(hidden)
        self.seen.given.append(out)
        self.seen.extras.append(tree_leaves((rest, named)))
        self.seen.calls.append((rest, named, bool(args)))
        return (out,) if self.in_tuple else out


def hidden_of(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The hidden states that a layer is called with, and its other arguments."""
    if args:
        return args[0], tuple(args[1:]), dict(kwargs)
    rest = dict(kwargs)
    return rest.pop("hidden_states", None), (), rest


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes that the code around a layer may read: plain values, such as its kind."""
    kinds = (str, int, float, bool, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, kinds) and not name.startswith("_") and name != "training"
    }


def probe(root: nn.Module, parts: ModelParts) -> Anatomy:
    """Find out where the core of `root` can be cut into stages. Changes nothing.

    Args:
        root: The LightningModule, whole, on CPU, a device or meta.
        parts: Its parts.

    Raises:
        ValueError: It cannot be cut; says what was seen.
    """
    for name in SLICED_OUTPUTS[1:]:
        if getattr(getattr(parts.core, "config", None), name, False):
            raise refuse(parts, f"config.{name} asks for what no stage has of all layers")
    container = _container(root, parts)
    problem = ""
    for in_tuple in (False, True):
        seen, problem = _call(root, parts, container, in_tuple=in_tuple, disturb=False)
        problem = problem or _disorder(parts, seen)
        if not problem:
            other, problem = _call(root, parts, container, in_tuple=in_tuple, disturb=True)
            problem = problem or _dependence(seen, other)
        if not problem:
            before = tuple(dict.fromkeys(seen.before))
            return Anatomy(
                container,
                before,
                tuple(name for name, _ in _owners(parts) if name not in before),
                in_tuple,
                seen.taken[0].shape[-1],
                tuple(seen.calls),
            )
    raise refuse(parts, problem)


def _container(root: nn.Module, parts: ModelParts) -> str:
    """Name of the one list of layers."""
    containers = {name.rpartition(".")[0] for name, _ in parts.layers}
    if len(containers) != 1:
        raise refuse(parts, f"its layers lie in {len(containers)} lists ({sorted(containers)})")
    container = containers.pop()
    if not isinstance(root.get_submodule(container), nn.ModuleList):
        raise refuse(parts, f"{container} is no nn.ModuleList of layers")
    if "input_ids" not in inspect.signature(parts.core.forward).parameters:
        raise refuse(parts, f"{type(parts.core).__name__}.forward takes no `input_ids` [B, S]")
    return container


def refuse(parts: ModelParts, reason: str) -> ValueError:
    """The error for a model that pipelines cannot serve."""
    return ValueError(
        f"{type(parts.core).__name__} cannot be cut into pipeline stages: {reason}. Legal: "
        "pipeline_parallel_size=1.  Change `pipeline_parallel_size`."
    )


def _call(
    root: nn.Module, parts: ModelParts, container: str, *, in_tuple: bool, disturb: bool
) -> tuple[_Seen, str]:
    """What a call with stands for layers shows, and why it failed if it did."""
    seen, core = _Seen(), parts.core
    layers: Any = root.get_submodule(container)
    stands = {
        key: _Stand(i, layer, seen, in_tuple=in_tuple)
        for i, (key, layer) in enumerate(layers._modules.items())
    }
    real, mode = layers._modules, {m: m.training for m in core.modules()}
    state = torch.get_rng_state()
    try:
        core.eval()
        layers._modules = stands
        with _watched(parts, seen, disturb=disturb), _values(core), torch.no_grad():
            core(**_arguments(core))
    except _Enough:
        pass
    except Exception as error:
        return seen, f"called with input_ids [1, {_TOKENS}] and without layers, it fails: {error}"
    finally:
        layers._modules = real
        torch.set_rng_state(state)
        for module, training in mode.items():
            module.training = training
    return seen, ""


class _Enough(BaseException):
    """Ends the call where the layers are over."""


def _arguments(core: nn.Module) -> dict[str, Any]:
    weight = next(core.parameters())
    device = "cpu" if weight.is_meta else weight.device
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=device)
    takes_cache = "use_cache" in inspect.signature(core.forward).parameters
    return {"input_ids": ids} | ({"use_cache": False} if takes_cache else {})


@contextmanager
def _values(core: nn.Module) -> Iterator[None]:
    """Stand-ins for the values that a core on meta lacks: zeros, on CPU."""
    buffers = [
        (owner, key, buffer)
        for owner in core.modules()
        for key, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    embeddings: list[Any] = [
        m for m in core.modules() if isinstance(m, nn.Embedding) and m.weight.is_meta
    ]
    try:
        for owner, key, buffer in buffers:
            owner._buffers[key] = torch.zeros_like(buffer, device="cpu")
        for embedding in embeddings:
            embedding.forward = partial(_zeros_for, embedding)
        yield
    finally:
        for owner, key, buffer in buffers:
            owner._buffers[key] = buffer
        for embedding in embeddings:
            del embedding.forward


def _zeros_for(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    return torch.zeros(*ids.shape, embedding.embedding_dim, dtype=embedding.weight.dtype)


@contextmanager
def _watched(parts: ModelParts, seen: _Seen, *, disturb: bool) -> Iterator[None]:
    """Hooks on all modules beside the layers that have parameters of their own.

    The layers hide behind their stands.
    """
    hooks = []
    for name, module in _owners(parts):
        hooks.append(module.register_forward_pre_hook(_noter(name, seen), with_kwargs=True))
        if disturb:
            hooks.append(module.register_forward_hook(_disturb(seen)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _owners(parts: ModelParts) -> list[tuple[str, nn.Module]]:
    """Modules beside the layers that have parameters of their own."""
    inside = {id(m) for _, layer in parts.layers for m in layer.modules()}
    return [
        (name, module)
        for name, module in parts.core.named_modules(prefix=parts.core_name)
        if module._parameters and id(module) not in inside
    ]


def _noter(name: str, seen: _Seen) -> Any:
    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not seen.order:
            seen.before.append(name)
            return
        seen.first_after = name, hidden_of(args, kwargs)[0]
        raise _Enough

    return note


def _disturb(seen: _Seen) -> Any:
    def change(module: nn.Module, args: Any, out: Any) -> Any:
        return out + 1 if isinstance(out, Tensor) and not seen.order else None

    return change


def _disorder(parts: ModelParts, seen: _Seen) -> str:
    """What the core does between its layers; empty where it does nothing."""
    count = len(parts.layers)
    if seen.order != list(range(count)):
        return f"it calls its {count} layers in the order {seen.order}"
    first = seen.taken[0]
    if not isinstance(first, Tensor) or first.dim() != 3 or first.shape[:2] != (1, _TOKENS):
        shape = list(first.shape) if isinstance(first, Tensor) else type(first).__name__
        return f"its layers take {shape}, not hidden states [B, S, D]"
    for i, (given, taken) in enumerate(zip(seen.given, seen.taken[1:], strict=False)):
        if taken is not given:
            return f"it changes the hidden states between layers {i} and {i + 1}"
    after, taken_after = seen.first_after or ("", None)
    if after and taken_after is not seen.given[-1]:
        return f"it changes the hidden states between the last layer and {after}"
    return f"{after} runs before and after the layers" if after in seen.before else ""


def _dependence(seen: _Seen, other: _Seen) -> str:
    """Whether other arguments of the layers hang on the hidden states."""
    for i, (one, two) in enumerate(zip(seen.extras, other.extras, strict=True)):
        if len(one) != len(two) or not all(_same(a, b) for a, b in zip(one, two, strict=True)):
            return f"layer {i} takes more that is computed from the embeddings"
    return ""


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.is_meta or bool(torch.equal(a, b))
