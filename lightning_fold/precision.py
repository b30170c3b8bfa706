"""What the strategy changes in Lightning's precision plugins: clipping and the loss scaler.

The plugin stays Lightning's own object; the policy (which dtype computes) is unchanged. Gradients
live on two meshes, so clipping goes through `params.clip`, and a rank that sees an overflow in
its shard must make all ranks skip the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fold.params import clip_by_norm, clip_by_value, local_tensor
from lightning_fold.topology import doctor

SUPPORTED = ("32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed")
_PLUGINS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)


class FoldedGradScaler(torch.amp.GradScaler):
    """Loss scaler whose overflow flag is shared by all ranks: each rank checks only its shards.

    Unscaling is collective over all ranks.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = torch.zeros((), device=inv_scale.device)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = local_tensor(param.grad)
                    found += (~torch.isfinite(grad)).any()
                    grad.mul_(inv_scale.to(grad.dtype))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {found.device: found.clamp(max=1.0)}


def install(
    plugin: Precision,
    *,
    on_norm: Callable[[Tensor], None],
    device: Callable[[], torch.device],
    twins: Callable[[], Collection[int]] = tuple,
) -> None:
    """Route `plugin`'s clipping through `params.clip` and its scaler through `FoldedGradScaler`.

    Args:
        plugin: The Trainer's precision plugin.
        on_norm: Receives every gradient norm before clipping.
        device: Tells where the norm is accumulated; the device is unknown when the Trainer is
            built.
        twins: Tells the ids of parameters that another pipeline stage counts in a norm.
    """
    if type(plugin) not in _PLUGINS or plugin.precision not in SUPPORTED:
        raise ValueError(
            f"precision {plugin.precision!r} ({type(plugin).__name__}) is not supported by "
            f"FoldedMoEStrategy; legal: {', '.join(SUPPORTED)}. Change the Trainer's `precision`."
        )

    def by_norm(optimizer: Optimizer, clip_val: float) -> None:
        params = _params(plugin, optimizer)
        on_norm(clip_by_norm(params, float(clip_val), device=device(), twins=twins()))

    def by_value(optimizer: Optimizer, clip_val: float) -> None:
        clip_by_value(_params(plugin, optimizer), float(clip_val))

    bound: Any = plugin
    bound.clip_grad_by_norm, bound.clip_grad_by_value = by_norm, by_value
    if isinstance(plugin, MixedPrecision) and type(plugin.scaler) is torch.amp.GradScaler:
        plugin.scaler = _folded_scaler(plugin.scaler)


def check_experts(plugin: Precision, expert_precision: str) -> None:
    """Refuse fp8 experts under a plugin that makes the model fp64.

    Raises:
        ValueError: Names both arguments.
    """
    if expert_precision == "fp8_block" and isinstance(plugin, DoublePrecision):
        doctor.refuse_fp8_of(f"Trainer(precision={plugin.precision!r})", "torch.float64")


def step_context(plugin: Precision, step: str) -> AbstractContextManager[Any]:
    """Lightning's context of the forward of a step, by the step's name."""
    names = {"training_step": "train_step", "validation_step": "val_step"}
    context: AbstractContextManager[Any] = getattr(plugin, f"{names.get(step, step)}_context")()
    return context


def scaled(plugin: Precision, loss: Tensor) -> Tensor:
    """A loss as its backward begins with it: times the scale of a loss scaler, if there is one."""
    scaler = getattr(plugin, "scaler", None)
    return loss if scaler is None else scaler.scale(loss)


def _params(plugin: Precision, optimizer: Optimizer) -> list[nn.Parameter]:
    return list(plugin.main_params(optimizer))


def _folded_scaler(scaler: torch.amp.GradScaler) -> FoldedGradScaler:
    return FoldedGradScaler(
        scaler._device,
        init_scale=scaler._init_scale,
        growth_factor=scaler._growth_factor,
        backoff_factor=scaler._backoff_factor,
        growth_interval=scaler._growth_interval,
        enabled=scaler._enabled,
    )
