"""Training runs that must equal plain Lightning: one table of options, one scenario."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from contract.models import Lit, batches, mixtral, sgd
from contract.worker import Context, woven_stages


def adamw(module: Lit, **options: Any) -> Any:
    params = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr=1e-2, **options)


def grouped(module: Lit) -> Any:
    """Weight decay by name: on projections and experts only."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, param in module.named_parameters():
        groups["proj" in name].append(param)
    return torch.optim.SGD(
        [
            {"params": groups[True], "weight_decay": 0.5},
            {"params": groups[False], "weight_decay": 0.0, "lr": 0.1},
        ],
        lr=0.3,
        momentum=0.9,
    )


def experts_and_rest(module: Lit) -> Any:
    experts = [p for n, p in module.named_parameters() if ".experts." in n]
    rest = [p for n, p in module.named_parameters() if ".experts." not in n]
    return [torch.optim.SGD(experts, lr=0.5), torch.optim.AdamW(rest, lr=1e-2)]


def freeze(part: str) -> Callable[[Lit], None]:
    def prepare(module: Lit) -> None:
        for name, param in module.named_parameters():
            if part in name:
                param.requires_grad_(False)

    return prepare


def checkpointed(module: Lit) -> None:
    module.model.gradient_checkpointing_enable({"use_reentrant": False})


class Manual(Lit):
    """Manual optimization with accumulation by hand and clipping by Lightning."""

    automatic_optimization = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in optimizers:
            self.clip_gradients(optimizer, gradient_clip_val=0.2)
            optimizer.step()
        self.losses.append(loss.detach())


class Toggling(Manual):
    """Two optimizers in turns, the parameters of the other one without gradients."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.detach())


class Stale(Lit):
    """Builds its optimizer before the strategy replaces parameters, as LightningCLI does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.built = grouped(self)

    def configure_optimizers(self) -> Any:
        return self.built


class Late(Lit):
    """Builds its model in configure_model."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = mixtral()


class Headed(Lit):
    """A trained module beside the core."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(9)
        self.head = nn.Linear(37, 3).double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        chunks = batch["input_ids"].chunk(self.parts)
        losses = [self.head(self.model(input_ids=ids).logits).square().mean() for ids in chunks]
        return torch.stack(losses).mean()


class Unfreezing(Lit):
    """Trains the router from the second step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, param in self.named_parameters():
            if ".gate." in name:
                param.requires_grad_(batch_idx > 0)


@dataclass
class Option:
    """One line of the table."""

    model: dict[str, Any] = field(default_factory=dict)
    lit: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    kind: type[Lit] = Lit
    prepare: Callable[[Lit], None] = lambda module: None


OPTIONS = {
    "sgd": Option(),
    "validated": Option(
        trainer={"num_sanity_val_steps": 2, "limit_val_batches": 2, "val_check_interval": 1}
    ),
    "accumulated": Option(trainer={"accumulate_grad_batches": 2}),
    # A validation between two accumulating batches must not lose their gradients.
    "interrupted": Option(
        trainer={"accumulate_grad_batches": 3, "val_check_interval": 1, "limit_val_batches": 1}
    ),
    "clipped": Option(trainer={"gradient_clip_val": 0.1}),
    "clipped_value": Option(
        trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    ),
    "clipped_accumulated": Option(trainer={"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "adamw": Option(lit={"optimizers": adamw}),
    "adamw_fused": Option(lit={"optimizers": lambda module: adamw(module, fused=True)}),
    "adamw_foreach": Option(lit={"optimizers": lambda module: adamw(module, foreach=True)}),
    "grouped": Option(lit={"optimizers": grouped}),
    "padded": Option(lit={"rows": batches(12, padded=True)}),
    # Fewer rows than microbatches.
    "few": Option(lit={"global_batch": 3}),
    "odd_length": Option(lit={"rows": batches(12, length=5)}),
    "short": Option(lit={"rows": batches(12, length=3)}),
    "tied": Option(model={"tie_word_embeddings": True}),
    "biased": Option(model={"bias": True}),
    "frozen_router": Option(prepare=freeze(".gate.")),
    "frozen_experts": Option(prepare=freeze(".experts.")),
    "frozen_embedding": Option(prepare=freeze("embed_tokens")),
    "unfreezing": Option(kind=Unfreezing),
    "checkpointed": Option(prepare=checkpointed),
    "router_logits": Option(model={"output_router_logits": True}),
    "manual": Option(kind=Manual),
    "two_optimizers": Option(kind=Manual, lit={"optimizers": experts_and_rest}),
    "toggling": Option(kind=Toggling, lit={"optimizers": experts_and_rest}),
    "stale": Option(kind=Stale),
    "late": Option(kind=Late),
    "headed": Option(kind=Headed),
    "narrow": Option(model={"hidden_size": 15}),
    "one_expert_each": Option(model={"num_local_experts": 4, "num_experts_per_tok": 1}),
    "all_experts": Option(model={"num_local_experts": 4, "num_experts_per_tok": 4}),
    "fp32": Option(model={"dtype": torch.float32}),
}


class Norms(pl.Callback):
    """Gradient norms before clipping: the strategy's, or those of plain gradients."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if not hasattr(trainer.strategy, "grad_norm"):
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            self.seen.append(torch.stack([g.norm() for g in grads]).norm())

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        norm = getattr(trainer.strategy, "grad_norm", None)
        if norm is not None:
            self.seen.append(norm)


def fit(context: Context) -> dict[str, Any]:
    """Train three batches; weights before and after, losses, norms."""
    option = OPTIONS[context.option]
    model = None if option.kind is Late else mixtral(**option.model)
    module = option.kind(model, parts=parts_of(context), **option.lit)
    option.prepare(module)
    before = {} if model is None else {n: p.detach().clone() for n, p in module.named_parameters()}
    norms = Norms()
    trainer = context.trainer(callbacks=[norms], **option.trainer)
    trainer.fit(module)
    return {
        "before": before,
        "after": whole(trainer, dict(module.named_parameters())),
        "losses": torch.stack(module.losses),
        "val_loss": trainer.callback_metrics.get("val_loss", torch.tensor(0.0)),
        "norms": torch.stack(norms.seen or [torch.zeros(())]).double(),
        "steps": trainer.global_step,
        "woven": woven_stages(trainer),
    }


def parts_of(context: Context) -> int:
    """Sub-batches of a plain run: the dp ranks of the run it is compared with."""
    return int(context.mapping[5:] or 1) if context.world == 0 else 1


def whole(trainer: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors in the user's shapes, on rank 0."""
    consolidate = getattr(trainer.strategy, "consolidate", None)
    if consolidate is not None:
        return dict(consolidate(named))
    return {name: value.detach().clone() for name, value in named.items()}


__all__ = ["fit", "sgd"]
