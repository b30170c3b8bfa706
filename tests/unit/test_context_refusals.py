"""What a part of a sequence cannot give is refused before any rank waits for another."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from lightning_fold.model.context.parallel import ContextParallel
from lightning_fold.model.decoder import Decoder, DecoderConfig
from lightning_fold.moe.tokens import RunningTokens, TokenLayout

# Shapes.  B = 2 sequences   S = 12 tokens   s = 6 of them on this rank
IDS = torch.ones(2, 12, dtype=torch.long)


class FirstOfTwo:
    """All that the borders of the core ask of a Comm before they send anything."""

    def size(self, axis: str) -> int:
        return 2

    def rank(self, axis: str) -> int:
        return 0


def borders() -> ContextParallel:
    comm: Any = FirstOfTwo()
    tokens = RunningTokens()
    tokens.attention = TokenLayout(2, 12, torch.tensor([0, 1, 2, 9, 10, 11]))
    return ContextParallel(comm, tokens, "all_gather")


def mixtral(kind: str) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=29,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        num_labels=6,
    )
    return getattr(transformers, f"MixtralFor{kind}")(config)


class OwnMean(nn.Module):
    """Computes a mean of its own, and swallows what it is told."""

    def forward(self, input_ids: Tensor, labels: Tensor, **more: Any) -> Tensor:
        return (input_ids == labels).double().mean()


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: mixtral("TokenClassification"), "its loss_function is ForTokenClassification"),
        (OwnMean, "its forward has neither"),
    ],
)
def test_labels_of_a_loss_that_is_not_over_next_tokens_are_refused(build: Any, told: str) -> None:
    kwargs = {"input_ids": IDS, "labels": IDS}
    with pytest.raises(ValueError, match=rf"(?s){told}.*Call it without `labels`"):
        borders()._enter(build(), (), kwargs)


@pytest.mark.parametrize(
    "build", [lambda: mixtral("CausalLM"), lambda: Decoder(DecoderConfig(num_hidden_layers=1))]
)
def test_labels_of_next_token_losses_are_shifted_and_split(build: Any) -> None:
    ids = torch.arange(24).view(2, 12)
    _, split = borders()._enter(build(), (), {"input_ids": ids, "labels": ids})
    assert split["shift_labels"][0].tolist() == [1, 2, 3, 10, 11, -100]
    assert split["input_ids"][0].tolist() == [0, 1, 2, 9, 10, 11]
    assert int(split["num_items_in_batch"]) == 22


@pytest.mark.parametrize("shape", [(2, 6), (2, 12, 5), (3, 6, 5)])
def test_logits_that_are_not_along_this_rank_s_tokens_are_refused(shape: Any) -> None:
    # With six classes the second dimension of pooled logits is the rank's number of tokens.
    out = SequenceClassifierOutputWithPast(logits=torch.zeros(shape))
    with pytest.raises(ValueError, match="not one row for each of this rank's tokens"):
        borders()._leave(mixtral("SequenceClassification"), (), {}, out)
