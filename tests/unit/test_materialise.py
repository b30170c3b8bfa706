"""Initial values: drawn one parameter at a time, as the model's own initialisers say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_fold.model.decoder import Decoder, DecoderConfig, Experts
from lightning_fold.model.hf import build_causal_lm
from lightning_fold.model.materialise import Draw, Skeleton, materialise
from lightning_fold.model.on_meta import parameters_on_meta
from lightning_fold.model.weights import starts_on_meta

CPU = torch.device("cpu")


def filled(module: nn.Module, *, seed: int = 1, **draw: Any) -> nn.Module:
    """Materialise a module that nobody folded."""
    options: dict[str, Any] = {"stacks": {}, "halved": (), "given": ()} | draw
    materialise(module, Skeleton(module), draw=Draw(seed, **options), device=CPU)
    return module


def on_meta(build: Callable[[], nn.Module], context: str = "hook") -> nn.Module:
    with parameters_on_meta() if context == "hook" else torch.device("meta"):
        return build()


def decoder(**fields: Any) -> Decoder:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32}
    return Decoder(DecoderConfig(**{**sizes, "mlp_only_layers": (1,), **fields}))


def hf(kind: str) -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 264, "num_attention_heads": 4}
    width = "num_local_experts" if kind == "mixtral" else "num_experts"
    inner = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    extra = {width: 4, inner: 32, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    return build_causal_lm(kind, sizes | extra)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": lambda: decoder(attention_bias=True, shared_expert_intermediate_size=32),
    "tied": lambda: decoder(tie_word_embeddings=True),
    "mixtral": lambda: hf("mixtral"),
    "qwen3_moe": lambda: hf("qwen3_moe"),
}


def stacks_of(module: nn.Module) -> dict[str, int]:
    return {n: p.shape[0] for n, p in module.named_parameters() if ".experts." in n}


@pytest.mark.parametrize("context", ["hook", "meta"])
@pytest.mark.parametrize("kind", MODELS)
def test_distribution_is_that_of_ordinary_construction(kind: str, context: str) -> None:
    torch.manual_seed(5)
    ordinary = MODELS[kind]()
    module = on_meta(MODELS[kind], context)
    filled(module, stacks=stacks_of(module))
    wanted = dict([*ordinary.named_parameters(), *ordinary.named_buffers()])
    found = dict([*module.named_parameters(), *module.named_buffers()])
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        value = found[name]
        assert (value.shape, value.dtype, value.device) == (tensor.shape, tensor.dtype, CPU)
        if "inv_freq" in name or tensor.unique().numel() <= 2:
            assert torch.equal(value, tensor), name
            continue
        # Each of the two standard deviations has an error of sigma / sqrt(2 n).
        error = tensor.numel() ** -0.5
        assert value.std().item() == pytest.approx(tensor.std().item(), rel=4 * error), name
        assert abs(value.mean().item()) < 4 * tensor.std().item() * error, name


@pytest.mark.parametrize("kind", MODELS)
def test_forward_computes(kind: str) -> None:
    module = filled(on_meta(MODELS[kind], "meta"))
    ids = torch.arange(12)[None]
    loss = module(input_ids=ids, labels=ids).loss
    assert loss.item() == pytest.approx(math.log(264), rel=0.1)


def test_values_follow_from_seed_and_name_alone() -> None:
    one, two, other = (filled(on_meta(decoder), seed=seed) for seed in (1, 1, 2))
    deeper = filled(on_meta(lambda: decoder(num_hidden_layers=2, mlp_only_layers=())))
    key = "model.layers.0.self_attn.q_proj.weight"
    values = [dict(module.named_parameters())[key] for module in (one, two, other, deeper)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    below = dict(one.named_parameters())["model.layers.1.self_attn.q_proj.weight"]
    assert not torch.equal(values[0], below)
    # What comes before or after it in the model does not matter.
    assert torch.equal(values[0], values[3])


def test_the_generator_is_left_as_it_was() -> None:
    state = torch.get_rng_state()
    filled(on_meta(decoder))
    assert torch.equal(torch.get_rng_state(), state)


def test_experts_are_drawn_one_by_one() -> None:
    names = [f"model.layers.0.mlp.experts.{key}" for key in ("gate_up_proj", "down_proj")]
    seen: list[int] = []

    class Watched(Decoder):
        def init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Experts):
                seen.extend(p.numel() for p in module.parameters() if not p.is_meta)
            super().init_weights(module)

    config = DecoderConfig(hidden_size=32, num_hidden_layers=1, moe_intermediate_size=16)
    module = on_meta(lambda: Watched(config))
    seen.clear()
    filled(module, stacks=dict.fromkeys(names, 8))
    parameters = dict(module.named_parameters())
    for name in names:
        experts = parameters[name].flatten(1)
        assert experts.corrcoef().triu(1).abs().max() < 0.2
        assert seen.count(experts.shape[1]) == 8
    assert len(seen) == 16


def test_tied_parameters_stay_tied() -> None:
    module = filled(on_meta(lambda: decoder(tie_word_embeddings=True)))
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_given_names_are_not_drawn() -> None:
    calls: list[nn.Module] = []

    class Watched(nn.Linear):
        def reset_parameters(self) -> None:
            calls.append(self)
            super().reset_parameters()

    module = on_meta(lambda: nn.Sequential(Watched(3, 3), Watched(3, 3)))
    calls.clear()
    filled(module, given=["0.weight", "0.bias", "1.bias"])
    assert len(calls) == 1
    assert not any(p.is_meta for p in module.parameters())


def test_dtypes_and_flags_are_kept() -> None:
    module = on_meta(lambda: nn.Linear(4, 4))
    module.bias.requires_grad_(False)
    filled(module.to(torch.bfloat16))
    assert (module.weight.dtype, module.weight.requires_grad) == (torch.bfloat16, True)
    assert not module.bias.requires_grad


# Which initialiser.


class Scaled(nn.Linear):
    """Its own initialiser changes what the one of its base has drawn."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.mul_(0.0).add_(3.0)


