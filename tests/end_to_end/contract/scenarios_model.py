"""What the model computes: outputs, masks, precisions, events, experts that cannot be folded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from contract.models import Lit, batches, mixtral
from contract.scenarios_parity import adamw, checkpointed, parts_of, whole
from contract.worker import Context, woven_stages
from lightning_fold.precision import FoldedGradScaler
from lightning_fold.telemetry import CollectiveBytes, RoutingCounts


class Reading(Lit):
    """Reads the outputs as a user's step may."""

    outputs: dict[str, Tensor]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        ids = batch["input_ids"]
        self.outputs = {
            "logits": self.model(input_ids=ids).logits,
            "last_hidden_state": self.model(input_ids=ids, output_hidden_states=False).logits,
            "last_logits": self.model(input_ids=ids, logits_to_keep=1).logits,
        }


def outputs(context: Context) -> dict[str, Any]:
    hidden: list[Tensor] = []
    module = Reading(mixtral(), rows=batches(4, length=int(context.option)))
    module.model.model.register_forward_hook(
        lambda core, args, out: hidden.append(out.last_hidden_state)
    )
    context.trainer(limit_val_batches=1).validate(module, verbose=False)
    plain = all(type(t) is Tensor for t in module.outputs.values())
    return {**module.outputs, "last_hidden_state": hidden[0], "plain": plain}


class Dropping(Lit):
    """Dropout on logits, which all tp peers hold, beside the model's own inside the layers."""

    masks: tuple[Tensor, ...] = ()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        outside = nn.functional.dropout(torch.ones_like(logits), 0.5)
        self.masks = (*self.masks, outside.detach())
        return (logits * outside).square().mean()


class DroppingLayerNorm(nn.Module):
    """A norm followed by dropout, which remembers its masks: dropout inside a layer."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.norm_forward = type(norm).forward
        self.variance_epsilon = norm.variance_epsilon
        self.p = 0.5
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm_forward(self, x)
        mask = nn.functional.dropout(torch.ones_like(out), self.p)
        self.masks.append(mask.detach())
        return out * mask


def dropout(context: Context) -> dict[str, Any]:
    """Masks outside and inside the layers; the option turns recompute on."""
    model = mixtral(attention_dropout=0.5)
    layer = model.model.layers[0]
    layer.input_layernorm = DroppingLayerNorm(layer.input_layernorm)
    module = Dropping(model)
    if context.option == "recomputed":
        checkpointed(module)
    trainer = context.trainer(max_steps=1)
    trainer.fit(module)
    return {
        "outside": torch.cat(module.masks) if module.masks else torch.empty(0),
        "next": torch.rand(()),
        "inside": list(layer.input_layernorm.masks),
        "after": whole(trainer, dict(module.named_parameters())),
    }


def precision(context: Context) -> dict[str, Any]:
    """Train ten epochs in the precision of the option; dtypes of parameters and moments."""
    plugins, precision = [], context.option
    if precision.startswith("16-mixed"):
        kind = torch.amp.GradScaler if precision.endswith("torch") else FoldedGradScaler
        scaler = kind("cpu", init_scale=64.0)
        plugins, precision = [MixedPrecision("16-mixed", device="cpu", scaler=scaler)], None
    rows = batches(4)
    module = Lit(mixtral(dtype=torch.float32), optimizers=adamw, rows=rows)
    trainer = context.trainer(max_epochs=10, precision=precision, plugins=plugins)
    trainer.fit(module)
    (optimizer,) = trainer.optimizers
    moments = {str(s["exp_avg"].dtype) for s in optimizer.state.values()}
    return {
        "losses": torch.stack(module.losses).float(),
        "parameters": sorted({str(p.dtype) for p in module.parameters()}),
        "moments": sorted(moments),
        "woven": woven_stages(trainer),
    }


class Overflowing(Lit):
    """One rank's gradient overflows in the second step."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1 and self.global_rank == self.trainer.world_size - 1:
            grad = self.model.model.layers[1].mlp.experts.down_proj.grad
            getattr(grad, "_local_tensor", grad).view(-1)[0] = float("inf")


def overflow(context: Context) -> dict[str, Any]:
    """Whether every rank skips the step in which one overflows, and halves the scale."""
    scaler = FoldedGradScaler("cpu", init_scale=64.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    module = Overflowing(mixtral(dtype=torch.float32), rows=batches(8))
    trainer = context.trainer(plugins=[plugin])
    weights: list[dict[str, Tensor]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            weights.append({n: local(p).detach().clone() for n, p in module.named_parameters()})

    trainer.callbacks.append(Watch())  # type: ignore[attr-defined]
    trainer.fit(module)
    same = [all(torch.equal(a[n], b[n]) for n in a) for a, b in pairwise(weights)]
    return {"skipped": same, "scale": float(scaler.get_scale()), "steps": trainer.global_step}


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def events(context: Context) -> dict[str, Any]:
    """Collectives, host synchronisations and routing events of one forward and of one step."""
    module = Lit(mixtral(), rows=batches(4))
    if context.option == "recomputed":
        checkpointed(module)
    trainer = context.trainer(limit_val_batches=1, max_steps=1)
    sent: list[tuple[str, str]] = []
    routed: list[tuple[str, bool, int]] = []
    strategy = trainer.strategy
    strategy.telemetry.subscribe(CollectiveBytes, lambda e: sent.append((e.axis, e.operation)))
    strategy.telemetry.subscribe(
        RoutingCounts, lambda e: routed.append((e.layer, e.training, int(e.counts_E.sum())))
    )
    trainer.validate(module, verbose=False)
    forward = [f"{axis} {operation}" for axis, operation in sent]
    syncs, evaluated = strategy.comm.host_syncs, list(routed)
    trainer.limit_val_batches = 0
    sent.clear(), routed.clear()
    trainer.fit(module)
    return {"forward": forward, "syncs": syncs, "evaluated": evaluated, "trained": list(routed)}


class ListExperts(nn.ModuleList):
    """Experts as a list of modules, behind the same contract."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for i, expert in enumerate(self):
            weight = (weights * (index == i)).sum(-1, keepdim=True).to(hidden.dtype)
            out = out + expert(hidden) * weight
        return out


def listed(seed: int = 5) -> Any:
    model = mixtral(seed=seed)
    torch.manual_seed(seed)
    for layer in model.model.layers:
        layer.mlp.experts = ListExperts().double()
    return model


def unsupported(context: Context) -> dict[str, Any]:
    """Containers that cannot be folded train as plain data parallelism."""
    module = Lit(build_unsupported(context.option), parts=parts_of(context))
    trainer = context.trainer()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer.fit(module)
    return {"before": before, "after": whole(trainer, dict(module.named_parameters()))}


def build_unsupported(kind: str) -> Any:
    if kind == "list":
        return listed()
    import transformers

    torch.manual_seed(5)
    config = transformers.GptOssConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        use_cache=False,
        max_position_embeddings=64,
        layer_types=["full_attention", "full_attention"],
        rope_scaling=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config._experts_implementation = "eager"
    config._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config).double()
