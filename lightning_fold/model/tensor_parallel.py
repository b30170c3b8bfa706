"""Tensor and sequence parallelism of all that is not an expert, by wrapping the user's modules.

Where a sequence of S tokens is, for tp = 2:

    embed_tokens     all S on both ranks    vocabulary sharded, partial embeddings summed
    layer 0 entry    S/2 each               a rank owns its tokens: norms, router, experts
    self_attn        gathered to S          q, k, v by heads; o_proj sums and scatters to S/2
    dense mlp        gathered to S          gate, up by columns; down sums and scatters
    norm exit        gathered to S          plain and full wherever a user may read it
    lm_head          all S                  vocabulary sharded, logits gathered

A sharded weight is a DTensor as storage and a local tensor in the math. A weight that tp does not
shard stays plain: it sees part of the tokens, as under data parallelism, and `params.shard` sums
its gradient over tp too. Sequences that tp does not divide are split unevenly, so no made-up
token reaches a router.
"""

# Shapes.  B sequences   S tokens of a sequence   s tokens of it on this rank   D model width   V
# vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_fold.model.linear import apply_linear
from lightning_fold.model.structure import SLICED_OUTPUTS, DecoderParts
from lightning_fold.model.swap import shard_parameter
from lightning_fold.model.token_rng import has_randomness, per_rank_rng
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.params import local_tensor
from lightning_fold.topology.comm import (
    Comm,
    gather_replicated,
    gather_rows,
    reduce_scatter_rows,
    split_rows,
    sum_gradient_over,
    sum_over,
)
from lightning_fold.topology.sequence import balanced_sizes

COLUMN, ROW = Shard(0), Shard(1)
RowFunction = Callable[[Tensor, Comm, list[int], str], Tensor]


@dataclass
class SequenceSplit:
    """How the sequence of the running forward is split over tp.

    Each layer's attention writes the length, from its position embeddings; the same layer's MLP
    and the final norm read it. A recomputed layer writes again before it reads, so a recompute
    sees its own forward's length.
    """

    length: int
    parts: int

    @property
    def sizes(self) -> list[int]:
        """Tokens of each tp rank: balanced, the first ranks take the remainder."""
        return balanced_sizes(self.length, self.parts)


