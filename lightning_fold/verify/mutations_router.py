"""Faults of balancing the experts, as patches for `mutations`."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from torch import Tensor

from lightning_fold.moe import balance


def aux_of_own_tokens() -> contextlib.AbstractContextManager[Any]:
    """Counts and scores are not summed over tp: each rank balances its part of the sequences."""
    return mock.patch.object(balance, "PEERS", ("cp",))


def global_batch_own_gradient() -> contextlib.AbstractContextManager[Any]:
    """The sum over dp without its transposed sum, as in NVIDIA/Megatron-LM#3672."""
    return mock.patch.object(balance, "sum_gradient_over", lambda x, comm, axis: x)


def bias_of_own_tokens() -> contextlib.AbstractContextManager[Any]:
    """Each rank moves its bias by the tokens that it has seen."""

    def own(counts: Tensor, comm: Any) -> Tensor:
        return counts

    return mock.patch.object(balance, "sum_over_ranks", own)


def padding_counted() -> contextlib.AbstractContextManager[Any]:
    """Padding takes part in counts, scores and logits."""
    return mock.patch.object(balance.Routed, "padding_T", return_value=None)
