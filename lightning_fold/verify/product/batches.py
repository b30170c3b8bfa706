"""The batches that a subject is verified on: by step and dp rank, equal in every process.

A language model gets random tokens whose length, padding and ignored labels differ between ranks
and steps. Others say by `example_batch(index)` what they take, or are fed by the recipe's data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fold.model.inspect import find_parts
from lightning_fold.verify import cases
from lightning_fold.verify.product.subject import Built, PlainModule, takes

# Gives what a dp rank sees in a step: (step, dp_rank, dp).
Batches = Callable[[int, int, int], Any]


def batches_of(built: Built, kind: str = "padded") -> Batches:
    """Choose where the batches come from.

    Args:
        built: The model.
        kind: Of the tokens that a language model gets, see `cases.sub_batch`.

    Raises:
        ValueError: Nothing says what the model takes.
    """
    module = built.module
    owner: Any = module.model if isinstance(module, PlainModule) else module
    if hasattr(owner, "example_batch"):
        return lambda step, rank, dp: owner.example_batch(step * dp + rank)
    core = find_parts(module).core
    own = type(module).__module__.startswith("lightning_fold.")
    if takes_tokens(core) and (own or built.data is None):
        return tokens_for(core, kind)
    if built.data is not None:
        return _from_data(built.data())
    raise ValueError(
        f"nothing says what {type(owner).__name__} takes: its forward has no `input_ids` and "
        "`labels`. Give the class a method `example_batch(index)`, or the recipe a `data`."
    )


def takes_tokens(core: nn.Module) -> bool:
    """Whether a model is called as language models are, and has an embedding."""
    known = all(takes(core.forward, name) for name in ("input_ids", "labels"))
    return known and any(isinstance(m, nn.Embedding) for m in core.modules())


def tokens_for(core: nn.Module, kind: str = "padded") -> Batches:
    """Random tokens of the model's vocabulary, with padding if the model takes a mask.

    The model is looked at once: a stage of it may have no embedding.
    """
    size = min(m.num_embeddings for m in core.modules() if isinstance(m, nn.Embedding))
    names = ("input_ids", "attention_mask", "position_ids", "labels")
    taken = {name for name in names if takes(core.forward, name)}

    def batch(step: int, dp_rank: int, dp: int) -> dict[str, Tensor]:
        tokens = cases.sub_batch(step, dp_rank, kind)
        tokens["input_ids"] %= size
        ignored = tokens["labels"] == -100
        tokens["labels"] = tokens["labels"].where(ignored, tokens["labels"] % size)
        return {name: value for name, value in tokens.items() if name in taken}

    return batch


def in_fp64(batch: Any) -> Any:
    """A batch with its floating-point tensors in fp64, as Lightning's 64-true hands it over."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: in_fp64(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(in_fp64(value) for value in batch)
    return batch


def _from_data(data: Any) -> Batches:
    data.prepare_data()
    data.setup("fit")

    def batch(step: int, dp_rank: int, dp: int) -> Any:
        # Seeded: a loader that shuffles gives every process the same order.
        torch.manual_seed(0)
        loader = data.train_dataloader()
        return next(islice(cycle(loader), step * dp + dp_rank, None))

    return batch
