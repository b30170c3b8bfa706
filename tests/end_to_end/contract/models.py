"""The ordinary Lightning project that every scenario trains: a tiny Mixtral, a module, batches.

Nothing in it knows about parallelism, but that its loader asks the strategy for its share of a
global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, SEQUENCE = 37, 8

Optimizers = Callable[["Lit"], Any]


def mixtral(
    *,
    seed: int | None = 5,
    dtype: torch.dtype = torch.float64,
    bias: bool = False,
    **overrides: Any,
) -> Any:
    """A two-layer Mixtral, whose norms, router and loss compute in fp32 whatever the dtype."""
    if seed is not None:
        torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "use_cache": False,
        "pad_token_id": 0,
    }
    config = transformers.MixtralConfig(**{**options, **overrides})
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    if bias:
        _add_biases(model)
    return model.to(dtype).train()


def _add_biases(model: Any) -> None:
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            linear.bias = nn.Parameter(torch.randn(linear.out_features) * 0.1)


def batches(
    rows: int, *, length: int = SEQUENCE, padded: bool = False, seed: int = 3
) -> list[dict[str, Tensor]]:
    """Single rows of a batch; padded ones have unequal padding and further -100 labels."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for row in range(rows):
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        sample = {"input_ids": ids, "labels": ids.clone()}
        if padded:
            pad = row % 4
            mask = torch.ones(length, dtype=torch.int64)
            if pad:
                mask[-pad:] = 0
            sample["attention_mask"] = mask
            sample["labels"] = ids.masked_fill(mask == 0, -100)
            sample["labels"][1 + row % 3] = -100
        out.append(sample)
    return out


def sgd(module: Lit) -> Any:
    """Plain SGD: shows every factor of a gradient."""
    return torch.optim.SGD((p for p in module.parameters() if p.requires_grad), lr=0.3)


class Lit(pl.LightningModule):
    """A causal language model, trained on the mean loss of each dp rank's rows.

    Args:
        model: The core.
        optimizers: Builds what configure_optimizers returns.
        rows: The training and validation samples.
        global_batch: Rows of all dp ranks of one step.
        parts: Sub-batches whose mean losses are averaged: what dp ranks would each have had.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        optimizers: Optimizers = sgd,
        rows: Iterable[dict[str, Tensor]] = (),
        global_batch: int = 4,
        parts: int = 1,
    ) -> None:
        super().__init__()
        self.model = model
        self.build_optimizers = optimizers
        self.rows = list(rows) or batches(12)
        self.global_batch = global_batch
        self.parts = parts
        self.losses: list[Tensor] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        parts = zip(*(value.chunk(self.parts) for value in batch.values()), strict=True)
        losses = [self.model(**dict(zip(batch, part, strict=True))).loss for part in parts]
        return torch.stack(losses).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Not in the step, which a pipeline runs in pieces and on its last stage only.
        if self.automatic_optimization:
            self.losses.append(outputs["loss"].detach())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"]).logits.argmax(-1)

    def configure_optimizers(self) -> Any:
        return self.build_optimizers(self)

    def loader(self) -> DataLoader[dict[str, Tensor]]:
        """Contiguous share of each global batch: `parts` of a whole batch are the shares."""
        share = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        dp, rank = (share["num_replicas"], share["rank"]) if share else (1, 0)
        size = self.global_batch // dp
        indices = [
            start + rank * size + i
            for start in range(0, len(self.rows), self.global_batch)
            for i in range(size)
        ]
        return DataLoader([self.rows[i] for i in indices], batch_size=size)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = test_dataloader = loader
