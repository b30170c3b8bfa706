"""Try out whether a decoder layer can be run in pieces: both ways on four tokens, before folding.

The layer and its pieces (`segments`) have to agree in outputs, in the gradients of input and
parameters, and in what they leave in buffers and attributes, with a simple function in place of the
experts. So a layer that scales, norms or drops out what its block gives is told from one that adds
it. Between the pieces another microbatch attends, and parameters are drawn, whatever they hold:
ranks see the same, and a layer whose weights are still zeros hides nothing. Experts are not
computed, so a layer of any size takes moments. Changes nothing, and draws no random number.
"""

# Shapes.  D model width   K top-k

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fold.pipeline.probe import plain_attributes
from lightning_fold.pipeline.segments import Caught, LayerCall, MoeLayer, call_layer, replaced
from lightning_fold.pipeline.tape import Tape, Value, drain

_TOKENS = 4
_TOLERANCE = 1e-6
_NOISE = 0.05
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Params = dict[str, nn.Parameter]
_Way = Callable[[MoeLayer, LayerCall, int, Params], list[Tensor | None]]


class _Plain:
    """Surroundings without anything."""

    def mark(self) -> None:
        """Nothing."""

    def __call__(self, mark: Any = None, *, repeats: bool = False) -> Any:
        """Nothing."""
        return nullcontext()


def reason_against(moe: MoeLayer, call: LayerCall, width: int) -> str | None:
    """Why a layer cannot be run in pieces; None if it can.

    Args:
        moe: The layer, not folded.
        call: Other arguments of a call on [1, 4] tokens.
        width: D.
    """
    for module in (moe.layer, moe.block, moe.experts):
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"{type(module).__name__} has hooks, which pieces would call at other times"
    if any(
        getattr(module, "gradient_checkpointing", False) is True for module in moe.layer.modules()
    ):
        return "it has gradient checkpointing of its own switched on, which would repeat it whole"
    try:
        with _drawn_parameters(moe) as params:
            whole = _outcome(_whole, moe, call, width, params)
            pieces = _outcome(_pieces, moe, call, width, params)
    # Whatever the user's code raises.
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return f"run in pieces it fails: {type(error).__name__}: {first_line}"
    for name in {**whole, **pieces}:
        off = _difference(whole.get(name), pieces.get(name))
        if not off <= _TOLERANCE:
            return f"run in pieces {name} differs by {off:.1e} of its largest element"
    return None


def _outcome(
    way: _Way, moe: MoeLayer, call: LayerCall, width: int, params: Params
) -> dict[str, Tensor | None]:
    """Everything that is seen of the layer after a microbatch and another one's attend, by name."""
    names = ["its output", "the gradient of its input", *(f"the gradient of {n}" for n in params)]
    with _as_it_was(moe):
        _seed(0)
        seen = dict(zip(names, way(moe, call, width, params), strict=True))
        return seen | _left_behind(moe)


def _whole(moe: MoeLayer, call: LayerCall, width: int, params: Params) -> list[Tensor | None]:
    x = _input(moe, width)
    with replaced(moe.experts, _expert_stand_in):
        out = call_layer(moe.layer, x, _doubled(call), in_tuple=moe.in_tuple)
    grads = torch.autograd.grad(
        out, [x, *params.values()], grad_outputs=_upstream(out), allow_unused=True
    )
    _attend_another(moe, call, width)
    return [out.detach(), *grads]


def _pieces(moe: MoeLayer, call: LayerCall, width: int, params: Params) -> list[Tensor | None]:
    tape, seen = Tape(_Plain()), []
    start = Value(_input(moe, width))

    def attend(hidden: Tensor) -> tuple[Tensor, ...]:
        caught = moe.catch(hidden, _doubled(call))
        seen.append(caught)
        return caught.residual, caught.inside, caught.hidden_TD, caught.weights_TK

    def experts(hidden_TD: Tensor, weights_TK: Tensor) -> tuple[Tensor, ...]:
        return (_expert_stand_in(hidden_TD, seen[0].index_TK, weights_TK),)

    residual, inside, hidden_TD, weights_TK = tape.compute(attend, start)
    (out_TD,) = tape.compute(experts, hidden_TD, weights_TK)
    _attend_another(moe, call, width)
    merge = partial(_merged, moe, seen)
    (end,) = tape.compute(merge, residual, inside, out_TD)
    end.slot.add(_upstream(end.data))
    drain(tape.backward())
    return [end.data, start.slot.take(), *(param.grad for param in params.values())]


def _merged(
    moe: MoeLayer, seen: Sequence[Caught], residual: Tensor, inside: Tensor, out_TD: Tensor
) -> tuple[Tensor, ...]:
    _seed(1)
    return (moe.merge(residual, inside, out_TD, seen[0].routers),)


def _attend_another(moe: MoeLayer, call: LayerCall, width: int) -> None:
    """Nothing that a layer puts down may be taken for the other microbatch's."""
    moe.catch(_input(moe, width, seed=3), _doubled(call))