class TensorParallel:
    """Applies the plan to one decoder; every rank of tp calls it with equal weights."""

    def __init__(self, comm: Comm, tokens: RunningTokens) -> None:
        self.comm = comm
        self.tokens = tokens
        self.split = SequenceSplit(0, comm.size("tp"))
        # One DTensor a parameter, so that tied weights stay tied.
        self.sharded: dict[nn.Parameter, nn.Parameter] = {}

    def apply(self, parts: DecoderParts) -> None:
        """Shard weights in place and wrap forwards; `structure.check_decoder` has passed."""
        randomness = has_randomness(parts.base)
        for layer in parts.layers:
            self._attention(layer.self_attn)
            if layer.dense_mlp is not None:
                self._dense_mlp(layer.dense_mlp)
            if randomness:
                layer.module.forward = per_rank_rng(layer.module, self.comm.rank("tp"))
        if parts.embed_tokens is not None:
            self._embedding(parts.embed_tokens)
        if parts.lm_head is not None:
            self._head(parts.lm_head)
        parts.core.register_forward_pre_hook(_refuse_sliced_outputs, with_kwargs=True)
        if parts.starts:
            first = parts.layers[0].module
            first.register_forward_pre_hook(self._enter_layers, with_kwargs=True)
        if parts.norm is not None:
            parts.norm.register_forward_hook(self._leave_layers)

    # The borders of the region in which a rank owns its tokens.

    def _enter_layers(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.split.length = hidden.shape[1]
        hidden = self._along(1, split_rows, hidden, self.split.sizes)
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    def _leave_layers(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if self.tokens.attention is not None:
            # No layer has written it where a pipeline stage has none.
            self.split.length = self.tokens.attention.places_s.shape[0]
        return self._along(1, gather_replicated, out, self.split.sizes)

    def _along(self, dim: int, function: RowFunction, x: Tensor, sizes: list[int]) -> Tensor:
        moved = function(x.movedim(dim, 0).contiguous(), self.comm, sizes, "tp")
        # Contiguous again: model code may `view` what it gets. Nothing is copied for a batch of
        # one.
        return moved.movedim(0, dim).contiguous()

    # Layers.

    def _attention(self, attention: Any) -> None:
        tp, rank = self.comm.size("tp"), self.comm.rank("tp")
        heads = attention.q_proj.out_features // attention.head_dim
        kv_heads = attention.k_proj.out_features // attention.head_dim
        self._column(attention.q_proj)
        if kv_heads >= tp:
            self._column(attention.k_proj)
            self._column(attention.v_proj)
        else:
            # Whole weights, of which a rank uses its head's rows; the sum over tp completes the
            # gradient.
            head = rank * kv_heads // tp
            rows = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
            _use_rows(attention.k_proj, rows)
            _use_rows(attention.v_proj, rows)
            attention.num_key_value_groups = heads // tp
        self._row(attention.o_proj)
        attention.register_forward_pre_hook(self._gather_for_attention, with_kwargs=True)

    def _gather_for_attention(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        cos, _ = kwargs["position_embeddings"]
        self.split.length = cos.shape[-2]
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden = self._along(1, gather_rows, hidden, self.split.sizes)
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    def _dense_mlp(self, mlp: Any) -> None:
        self._column(mlp.gate_proj)
        self._column(mlp.up_proj)
        self._row(mlp.down_proj)
        mlp.register_forward_pre_hook(
            lambda module, args: (self._along(1, gather_rows, args[0], self.split.sizes), *args[1:])
        )

    def _column(self, linear: Any) -> None:
        """Output features sharded, the bias with them."""
        self._shard(linear, weight=COLUMN, bias=COLUMN)
        linear.forward = lambda x: apply_linear(
            x, local_tensor(linear.weight), local_or_none(linear.bias)
        )

    def _row(self, linear: Any) -> None:
        """Input features sharded; partial sums scatter along the sequence, the bias comes after."""
        self._shard(linear, weight=ROW, bias=None)

        def forward(x: Tensor) -> Tensor:
            partial = apply_linear(x, local_tensor(linear.weight))
            sizes = SequenceSplit(x.shape[1], self.split.parts).sizes
            out = self._along(1, reduce_scatter_rows, partial, sizes)
            return out if linear.bias is None else out + linear.bias.to(out.dtype)

        linear.forward = forward

    # Embedding and head.

    def _embedding(self, embedding: Any) -> None:
        self._shard(embedding, weight=COLUMN, bias=None)
        sizes = vocabulary_sizes(embedding.num_embeddings, self.comm.size("tp"))
        start, mine = sum(sizes[: self.comm.rank("tp")]), sizes[self.comm.rank("tp")]
        padding = embedding.padding_idx
        padding = padding - start if padding is not None and 0 <= padding - start < mine else None

        def forward(ids: Tensor) -> Tensor:
            owned = (ids >= start) & (ids < start + mine)
            weight = local_tensor(embedding.weight)
            rows = _embed((ids - start).where(owned, 0), weight, padding)
            return sum_over(rows * owned.unsqueeze(-1).to(rows.dtype), self.comm, "tp")

        embedding.forward = forward

    def _head(self, head: Any) -> None:
        self._shard(head, weight=COLUMN, bias=COLUMN)
        sizes = vocabulary_sizes(head.out_features, self.comm.size("tp"))

        def forward(hidden: Tensor) -> Tensor:
            hidden = sum_gradient_over(hidden, self.comm, "tp")
            logits = apply_linear(hidden, local_tensor(head.weight), local_or_none(head.bias))
            return self._along(-1, gather_replicated, logits, sizes)

        head.forward = forward

    def _shard(self, module: nn.Module, *, weight: Shard, bias: Shard | None) -> None:
        for name, placement in (("weight", weight), ("bias", bias)):
            param = module._parameters.get(name)
            if param is None or placement is None or isinstance(param, DTensor):
                continue
            if param not in self.sharded:
                mesh = self.comm.meshes.mesh("tp")
                self.sharded[param] = shard_parameter(param, mesh, [placement])
            setattr(module, name, self.sharded[param])


def _refuse_sliced_outputs(module: nn.Module, args: Any, kwargs: Any) -> None:
    for name in SLICED_OUTPUTS:
        if kwargs.get(name):
            raise ValueError(
                f"{name}=True cannot be served under tensor_parallel_size > 1: layers see a slice "
                f"of every sequence, and so would the output. Call the model without it."
            )


def vocabulary_sizes(vocabulary: int, parts: int) -> list[int]:
    """Rows of each shard as torch.chunk and DTensor cut them; later ones may be empty."""
    size = -(-vocabulary // parts)
    return [max(0, min(size, vocabulary - i * size)) for i in range(parts)]


def local_or_none(param: Any) -> Tensor | None:
    """This rank's shard of an optional parameter."""
    return None if param is None else local_tensor(param)


def _use_rows(linear: Any, rows: slice) -> None:
    def forward(x: Tensor) -> Tensor:
        bias = None if linear.bias is None else linear.bias[rows]
        return apply_linear(x, linear.weight[rows], bias)

    linear.forward = forward


def _embed(ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
    if weight.shape[0] == 0:
        # An empty shard still takes part in the graph, so that its gradient exists.
        return weight.sum() + weight.new_zeros(*ids.shape, weight.shape[1])
    return F.embedding(ids, weight, padding)