class Net(nn.Module):
    """Initialised the way of many scripts: by `apply`, children first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), Scaled(4, 4), nn.LayerNorm(4)
        self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if type(module) is nn.Linear:
            module.weight.fill_(1.0)
        if isinstance(module, Scaled):
            module.weight.mul_(2.0)
        if isinstance(module, Net):
            module.first.bias.fill_(7.0)


def test_model_initialiser_goes_over_the_modules_own() -> None:
    torch.manual_seed(0)
    ordinary, module = Net(), filled(on_meta(Net))
    assert torch.equal(module.first.weight, torch.ones(4, 4))
    assert torch.equal(module.first.bias, torch.full((4,), 7.0))
    assert torch.equal(module.second.weight, torch.full((4, 4), 6.0))
    assert torch.equal(module.norm.weight, torch.ones(4))
    # Not drawn by the model's: uniform within 1 / sqrt(fan-in), as nn.Linear has it.
    assert 0.0 < module.second.bias.abs().max() <= 0.5
    fixed = ("first.weight", "first.bias", "second.weight", "norm.weight", "norm.bias")
    for name in fixed:
        assert torch.equal(module.get_parameter(name), ordinary.get_parameter(name))


def test_methods_of_this_name_that_take_something_else_are_not_called() -> None:
    class Other(nn.Sequential):
        def init_weights(self, std: float) -> None:
            raise AssertionError(std)

    module = filled(on_meta(lambda: Other(nn.Linear(2, 2))))
    assert module[0].weight.abs().max() > 0


def test_buffers_that_a_module_resets_get_their_values() -> None:
    module = filled(on_meta(lambda: nn.BatchNorm1d(3), "meta"))
    assert torch.equal(module.running_var, torch.ones(3))
    assert module.num_batches_tracked == 0


def test_buffers_keep_what_the_constructor_gave_them() -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("mask", torch.eye(2))
        module.mean = MeanMetric()
        return module

    module = filled(on_meta(build))
    assert torch.equal(module.mask, torch.eye(2))
    module.mean.update(2.0)
    assert module.mean.compute() == 2.0


# What is refused.


def unset_parameter() -> nn.Module:
    module = nn.Sequential(nn.Identity())
    module[0].scale = nn.Parameter(torch.ones(3))
    return module


def half_written() -> nn.Module:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.scale[:2] = 1.0

    return nn.Sequential(Half())


def unset_buffer() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
    return module


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (unset_parameter, r"^0\.scale \(Identity\): nothing gives this parameter a value"),
        (half_written, r"^0\.scale \(Half\): nothing gives this parameter a value"),
        (unset_buffer, r"^0\.mask \(Linear\): nothing gives this buffer a value"),
        (lambda: MeanMetric(), r"mean_value \(MeanMetric\) is a tensor on meta and neither"),
    ],
)
def test_what_nothing_fills_is_refused_by_name(
    build: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        filled(on_meta(build, "meta"))


def test_initialiser_that_needs_all_experts_is_refused() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 2, 2))

        def reset_parameters(self) -> None:
            for expert in range(3):
                nn.init.normal_(self.weight[expert])

    module = on_meta(lambda: nn.Sequential(Stack()))
    with pytest.raises(ValueError, match=r"^0\.weight \(Stack\): its initialiser fails where"):
        filled(module, stacks={"0.weight": 3})
    assert isinstance(filled(on_meta(lambda: nn.Sequential(Stack()))), nn.Module)


def test_model_that_is_whole_is_refused() -> None:
    with parameters_on_meta():
        meta = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"of 4 parameters, 2 have values .*1\.weight, 1\.bias"):
        Skeleton(nn.Sequential(meta, nn.Linear(2, 2)))


def test_model_without_values_needs_somebody_to_give_them() -> None:
    meta, real = on_meta(lambda: nn.Linear(2, 2)), nn.Linear(2, 2)
    assert starts_on_meta(real, meta_init=True, path=None)
    assert starts_on_meta(meta, meta_init=False, path="weights.pt")
    assert not starts_on_meta(real, meta_init=False, path="weights.pt")
    with pytest.raises(ValueError, match=r"^2 parameters are on meta \(weight, bias\) and nothing"):
        starts_on_meta(meta, meta_init=False, path=None)


# Building.


def test_hook_keeps_ties_flags_and_marks() -> None:
    def build() -> nn.Module:
        weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        weight.marked = True  # type: ignore[attr-defined]
        module = nn.Module()
        module.a, module.b = weight, weight
        return module

    module = on_meta(build)
    assert module.a is module.b
    assert module.a.is_meta
    assert not module.a.requires_grad
    assert module.a.marked


def test_hook_ends_with_the_context() -> None:
    with parameters_on_meta():
        assert nn.Linear(1, 1).weight.is_meta
    assert not nn.Linear(1, 1).weight.is_meta


def test_skeleton_shares_no_tensor_that_folding_changes() -> None:
    module = on_meta(lambda: decoder(tie_word_embeddings=True))
    skeleton = Skeleton(module)
    twins: dict[str, Tensor] = dict(skeleton.root.named_parameters())
    live = dict(module.named_parameters())
    assert twins.keys() == live.keys()
    assert not any(twins[name] is live[name] for name in live)
    module.lm_head = nn.Identity()
    assert isinstance(skeleton.root.lm_head, nn.Linear)


# ------------------------------------------------------------ values that a constructor sets


def set_by_init(net: nn.Module) -> None:
    nn.init.trunc_normal_(net.emb.weight, std=0.02)


def set_by_identity(net: nn.Module) -> None:
    nn.init.eye_(net.emb.weight)


def set_by_method(net: nn.Module) -> None:
    net.emb.weight.data.uniform_(-0.1, 0.1)


def set_by_item(net: nn.Module) -> None:
    with torch.no_grad():
        net.emb.weight[0] = 0.0


def set_by_data(net: nn.Module) -> None:
    net.emb.weight.data = net.emb.weight.data * 2


def set_by_new_parameter(net: nn.Module) -> None:
    net.emb.weight = nn.Parameter(torch.full((5, 4), 0.5))


def set_by_reset_of_another(net: nn.Module) -> None:
    Outer.reset_parameters(net)


class Outer(nn.Module):
    """Stock modules, one of them set in the constructor."""

    def __init__(self, change: Callable[[nn.Module], None] | None) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4, padding_idx=1)
        self.head = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(4)
        if change is not None:
            change(self)
        self.head.weight.requires_grad_(False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.emb.weight)


CHANGES = (
    set_by_init,
    set_by_identity,
    set_by_method,
    set_by_item,
    set_by_data,
    set_by_new_parameter,
    set_by_reset_of_another,
)


@pytest.mark.parametrize("change", CHANGES)
def test_values_that_a_constructor_sets_are_refused_and_not_lost(
    change: Callable[[nn.Module], None],
) -> None:
    with parameters_on_meta():
        module = Outer(change)
    where = "reset_parameters" if change is set_by_reset_of_another else change.__name__
    with pytest.raises(ValueError, match=rf"emb\.weight: its value is set at .*, in {where}"):
        filled(module.double())


def test_stock_modules_and_flags_are_no_such_values() -> None:
    with parameters_on_meta():
        module = Outer(None)
    assert float(filled(module).emb.weight[1].detach().abs().sum()) == 0.0


def test_a_file_may_give_what_a_constructor_has_set() -> None:
    with parameters_on_meta():
        module = Outer(set_by_init)
    filled(module, given=("emb.weight",))
    assert not any(param.is_meta for param in module.parameters())
    assert torch.equal(module.norm.weight, torch.ones(4))