def _expert_stand_in(hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """A function of all that experts are given."""
    # Pieces draw what the layer draws behind its experts in another one, which begins alike.
    _seed(1)
    scale_T1 = (weights_TK.to(hidden_TD.dtype) * (1 + index_TK)).sum(1, keepdim=True)
    return scale_T1 * hidden_TD.flip(-1)


def _seed(seed: int) -> None:
    """Seed the generators that are put back; `torch.manual_seed` reaches GPUs not yet in use."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def _left_behind(moe: MoeLayer) -> dict[str, Tensor | None]:
    """Buffers and numbers that the layer holds, by name.

    Raises:
        LookupError: It holds a tensor with history, which no graph of one piece can serve.
    """
    left: dict[str, Tensor | None] = {}
    for name, module in _outside(moe):
        prefix = f"{name}." if name else ""
        for key, buffer in module._buffers.items():
            left[f"the buffer {prefix}{key}"] = None if buffer is None else buffer.clone()
        for key, value in plain_attributes(module).items():
            if isinstance(value, (int, float)):
                left[f"the attribute {prefix}{key}"] = torch.tensor(value, dtype=torch.float64)
        for key, value in vars(module).items():
            if any(isinstance(x, Tensor) and x.grad_fn is not None for x in tree_leaves(value)):
                raise LookupError(f"the layer keeps a tensor with history as {prefix}{key}")
    return left


def _outside(moe: MoeLayer) -> list[tuple[str, nn.Module]]:
    """The layer's modules by name, the experts' left out."""
    experts = {id(module) for module in moe.experts.modules()}
    return [(n, m) for n, m in moe.layer.named_modules() if id(m) not in experts]


@contextmanager
def _as_it_was(moe: MoeLayer) -> Iterator[None]:
    """In training, with fp64 buffers and without hooks inside; everything back afterwards."""
    modules = list(moe.layer.modules())
    own = [(m, dict(vars(m)), dict(m._buffers)) for m in modules]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    generator = torch.Generator().manual_seed(4)
    try:
        for module in modules:
            for name in _HOOKS:
                module.__dict__[name] = type(getattr(module, name))()
        for _, module in _outside(moe):
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = _near(buffer, generator)
        moe.layer.train()
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        for module, attributes, buffers in own:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def _drawn_parameters(moe: MoeLayer) -> Iterator[Params]:
    """Put drawn fp64 parameters in place of the layer's, the experts' left out; those by name."""
    own = [(m, dict(m._parameters)) for _, m in _outside(moe)]
    generator = torch.Generator().manual_seed(0)
    twins: dict[int, nn.Parameter] = {}
    params: Params = {}
    try:
        for name, module in _outside(moe):
            for key, param in module._parameters.items():
                if param is not None:
                    if id(param) not in twins:
                        twins[id(param)] = nn.Parameter(_drawn(param, generator))
                    module._parameters[key] = params[f"{name}.{key}"] = twins[id(param)]
        yield params
    finally:
        for module, parameters in own:
            module._parameters.update(parameters)


def _drawn(param: Tensor, generator: torch.Generator) -> Tensor:
    """Of the size that weights have: matrices keep the size of what they multiply."""
    noise = _noise(param, generator)
    return noise * param.shape[-1] ** -0.5 if param.dim() > 1 else 1 + _NOISE * noise


def _near(buffer: Tensor, generator: torch.Generator) -> Tensor:
    """A copy with other values where it has fractions: a scale of one would not show."""
    value = torch.zeros_like(buffer, device=_device(buffer)) if buffer.is_meta else buffer.clone()
    if not buffer.is_floating_point():
        return value
    return value.double() + _NOISE * _noise(buffer, generator)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(_device(like))


def _device(x: Tensor) -> torch.device:
    return torch.device("cpu") if x.is_meta else x.device


def _doubled(call: LayerCall) -> LayerCall:
    def double(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    rest, named, by_position = call
    return tree_map(double, rest), tree_map(double, dict(named)), by_position


def _input(moe: MoeLayer, width: int, *, seed: int = 1) -> Tensor:
    own = (param for _, m in _outside(moe) for param in m._parameters.values())
    device = next((param.device for param in own if param is not None), None)
    generator = torch.Generator().manual_seed(seed)
    shape = (1, _TOKENS, width)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.to(device).requires_grad_()


def _upstream(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(out.shape, generator=generator, dtype=out.dtype, device="cpu")
    return drawn.to(out.device)


def _difference(one: Tensor | None, two: Tensor | None) -> float:
    """Largest difference over the largest element; no gradient counts as zero."""
    if one is None or two is None:
        other = one if two is None else two
        return 0.0 if other is None or not other.any() else 1.0
    if one.shape != two.shape:
        return float("inf")
    if torch.equal(one, two):
        return 0.0
    one, two = one.double(), two.double()
    scale, off = float(one.abs().max()), float((one - two).abs().max())
    return off / scale if scale else off
