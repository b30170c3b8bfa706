"""The built-in Mixture-of-Experts decoder: plain torch, one process.

Owns the model that the demo trains and that the equivalence suite takes as its reference, so it
imports `fold_kernels`, its config and nothing else of ours. Invariant: module names and call
conventions are those of Hugging Face decoders (Mixtral, Qwen3-MoE), so whatever works on one works
on the other.
Not here: anything parallel, generation caches, auxiliary losses.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fold_kernels.ops.router import route
from fold_kernels.router import RouterSpec, router_logits

from .decoder_config import ROUTER_DTYPES, DecoderConfig

__all__ = ["Decoder", "DecoderConfig", "DecoderModel", "DecoderOutput"]

# Shapes.  B batch  S sequence  H heads  V vocabulary
#          T tokens = B*S    K top-k    N = T*K routed rows
#          E experts         D model width    F expert width

Angles = tuple[Tensor, Tensor]


class DecoderOutput(NamedTuple):
    """Loss and logits; a named tuple, so that hooks that walk outputs find the tensors.

    `aux_loss` is what a strategy adds to the loss to balance the experts; None by itself.
    """

    loss: Tensor | None
    logits: Tensor
    aux_loss: Tensor | None = None


class Decoder(nn.Module):
    """A causal language model with Mixture-of-Experts layers.

    Initial weights depend on the torch seed alone.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.apply(self.init_weights)

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        """Draw the weights that `module` answers for; `apply` reaches all. Norms 1, biases 0."""
        config = self.config
        output_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
        for name, parameter in _answers_for(module):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                is_output = "o_proj" in name or "down_proj" in name
                parameter.normal_(std=output_std if is_output else config.initializer_range)
        if isinstance(module, TopKRouter) and module.e_score_correction_bias is not None:
            module.e_score_correction_bias.zero_()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> DecoderOutput:
        """Return logits [B, S, V] and, with labels, the mean next-token loss.

        The mask is 0 at padding, on either side. Without a mask, positions that do not follow one
        another begin a document of a packed sequence. Labels are not shifted; -100 is ignored.
        `logits_to_keep` keeps the logits of that many last positions; 0 keeps all. `shift_labels`
        are targets that are shifted already, and `num_items_in_batch` divides their loss.
        """
        if labels is not None and logits_to_keep:
            raise ValueError(
                f"logits_to_keep={logits_to_keep} drops logits that the loss needs: "
                "pass `labels` with logits_to_keep=0, or no `labels`."
            )
        hidden = self.model(input_ids, attention_mask, position_ids)
        logits = self.lm_head(hidden[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            targets = shifted(labels) if shift_labels is None else shift_labels
            loss = target_loss(logits, targets, num_items_in_batch)
        return DecoderOutput(loss, logits)


class DecoderModel(nn.Module):
    """Embedding, layers and final norm; computes mask and rotary angles once, for all layers."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = config.gradient_checkpointing
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Replaceable, as `Attention.attend` is: who holds part of a sequence masks by itself.
        self.mask: Callable[[Tensor | None, Tensor | None], Tensor | None] = visible_mask

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the normed hidden states [B, S, D]."""
        hidden = self.dropout(self.embed_tokens(input_ids))
        mask = self.mask(attention_mask, position_ids)
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        angles = rotary_angles(hidden, position_ids, self.config)
        for layer in self.layers:
            run = partial(layer, attention_mask=mask, position_embeddings=angles)
            if self.gradient_checkpointing and self.training:
                run = partial(checkpoint, run, use_reentrant=False)
            hidden = run(hidden)
        return self.norm(hidden)


class DecoderLayer(nn.Module):
    """Attention, then a dense MLP or experts, each normed before and added to the residual."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        is_dense, width = layer in config.mlp_only_layers, config.intermediate_size
        self.mlp: nn.Module = GatedMLP(config, width) if is_dense else SparseMoeBlock(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, position_embeddings: Angles
    ) -> Tensor:
        """Map hidden states [B, S, D] to the same shape."""
        attended = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
        )
        hidden_states = hidden_states + self.dropout(attended)
        return self.add_block(hidden_states, self.mlp(self.post_attention_layernorm(hidden_states)))

    def add_block(self, residual: Tensor, out: Tensor) -> Tensor:
        """What the layer makes of its MLP's or block's output."""
        return residual + self.dropout(out)


class Attention(nn.Module):
    """Grouped-query attention through SDPA.

    The number of heads is read off the projections' outputs, so narrowed projections work.

    Attributes:
        attend: Called as attention functions of Hugging Face are, and replaceable like them.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        linear = partial(nn.Linear, bias=config.attention_bias)
        self.q_proj = linear(config.hidden_size, heads * self.head_dim)
        self.k_proj = linear(config.hidden_size, kv_heads * self.head_dim)
        self.v_proj = linear(config.hidden_size, kv_heads * self.head_dim)
        self.o_proj = linear(heads * self.head_dim, config.hidden_size)
        self.attend: Callable[..., tuple[Tensor, None]] = sdpa_attend

    def forward(
        self, hidden_states: Tensor, position_embeddings: Angles, attention_mask: Tensor | None
    ) -> Tensor:
        """Attend within [B, S, D]; `attention_mask` is [B, 1, S, S] bool, `None` means causal."""
        batch, length = hidden_states.shape[:2]
        heads = (batch, length, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = (rotate(x, *position_embeddings) for x in (query, key))
        attended, _ = self.attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(attended.flatten(2))


class GatedMLP(nn.Module):
    """SwiGLU feed-forward of a dense layer or of the shared expert."""

    def __init__(self, config: DecoderConfig, intermediate_size: int) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [..., D] to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class SparseMoeBlock(nn.Module):
    """Router, experts and an optional shared expert."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = TopKRouter(config)
        self.experts = Experts(config)
        width = config.shared_expert_intermediate_size
        self.shared_expert = GatedMLP(config, width) if width else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [B, S, D] to the same shape."""
        hidden_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights_TK, index_TK = self.gate(hidden_TD)
        output_TD = self.experts(hidden_TD, index_TK, weights_TK)
        if self.shared_expert is not None:
            output_TD = output_TD + self.shared_expert(hidden_TD)
        return output_TD.view(hidden_states.shape)


class TopKRouter(nn.Module):
    """Linear router with the decision of `fold_kernels.router`."""

    e_score_correction_bias: Tensor | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.spec = router_spec(config)
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_experts
        self.dtype = ROUTER_DTYPES[config.router_dtype]
        self.jitter_noise = config.router_jitter_noise
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias_E = torch.zeros(config.num_experts) if config.use_expert_bias else None
        self.register_buffer("e_score_correction_bias", bias_E)

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E], weights [T, K] in at least fp32, and expert indices [T, K]."""
        if self.training and self.jitter_noise > 0:
            low, high = 1 - self.jitter_noise, 1 + self.jitter_noise
            hidden_TD = hidden_TD * torch.empty_like(hidden_TD).uniform_(low, high)
        logits_TE = router_logits(hidden_TD, self.weight, self.dtype)
        weights_TK, index_TK = route(logits_TE, self.spec, self.e_score_correction_bias)
        return logits_TE, weights_TK, index_TK


class Experts(nn.Module):
    """Stacked SwiGLU experts over rows sorted by expert."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, width, inner))

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum [T, D] of each token's experts, in the dtype of `hidden_TD`."""
        dtype = _compute_dtype(hidden_TD)
        # Stable: ties keep token order, so a recomputed forward permutes identically.
        order_N = index_TK.flatten().argsort(stable=True)
        counts_E = torch.zeros(self.num_experts, dtype=torch.long, device=order_N.device)
        counts_E.scatter_add_(0, index_TK.flatten(), torch.ones_like(order_N))
        rows_ND = hidden_TD.to(dtype).index_select(0, order_N // index_TK.shape[1])
        gate_up = grouped_linear(rows_ND, self.gate_up_proj.to(dtype), counts_E)
        weighted_NF = (self._apply_gate(gate_up) * weights_TK.flatten()[order_N, None]).to(dtype)
        output_ND = grouped_linear(weighted_NF, self.down_proj.to(dtype), counts_E)
        # A gather and a sum over K instead of index_add: no atomics, so bit-equal reruns on GPUs.
        output_ND = output_ND.index_select(0, order_N.argsort())
        return output_ND.view(*index_TK.shape, hidden_TD.shape[1]).sum(dim=1, dtype=hidden_TD.dtype)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def router_spec(config: DecoderConfig) -> RouterSpec:
    """The decision of a decoder's routers."""
    return RouterSpec(
        top_k=config.num_experts_per_tok,
        scores=config.scoring_func,
        softmax_after_topk=config.softmax_after_topk,
        renormalise=config.norm_topk_prob,
        scaling_factor=config.routed_scaling_factor,
        num_groups=config.n_group,
        top_groups=config.topk_group,
        group_score=config.group_score,
    )


class RMSNorm(nn.Module):
    """Root-mean-square norm with statistics in at least fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Norm the last dim."""
        wide = hidden_states.to(_at_least_fp32(hidden_states.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden_states.dtype)


def rotary_angles(hidden: Tensor, position_ids: Tensor, config: DecoderConfig) -> Angles:
    """Return cosines and sines, each [B or 1, S, head_dim], in the dtype of `hidden`."""
    dtype = _at_least_fp32(hidden.dtype)
    steps = torch.arange(0, config.head_dim, 2, dtype=dtype, device=hidden.device)
    angles = position_ids[..., None].to(dtype) * config.rope_theta ** (-steps / config.head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to [B, H, S, head_dim], halves paired as in Hugging Face models."""
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    # Under autocast the angles are wider than the states, and SDPA wants one dtype.
    return (states * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(states.dtype)


def sdpa_attend(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, None]:
    """Attend from queries [B, H, S, head_dim] with SDPA; the result is [B, S, H, head_dim]."""
    attended = F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(module.num_key_value_groups, dim=1),
        value.repeat_interleave(module.num_key_value_groups, dim=1),
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None,
        scale=scaling,
    )
    return attended.transpose(1, 2), None


def visible_mask(attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor | None:
    """Who sees whom, bool [B or 1, 1, S, S]; `None` where each sees all before it and itself."""
    if attention_mask is not None or position_ids is None:
        return causal_padding_mask(attention_mask)
    steps = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1)
    documents = (steps != 1).cumsum(1)
    if not documents[:, -1].any():
        return None
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


def causal_padding_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Return [B, 1, S, S], True where a query may look; `None` (plain causal) without padding mask.

    Every position sees itself, padding included: no row is empty, so no softmax yields NaN.
    """
    if attention_mask is None:
        return None
    length = attention_mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    return (causal & attention_mask.bool()[:, None, None, :]) | itself


def shifted(labels: Tensor) -> Tensor:
    """The label that each position has to predict: its successor's; the last one has none."""
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of each position's successor; zero, with a graph, if all are ignored."""
    return target_loss(logits, shifted(labels))


def target_loss(logits: Tensor, targets: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Cross entropy summed over all targets but -100, divided by their number or `num_items`."""
    wide = logits.flatten(0, 1).to(_at_least_fp32(logits.dtype))
    total = F.cross_entropy(wide, targets.flatten(), ignore_index=-100, reduction="sum")
    count = (targets != -100).sum() if num_items is None else torch.as_tensor(num_items)
    return total / count.clamp(min=1).to(total.device)


def grouped_linear(rows_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply the rows of each expert, stored one group after the other, by its own weight.

    An expert without rows gets a zero gradient, never None.
    """
    if serves_grouped_mm(rows_NI, weight_EOI):
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows_NI, weight_EOI.transpose(1, 2), offs=ends_E)
    return grouped_linear_ref(rows_NI, weight_EOI, counts_E)


def grouped_linear_ref(rows_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Loop over the experts: the readable form of `grouped_linear`, for every dtype and shape."""
    pairs = zip(rows_NI.split(counts_E.tolist()), weight_EOI.unbind(0), strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in pairs])


def serves_grouped_mm(rows_NI: Tensor, weight_EOI: Tensor) -> bool:
    """Whether torch's grouped matmul takes these operands, its backward included."""
    dtype, size = rows_NI.dtype, rows_NI.element_size()
    # Row strides of operands, results and gradients must be multiples of 16 bytes.
    aligned = all(width * size % 16 == 0 for width in weight_EOI.shape[1:])
    if not aligned or rows_NI.shape[0] == 0 or weight_EOI.dtype != dtype:
        return False
    if rows_NI.device.type == "cuda":
        capable = torch.cuda.get_device_capability(rows_NI.device) >= (8, 0)
        return capable and dtype == torch.bfloat16
    return rows_NI.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16, torch.float16)


def _answers_for(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights that `init_weights` draws at this module: linear ones at the block around them."""
    if isinstance(module, Attention | GatedMLP):
        yield from module.named_parameters()
    elif isinstance(module, Decoder) and not module.config.tie_word_embeddings:
        yield from module.lm_head.named_parameters()
    elif not isinstance(module, nn.Linear):
        yield from module.named_parameters(recurse=False)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _compute_dtype(states: Tensor) -> torch.dtype:
    # grouped_mm ignores autocast; like autocast itself, this leaves fp64 alone.
    device = states.device.type
    if states.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return states.dtype
    return torch.get_autocast_dtype(device)
