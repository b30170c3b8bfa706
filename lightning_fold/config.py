"""The arguments of the strategy as one frozen dataclass.

Owns every field's name, type and default, and refuses a value of the wrong type, an unknown
key, and any value but the default of a feature that is not built. Whether the degrees fit a
world or a model is `topology.doctor`'s to say; this module knows neither.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_fold.topology.doctor import DEGREE_FIELDS, check_degree, nearest

# c10d counts nanoseconds; a month is far from its limit.
_LONGEST_TIMEOUT_S = 30 * 24 * 3600.0

# Field -> what to use instead of the feature that is not built. A field leaves this table when
# its feature is built; `check` and its test read nothing else.
_NOT_BUILT: dict[str, str] = {
    "context_parallel_size": (
        "Use `tensor_parallel_size`, which splits the sequence between the matrix products, or "
        "shorter sequences"
    ),
    "pipeline_parallel_size": "Use `expert_parallel_size` and `tensor_parallel_size`",
    "capacity_factor": "Use None: every routed token is computed and none is dropped",
    "token_drop": "Leave it out: no token is dropped",
    "context_parallel_method": "Leave it out: context_parallel_size is 1",
    "pipeline_schedule": "Leave it out: pipeline_parallel_size is 1",
    "virtual_pipeline_size": "Leave it out: pipeline_parallel_size is 1",
    "num_microbatches": "Use the Trainer's `accumulate_grad_batches`",
    "microbatch_size": "Use a smaller batch and the Trainer's `accumulate_grad_batches`",
    "pipeline_layout": "Leave it out: pipeline_parallel_size is 1",
    "activation_checkpointing": (
        "Use the model's own, such as `gradient_checkpointing_enable()` in transformers"
    ),
    "expert_precision": "Use the Trainer's `precision='bf16-mixed'` or 'bf16-true'",
    "moe_layers": "Use a model whose MoE blocks are found by their structure",
    "router": "Use 'model': the model's own router decides",
    "router_options": "Set the router's options in the model's own config",
    "sentinel_every": "Compare with a single-process run in fp64 (`lightning_fold.verify`)",
}


@dataclass(frozen=True)
class FoldedConfig:
    """What a user may tell the strategy; data-parallel degrees are derived, never fields."""

    tensor_parallel_size: int = 1
    """Ranks that split attention, embedding and LM head (tp), and the sequence between them.
    Costs an all-gather and a reduce-scatter of the activations around each of these."""

    context_parallel_size: int = 1
    """Ranks that split one sequence inside attention (cp). Costs an exchange of keys and values
    per attention layer."""

    pipeline_parallel_size: int = 1
    """Stages the layers are cut into (pp), in both views. Costs idle time at both ends of a
    step, which more microbatches shorten."""

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
    """Tokens kept per expert relative to an even load; None keeps all. A bound makes the
    worst step faster and costs dropped tokens, hence different results."""

    token_drop: Literal["probability", "position"] = "probability"
    """Which tokens beyond the capacity go: the least probable, or the last. `probability`
    costs a sort per expert."""

    dispatcher: Literal["auto", "local", "all_to_all"] = "auto"
    """How tokens reach their experts. `auto` takes `local`, which costs no communication, where
    no expert is split or shared out, and `all_to_all` elsewhere."""

    context_parallel_method: Literal["all_gather", "ulysses", "ring"] = "all_gather"
    """How attention sees the whole sequence. `all_gather` costs memory for all keys and values,
    `ulysses` needs cp to divide the heads, `ring` costs cp small exchanges per layer."""

    pipeline_schedule: str = "1f1b"
    """Order of the microbatches on the stages. Shorter idle time costs activation memory or
    more messages."""

    virtual_pipeline_size: int = 1
    """Chunks of layers per stage. More chunks shorten the idle time and cost more messages and
    more activations in flight."""

    num_microbatches: int | None = None
    """Pieces that a Lightning batch is cut into. More of them fill the pipeline and cost
    smaller matrix products. Excludes `microbatch_size`."""

    microbatch_size: int | None = None
    """Rows per microbatch, the other way to say `num_microbatches`."""

    pipeline_layout: str | None = None
    """Which layers each stage holds, as text; None spreads them evenly. A layout by hand costs
    a look at the slowest stage whenever the model changes."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in backward. `selective` costs little time for the largest ones,
    `full` costs a second forward for all of them."""

    expert_precision: Literal["bf16", "fp8_block"] = "bf16"
    """Number format of the expert matrix products. `fp8_block` costs accuracy and the
    quantisation of every input."""

    moe_layers: dict[str, Any] | None = None
    """Module paths and adapters of MoE layers that are not found by their structure; None finds
    them all. Costs an entry to keep right by hand."""

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
    """Who routes: the model's own router, this package's, or an artificial even load, which
    costs the meaning of the loss and serves measurements only."""

    router_options: dict[str, Any] | None = None
    """Options of a router other than the model's own."""

    sentinel_every: int = 0
    """Steps between checks that replicas still agree; 0 never checks. A check costs one
    all-reduce of a checksum per parameter."""

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
        """Refuse wrong types and values, then values of features that are not built.

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
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _NOT_BUILT and value != field.default:
                raise ValueError(_explain_not_built(field.name, value, field.default))
        self._check_dispatcher()
        self._check_timeout()

    def _check_timeout(self) -> None:
        if not 0 < self.collective_timeout_s <= _LONGEST_TIMEOUT_S:
            raise ValueError(
                f"collective_timeout_s={self.collective_timeout_s} is no time that ranks can wait. "
                f"Legal collective_timeout_s: above 0, up to {_LONGEST_TIMEOUT_S:g} (30 days).  "
                "Change `collective_timeout_s`."
            )

    def _check_dispatcher(self) -> None:
        etp, ep = self.expert_tensor_parallel_size, self.expert_parallel_size
        if self.dispatcher == "local" and etp * ep > 1:
            raise ValueError(
                f"dispatcher='local' keeps tokens on their rank, but etp*ep = {etp}*{ep} = "
                f"{etp * ep} ranks hold the experts. Legal dispatcher: 'auto', 'all_to_all'."
                "  Change `dispatcher`."
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


def _explain_not_built(name: str, value: object, default: object) -> str:
    return (
        f"{name}={value!r} asks for a feature that is not built; the only value available is "
        f"{default!r}. {_NOT_BUILT[name]}.  Change `{name}`."
    )


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
