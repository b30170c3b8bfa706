"""The arguments of the strategy as one frozen dataclass.

Owns every field's name, type and default, and refuses a value of the wrong type and an unknown
key. Whether the degrees fit a world or a model is `topology.doctor`'s to say; this module knows
neither.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_fold.dispatchers import check_dispatcher
from lightning_fold.router_options import RouterOptions, parse_options
from lightning_fold.topology.doctor import DEGREE_FIELDS, check_degree, nearest
from lightning_fold.topology.layer_foldings import check_written

# c10d counts nanoseconds; a month is far from its limit.
_LONGEST_TIMEOUT_S = 30 * 24 * 3600.0

# What says something about pipelines alone.
_PIPELINE_ONLY = (
    "pipeline_schedule",
    "virtual_pipeline_size",
    "num_microbatches",
    "microbatch_size",
    "pipeline_layout",
    "pipeline_overlap",
)


@dataclass(frozen=True)
class FoldedConfig:
    """What a user may tell the strategy; data-parallel degrees are derived, never fields."""

    tensor_parallel_size: int = 1
    """Ranks that split attention, embedding and LM head (tp), and the sequence between them.
    Costs an all-gather and a reduce-scatter of the activations around each of these."""

    context_parallel_size: int = 1
    """Ranks that share the tokens of each sequence (cp), dealt in a zigzag so that all have as much
    to attend to. They read the same batches. Costs an exchange per attention layer, forward and
    backward. A call with `labels` returns the loss of whole sequences but the logits of this
    rank's tokens only; without, logits are gathered, which costs B * S * V of memory."""

    pipeline_parallel_size: int = 1
    """Stages the layers are cut into (pp), in both views. Costs idle time at both ends of a
    step, which more microbatches shorten, and one call of the module's step more on the last
    stage, up to its call of the model (docs/pipelines.md)."""

    expert_parallel_size: int = 1
    """Ranks that share out the experts of a layer (ep); must divide their number. Costs two
    all-to-alls of the routed tokens per MoE layer, cheap inside a node only."""

    expert_tensor_parallel_size: int = 1
    """Ranks that split each expert's width (etp). Costs an all-gather and a reduce-scatter of
    the routed tokens per MoE layer, and narrower matrix products."""

    data_parallel_shard: Literal["optimizer", "full"] = "optimizer"
    """`optimizer` keeps the parameters gathered between forward and backward. `full` (ZeRO-3)
    frees each layer's, dense and experts, in between and while accumulating, which costs a second
    all-gather of every layer per backward."""

    capacity_factor: float | None = None
    """Tokens kept per expert relative to an even load: ceil(tokens * top_k / experts * factor);
    None keeps all. A bound makes the worst step faster and costs dropped tokens, hence different
    results: a token that loses all its experts gets zero from them, and weights are not
    renormalised. `router_options`: `capacity_scope` "local" (default) counts and decides on each
    rank's tokens, so that results depend on the mapping; "sequence" on whole sequences, the same
    under every mapping, which costs a gather of the decision over tp and cp per layer.
    `pad_to_capacity` sends exactly that many rows per rank and expert: no host synchronisation
    in a layer, at the cost of empty rows."""

    token_drop: Literal["probability", "position"] = "probability"
    """Which tokens beyond the capacity go: those with the least routing weight (of equal ones the
    later), or the last. `probability` costs a sort of the routing weights per layer."""

    dispatcher: str = "auto"
    """How tokens reach their experts. `auto` takes `local`, which costs no communication, where
    no expert is split or shared out, and `all_to_all` elsewhere, which costs a row each way per
    token and expert. `dedup` costs one per token and rank: fewer where top_k exceeds the ranks a
    token's experts lie on (a quarter of the bytes for top-8 over ep=2), and 8 more bytes per row
    and choice. `all_gather` costs every token on every rank, cheap for tiny ep only.
    `lightning_fold.register_dispatcher` adds others."""

    context_parallel_method: Literal["all_gather", "ulysses", "ring"] = "all_gather"
    """How attention sees the whole sequence. `all_gather` costs memory for the keys and values of
    all tokens, one layer at a time. `ulysses` costs four all-to-alls and needs cp to divide
    heads/tp. `ring` costs 2 * cp messages a layer, which travel while it computes, and scores of
    (S / 2cp)^2 a head; it serves no attention dropout."""

    pipeline_schedule: str = "1f1b"
    """Order of the microbatches on the stages: `gpipe`, `1f1b`, `interleaved_1f1b`,
    `interleaved_zero_bubble`, `zbv`, `dualpipev`, or one of `register_schedule`. Shorter idle time
    costs activation memory or more messages; `lightning-fold schedule` shows how much."""

    virtual_pipeline_size: int = 1
    """Stages per rank: 1 for gpipe and 1f1b, at least 2 for the interleaved schedules, 2 for zbv
    and dualpipev. More of them shorten the idle time and cost more messages and more activations
    in flight."""

    num_microbatches: int | None = None
    """Pieces that a Lightning batch is cut into by rows; None is 4 * pp, or the rows of the batch
    if they are fewer. More of them fill the pipeline and cost smaller matrix products. Excludes
    `microbatch_size`."""

    microbatch_size: int | None = None
    """Rows per microbatch, the other way to say `num_microbatches`."""

    pipeline_layout: str | None = None
    """What each stage holds, as text (`Et*3|tt|tL`; docs/pipelines.md); None makes the dearest
    stage as cheap as it can be. A layout by hand costs a look at the slowest stage whenever the
    model changes."""

    pipeline_overlap: bool = False
    """Weave the forward of one microbatch with the backward of another, layer by layer, so that the
    rows of one travel while the experts of the other compute; weight gradients fill the gaps. For
    `1f1b`, `interleaved_1f1b` and `dualpipev`. Costs activations: twice those of `1f1b`, one
    microbatch more of `interleaved_1f1b`. A stage with a layer that cannot be run in pieces runs
    as without, which set-up says."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping. `none` keeps, of the experts, the rows that
    arrived and the first product, nothing of their activations and outputs. `selective` drops the
    first product too, 2 * F elements per routed row, and costs two thirds of the experts' forward;
    no row travels again. `full` keeps each layer's input only and costs a second forward, exchanges
    included, and a Python call per operation of it; routing decisions are kept. Excludes the
    model's own gradient checkpointing."""

    expert_precision: Literal["bf16", "fp8_block"] = "bf16"
    """Number format of the expert matrix products. `bf16` leaves it to the Trainer's `precision`,
    whatever that is. `fp8_block` multiplies in e4m3 what gives outputs and the gradients of rows,
    scaled by 1 x 128 blocks of rows and 128 x 128 blocks of weights and summed in fp32; weight
    gradients stay as with `bf16`. Costs accuracy, 4 % of the norm of a product, and a pass over
    every operand of a product to quantise it; needs widths that 128 divides. Where no kernel runs,
    on a CPU for example, it is emulated in fp32, which costs more time than it saves."""

    moe_layers: dict[str, Any] | None = None
    """Expert degrees of single decoder layers, such as `{"0-3": {"etp": 2, "ep": 2}}`; layers that
    are not named have those of the strategy. Costs process groups of its own for each pair of
    degrees."""

    save_distributed_checkpoint: bool = True
    """True writes a folder of shards, each rank its own. False writes one file as a
    single-device run does, which costs the whole model and optimizer in rank 0's memory."""

    async_save: bool = False
    """Write checkpoints behind training, from a copy in host memory. Costs that copy, and the
    newest checkpoint is whole only some steps later; rotation keeps the one before until then."""

    meta_init: bool = False
    """True creates the parameters sharded, so that no rank ever holds the whole model: build it
    in `configure_model` or on meta. Values follow from the seed and the parameter's name, equal
    under every mapping. Costs equality of the initial weights with a single-device run."""

    init_from: str | None = None
    """Weights to start from: a consolidated checkpoint, a state dict, a .safetensors file or a
    folder of these, under the model's in-memory names. A model built in
    `configure_model` is never whole, as with `meta_init`. Costs the read, each rank only its own
    shards; leave it out of a run that resumes from `ckpt_path`, which reads all again."""

    router: Literal["model", "folded", "balanced"] = "model"
    """Who routes. `model`: the model's own router. `folded`: its weights, with the decision of
    `router_options`. `balanced`: tokens take experts in turn, which costs the meaning of the loss
    and serves measurements only."""

    router_options: dict[str, Any] | None = None
    """What a router decides and what balances the experts; None changes nothing.

    With router='folded' only; what is left out is taken from the model's config:
    `top_k`, `scores` ('softmax', 'sigmoid', 'sqrt_softplus'), `softmax_after_topk`, `renormalise`,
    `scaling_factor`, `num_groups`, `top_groups`, `group_score` ('top2_sum', 'max'), `dtype` of the
    router's product ('fp32', 'fp64'), `input_jitter`.

    With any router: `aux_losses`, a list of {'formula': ..., 'coefficient': ...} ('per_sequence',
    'per_layer', 'model', 'global_batch'; `moe.balance` has the units), `z_loss` (a coefficient),
    `bias_update_rate` (step of the expert bias after every optimizer step). Losses cost a softmax
    a layer and two small all-reduces a forward over tp and over cp, 'global_batch' two more a layer
    over dp; the bias costs one all-reduce a step."""

    sentinel_every: int = 0
    """Steps between checks that copies of parameters agree, that gradients are the sums of what
    the ranks computed, that every expert has one, and that no token is lost; the first step of a
    run is checked too. 0 never checks. A check costs one read of all parameters and gradients and
    a few numbers a parameter on the wire; every 100 steps it is below 1 % of the time."""

    collective_timeout_s: float = 1800.0
    """Seconds that a rank waits for its peers in one collective; then the run ends and tells
    which collective, over which group and at which step. It is a field because no value suits
    all: a short one finds a hang soon, and costs runs in which a rank is late for a good reason,
    such as a long download, compilation or evaluation on one rank. NCCL's own time-out for
    collectives over the whole world is ten minutes at least."""

    @classmethod
    def from_mapping(cls, arguments: Mapping[str, Any]) -> FoldedConfig:
        """Build a config from keyword arguments or YAML, without `check`.

        Raises:
            ValueError: a key is not a field; names the nearest field.
        """
        check_names(arguments)
        return cls(**arguments)

    def check(self) -> None:
        """Refuse wrong types and values.

        Raises:
            ValueError: names the first offending field in the order above.
        """
        hints = typing.get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if not _matches(value, hints[field.name]):
                raise ValueError(_explain_type(field.name, value, hints[field.name]))
        for axis, name in DEGREE_FIELDS.items():
            check_degree(axis, getattr(self, name))
        self._check_dispatcher()
        self._check_capacity()
        self._check_timeout()
        self._check_sentinel()
        self._check_pipeline()
        check_written(self.moe_layers)
        _ = self.routing

    @property
    def routing(self) -> RouterOptions:
        """`router` and `router_options`, checked; raises ValueError."""
        return parse_options(self.router, self.router_options)

    def _check_sentinel(self) -> None:
        if self.sentinel_every < 0:
            raise ValueError(
                f"sentinel_every={self.sentinel_every} is no number of steps. Legal "
                "sentinel_every: 0 (never), or at least 1.  Change `sentinel_every`."
            )

    def _check_pipeline(self) -> None:
        if self.pipeline_parallel_size == 1:
            for name in _PIPELINE_ONLY:
                value, default = getattr(self, name), getattr(type(self), name)
                if value != default:
                    raise ValueError(
                        f"{name}={value!r} says how a pipeline works, and pipeline_parallel_size=1 "
                        f"makes none. Legal {name} then: {default!r}.  Change `{name}` or "
                        "`pipeline_parallel_size`."
                    )
        for name in ("virtual_pipeline_size", "num_microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"{name}={value} is no number of things. Legal {name}: 1, 2, 3, ...  "
                    f"Change `{name}`."
                )
        if self.num_microbatches is not None and self.microbatch_size is not None:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} and microbatch_size="
                f"{self.microbatch_size} both say how a batch is cut. Give one of them.  Change "
                "`microbatch_size`."
            )
        if self.pipeline_parallel_size > 1 and self.data_parallel_shard == "full":
            raise ValueError(
                "data_parallel_shard='full' frees each layer's parameters after its forward, and "
                f"pipeline_parallel_size={self.pipeline_parallel_size} keeps them for all "
                "microbatches of a step. Legal data_parallel_shard with pipelines: 'optimizer'.  "
                "Change `data_parallel_shard`."
            )

    def _check_timeout(self) -> None:
        if not 0 < self.collective_timeout_s <= _LONGEST_TIMEOUT_S:
            raise ValueError(
                f"collective_timeout_s={self.collective_timeout_s} is no time that ranks can wait. "
                f"Legal collective_timeout_s: above 0, up to {_LONGEST_TIMEOUT_S:g} (30 days).  "
                "Change `collective_timeout_s`."
            )

    def _check_dispatcher(self) -> None:
        etp, ep = self.expert_tensor_parallel_size, self.expert_parallel_size
        pads = bool((self.router_options or {}).get("pad_to_capacity"))
        check_dispatcher(self.dispatcher, etp=etp, ep=ep, pads=pads)

    def _check_capacity(self) -> None:
        factor, options = self.capacity_factor, self.router_options or {}
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(
                f"capacity_factor={factor} leaves an expert room for tokens * top_k / experts * "
                f"{factor} rows, which is no number of rows. Legal capacity_factor: above 0, 1.0 "
                "for an even load, or None.  Change `capacity_factor`."
            )
        alone = [key for key in ("capacity_scope", "pad_to_capacity") if options.get(key)]
        if factor is None and alone:
            raise ValueError(
                f"router_options[{alone[0]!r}]={options[alone[0]]!r} says how a capacity works, "
                "and capacity_factor=None sets none. Legal capacity_factor: above 0, 1.0 for an "
                "even load.  Change `capacity_factor`."
            )


