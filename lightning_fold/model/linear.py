"""The linear layers of a model, whose weight gradients a store may put off.

Without an active store (`fold_kernels.weight_store`) they are `torch.nn.functional.linear`. With
one, backward gives the gradients of input and bias and leaves the weight's, of the same operands in
the same order: the same bits later. The input and the gradient of the output are kept until then.
"""

# Shapes.  I input width   O output width

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fold_kernels.weight_store import Delay, delay
from lightning_fold.model.structure import is_plain
from lightning_fold.moe.layer import compute_dtype


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, [..., I] to [..., O]; leaves the gradient of `weight` in the active store.

    Args:
        x: Any number of leading dimensions.
        weight: A parameter, or what was made of one, such as its local shard or some of its rows.
        bias: Its gradient always comes at once.
    """
    put_off = delay(weight)
    if put_off is None:
        return F.linear(x, weight, bias)
    # Cast out here, where autograd casts the gradient back; autocast casts the weight inside.
    x = x.to(compute_dtype(x))
    out: Tensor = _Linear.apply(x, weight.detach(), bias, put_off.anchor(), put_off)
    return out


def defer_linears(core: nn.Module) -> None:
    """Make every `nn.Linear` of a model ask for the active store.

    A linear of a class with an own forward stays as it is, and so does one whose forward tensor
    parallelism has replaced: that one asks already. To be called before FSDP2 takes a linear layer
    as a unit, and once or more.
    """
    for module in core.modules():
        if is_plain(module, nn.Linear) and "forward" not in module.__dict__:
            # A partial: a copy of the model then gets a forward of the copied module.
            module.forward = partial(_forward, module)


def _forward(module: Any, input: Tensor) -> Tensor:
    return apply_linear(input, module.weight, module.bias)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, put_off: Delay
    ) -> Tensor:
        # The weight as it is stored: a narrow copy of it would live from forward to backward.
        ctx.save_for_backward(x, weight)
        ctx.put_off = put_off
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_input, _, needs_bias, _, _ = ctx.needs_input_grad
        ctx.put_off.leave(lambda: (_rows(grad).t() @ _rows(x),))
        with torch.autocast(grad.device.type, enabled=False):
            grad_x = (_rows(grad) @ weight.to(grad.dtype)).view(x.shape) if needs_input else None
            grad_bias = _rows(grad).sum(0) if needs_bias else None
        return grad_x, None, grad_bias, None, None


def _rows(x: Tensor) -> Tensor:
    # No `view(-1, ...)`: a shard of a small vocabulary may have no rows, hence O = 0.
    return x.flatten(0, -2) if x.dim() > 1 else x[None]
