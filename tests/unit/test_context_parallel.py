"""What context parallelism refuses, of models and of calls, and what it hands to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_fold.model.context import ContextParallel, check_context
from lightning_fold.model.context.attention import NAME
from lightning_fold.model.decoder import Decoder, DecoderConfig
from lightning_fold.model.inspect import find_parts
from lightning_fold.model.token_layout import TokenWatch
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.topology.folding import Folding

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts_per_tok": 2,
}


class Holder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def hugging_face(kind: str = "mixtral", **options: Any) -> Any:
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **(SIZES | options))
        return transformers.AutoModelForCausalLM.from_config(config)


def built_in(**options: Any) -> Any:
    sizes = SIZES | {"num_experts": 4, "moe_intermediate_size": 4}
    return Decoder(DecoderConfig(**(sizes | options)))


def check(model: nn.Module, method: str = "all_gather", cp: int = 2, tp: int = 1) -> None:
    parts = find_parts(Holder(model))
    check_context(parts, Folding.from_world(tp * cp, tp=tp, cp=cp), method)


@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_models_of_plain_causal_attention_are_served(kind: str, method: str) -> None:
    check(
        hugging_face(kind, **({"first_k_dense_replace": 1} if "deepseek" in kind else {})), method
    )
    check(built_in(mlp_only_layers=(0,)), method)


# ------------------------------------------------------------ models that are refused


def _mixer(model: Any) -> None:
    model.model.layers[0].linear_attn = nn.Linear(8, 8)


def _no_attention(model: Any) -> None:
    del model.model.layers[1].self_attn


def _chunks(model: Any) -> None:
    model.config.attention_chunk_size = 4


def _chunked_layer(model: Any) -> None:
    model.config.layer_types = ["full_attention", "chunked_attention"]


def _bidirectional(model: Any) -> None:
    model.config.is_causal = False


def _indexer(model: Any) -> None:
    model.model.layers[0].self_attn.indexer = nn.Linear(8, 8)


def _sinks(model: Any) -> None:
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))


def _convolution(model: Any) -> None:
    model.model.layers[0].self_attn.short = nn.Conv1d(8, 8, 3)


def _mixes_outside(model: Any) -> None:
    model.model.stem = nn.Conv1d(8, 8, 3)


def _hidden_states(model: Any) -> None:
    model.config.output_hidden_states = True


def _own_attention(model: Any) -> None:
    model.model.layers[1].self_attn.attend = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_mixer, r"layers.0.linear_attn .*neither attention nor MLP"),
        (_no_attention, r"layers.1 .*no `self_attn`"),
        (_chunks, r"config.attention_chunk_size .*in chunks"),
        (_chunked_layer, r"config.layer_types .*'chunked_attention' is not causal"),
        (_bidirectional, r"config.is_causal .*later tokens"),
        (_indexer, r"self_attn.indexer .*chooses keys by itself"),
        (_sinks, r"self_attn.sinks .*sinks"),
        (_convolution, r"self_attn.short .*Conv1d mixes neighbouring tokens"),
        (_mixes_outside, r"model.model.stem .*Conv1d lies outside the decoder layers"),
        (_hidden_states, r"config.output_hidden_states .*part of every sequence"),
    ],
)
def test_refusals_name_the_module_and_the_reason(
    change: Callable[[Any], None], reason: str
) -> None:
    model = hugging_face()
    change(model)
    with pytest.raises(ValueError, match=reason) as refused:
        check(model)
    assert "Change `context_parallel_size` to 1." in str(refused.value)


def test_attention_that_cannot_be_replaced_is_refused() -> None:
    model = built_in()
    _own_attention(model)
    with pytest.raises(ValueError, match=r"layers.1.self_attn .*nor has an `attend` to replace"):
        check(model)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next"])
def test_families_that_cannot_be_served_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="cannot run under context_parallel_size > 1"):
        check(hugging_face(kind))


def test_ulysses_needs_cp_to_divide_the_heads_of_a_tp_rank() -> None:
    check(built_in(), "ulysses", cp=4)
    told = r"heads/tp = 4/2 = 2 .*over cp=4.*legal cp: 1 2 .*Change `context_parallel_size` or"
    with pytest.raises(ValueError, match=told):
        check(built_in(), "ulysses", cp=4, tp=2)
    check(built_in(), "ring", cp=4, tp=2)


def test_ring_has_no_dropout() -> None:
    check(built_in(attention_dropout=0.1), "ulysses")
    with pytest.raises(ValueError, match=r"attention_dropout=0.1 .*'ring'.*Legal: 'all_gather'"):
        check(built_in(attention_dropout=0.1), "ring")


# ------------------------------------------------------------ calls


class Ranks:
    """The first of two cp ranks, whose peer holds nothing but zeros."""

    def size(self, axis: str) -> int:
        return 2 if axis == "cp" else 1

    def rank(self, axis: str) -> int:
        return 0

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor:
        return x * 10


class Core(nn.Module):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        self.given = {"input_ids": input_ids, "position_ids": position_ids, **kwargs}
        self.given |= {"shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        self.given |= {"attention_mask": attention_mask, "labels": labels}
        return transformers.modeling_outputs.CausalLMOutput(
            loss=None if labels is None else torch.ones(()), logits=torch.zeros(*input_ids.shape, 3)
        )


def hooked() -> Core:
    core, tokens, comm = Core(), RunningTokens(), Ranks()
    parts: Any = type("Parts", (), {"core": core, "layers": ()})()
    TokenWatch(tokens, comm).install(parts)  # type: ignore[arg-type]
    ContextParallel(comm, tokens, "all_gather").apply(parts)  # type: ignore[arg-type]
    return core


IDS = torch.arange(20).view(2, 10)
HELD = [0, 1, 2, 8, 9]


def test_the_model_sees_its_places_and_targets_of_whole_sequences() -> None:
    core = hooked()
    out = core(IDS, labels=IDS)
    assert core.given["input_ids"].tolist() == IDS[:, HELD].tolist()
    assert core.given["position_ids"].tolist() == [HELD]
    # The target of place 2 is the token of place 3, which another rank holds; the last has none.
    wanted = [[1, 2, 3, 9, -100], [11, 12, 13, 19, -100]]
    assert core.given["labels"].tolist() == core.given["shift_labels"].tolist() == wanted
    assert core.given["num_items_in_batch"] == 18
    assert float(out.loss) == 10.0
    assert out.logits.shape == (2, 5, 3)


def test_what_the_user_gives_is_split_and_kept() -> None:
    core = hooked()
    positions, mask = torch.arange(10).flip(0)[None], torch.ones(2, 10)
    core(IDS, mask, positions, labels=IDS, shift_labels=IDS + 1, num_items_in_batch=7, other="x")
    assert core.given["position_ids"].tolist() == [[9, 8, 7, 1, 0]]
    assert core.given["attention_mask"].shape == (2, 5)
    assert core.given["labels"].tolist() == (IDS + 1)[:, HELD].tolist()
    assert (core.given["num_items_in_batch"], core.given["other"]) == (7, "x")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"use_cache": True}, "`use_cache` is given"),
        ({"past_key_values": ()}, "`past_key_values` is given"),
        ({"logits_to_keep": 1}, "`logits_to_keep` is given"),
        ({"output_hidden_states": True}, "`output_hidden_states` is given"),
        ({"attention_mask": torch.ones(2, 1, 10, 10)}, r"`attention_mask` has shape \[2, 1, 10"),
        ({"attention_mask": torch.ones(2, 9)}, r"shape \[2, 9\], and sequences are \[2, 10\]"),
        ({"position_ids": torch.ones(3, 2, 10)}, r"`position_ids` has shape \[3, 2, 10\]"),
        ({"token_type_ids": IDS}, r"`token_type_ids` \[2, 10\] may lie along the sequence"),
    ],
)
def test_arguments_without_a_meaning_for_a_part_are_refused(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        hooked()(IDS, **arguments)


def test_a_batch_that_is_not_told_is_refused() -> None:
    with pytest.raises(ValueError, match="called without `input_ids` or `inputs_embeds`"):
        hooked()(torch.zeros(3))


def test_positions_without_a_mask_need_a_config_without_cache() -> None:
    core: Any = hooked()
    core.config = transformers.MixtralConfig()
    with pytest.raises(ValueError, match="Pass use_cache=False, or a mask"):
        core(IDS, position_ids=torch.arange(10)[None], labels=IDS)
    core(IDS, position_ids=torch.arange(10)[None], labels=IDS, use_cache=False)


def test_the_attention_function_refuses_modules_it_does_not_know() -> None:
    check(hugging_face())
    from lightning_fold.model.context.attention import context_attention, context_mask

    with pytest.raises(ValueError, match="Linear is no `self_attn` of a decoder layer"):
        context_attention(nn.Linear(1, 1), IDS, IDS, IDS, None)
    with pytest.raises(ValueError, match="masks by more than order, window and padding"):
        context_mask(use_vmap=True)
    assert int(context_mask(local_size=3)) == 3
    assert NAME == "lightning_fold_context"