def check_names(arguments: Iterable[str]) -> None:
    """Refuse a name that is no argument of the strategy.

    Raises:
        ValueError: names the nearest argument.
    """
    known = [field.name for field in fields(FoldedConfig)]
    for key in arguments:
        if key not in known:
            raise ValueError(_explain_unknown_key(key, known))


def checked_names(init: Callable[..., None]) -> Callable[..., None]:
    """Make a constructor refuse misspelt arguments by name, before Python's own words for it."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **arguments: Any) -> None:
        check_names(arguments)
        init(self, *args, **arguments)

    return checked


def _matches(value: object, hint: Any) -> bool:
    """Tell whether a value has the type of a field; neither a bool nor a float is an int."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return any(type(value) is type(legal) and value == legal for legal in typing.get_args(hint))
    if origin in (types.UnionType, typing.Union):
        return any(_matches(value, part) for part in typing.get_args(hint))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is (origin or hint)


def _explain_type(name: str, value: object, hint: Any) -> str:
    return (
        f"{name}={value!r} is not a value of this field ({type(value).__name__}). "
        f"Legal {name}: {_listed_hint(hint)}.  Change `{name}`."
    )


def _listed_hint(hint: Any) -> str:
    if hint is type(None):
        return "None"
    if typing.get_origin(hint) is Literal:
        return ", ".join(repr(legal) for legal in typing.get_args(hint))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_listed_hint(part) for part in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    return f"{'an' if kind is int else 'a'} {kind.__name__}"


def _explain_unknown_key(key: str, known: list[str]) -> str:
    likely = DEGREE_FIELDS.get(key) or nearest(key, known)
    if key in ("dp", "edp", "data_parallel_size", "expert_data_parallel_size"):
        return (
            f"`{key}` is not an argument of FoldedMoEStrategy: it is derived from world = "
            f"pp*tp*cp*dp = pp*etp*ep*edp. Change `devices`, `num_nodes` or one of: "
            f"{', '.join(DEGREE_FIELDS.values())}."
        )
    hint = f"Change it to `{likely}`." if likely else f"Legal: {', '.join(known)}."
    return f"`{key}` is not an argument of FoldedMoEStrategy. {hint}"
