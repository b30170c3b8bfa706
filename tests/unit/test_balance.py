"""Aux losses and the expert bias: units, invariances, what is counted and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_fold.model.balance import Balance, with_losses
from lightning_fold.model.decoder import Decoder, DecoderConfig, DecoderOutput
from lightning_fold.model.inspect import find_parts
from lightning_fold.model.routing import apply_routing, install_balance, plan_routing
from lightning_fold.model.token_layout import TokenWatch
from lightning_fold.moe import balance as formulas
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.router_options import FORMULAS, parse_options
from lightning_fold.topology.folding import Folding
from lightning_fold.verify.plain_router import PlainRouting

VOCABULARY = 31
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "moe_intermediate_size": 8,
    "initializer_range": 0.3,
}
ALONE = Folding.from_id("tp1cp1dp1pp1-etp1ep1edp1")
SPREAD = Folding.from_id("tp2cp1dp1pp1-etp1ep1edp2")


class OneRank:
    """All that balancing asks of a Comm."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def size(self, axis: str) -> int:
        return 1

    def rank(self, axis: str) -> int:
        return 0

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor:
        self.calls.append(axis)
        return x.clone()


class OfTwo(OneRank):
    """One of two dp ranks, each a thread."""

    def __init__(self, number: int, shared: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.number, self.shared, self.barrier = number, shared, barrier

    def size(self, axis: str) -> int:
        return 2 if axis in ("dp", "stage") else 1

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor:
        if self.size(axis) == 1:
            return x.clone()
        self.shared[self.number] = x.clone()
        self.barrier.wait(60)
        total = self.shared[0] + self.shared[1]
        self.barrier.wait(60)
        return total


class Module(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def build(**fields: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**(TINY | fields))).double()


def balanced(
    model: nn.Module,
    options: dict[str, Any],
    *,
    router: str = "model",
    comm: Any = None,
    folding: Folding = ALONE,
) -> Balance | None:
    """What `fold_model` does about routing, on this process alone."""
    comm, tokens, module = comm or OneRank(), RunningTokens(), Module(model)
    parts = find_parts(module)
    plan = plan_routing(module, parts, parse_options(router, options), folding)
    TokenWatch(tokens, comm).install(parts)
    plan = apply_routing(plan, tokens)
    return install_balance(plan, parts, comm=comm, tokens=tokens)


def batch(rows: int, *, seed: int = 0, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, 9), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 6:] = 0
        mask[-1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def part(whole: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: value[start:stop] for name, value in whole.items()}


def router_grads(model: nn.Module) -> Tensor:
    grads = [p.grad for name, p in model.named_parameters() if name.endswith("gate.weight")]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def aux_only(formula: str, coefficient: float = 1.0) -> dict[str, Any]:
    return {"aux_losses": [{"formula": formula, "coefficient": coefficient}]}


def gradient(options: dict[str, Any], batches: list[dict[str, Tensor]], **fields: Any) -> Tensor:
    """Of the aux losses alone, over microbatches that are accumulated."""
    model = build(**fields)
    balanced(model, options)
    for microbatch in batches:
        (model(**microbatch).aux_loss / len(batches)).backward()
    return router_grads(model)


# ------------------------------------------------------------ invariances


@pytest.mark.parametrize("formula", [*FORMULAS, "z_loss"])
def test_equals_the_textbook_on_one_rank(formula: str) -> None:
    options = {"z_loss": 0.5} if formula == "z_loss" else aux_only(formula)
    model, reference = build(), build()
    balanced(model, options)
    plain = PlainRouting(reference, router_options=options)
    for seed in (0, 1):
        inputs = batch(3, seed=seed) | {"labels": batch(3, seed=seed)["input_ids"]}
        loss = model(**inputs).loss
        loss.backward()
        ((_, expected),) = plain.forward_backward([inputs], 1.0)
        assert torch.allclose(loss.detach(), expected, rtol=1e-12)
    assert torch.allclose(router_grads(model), router_grads(reference), rtol=1e-10, atol=1e-14)


def test_per_sequence_is_invariant_to_microbatches() -> None:
    whole = batch(4)
    halves = [part(whole, 0, 2), part(whole, 2, 4)]
    one, two = (gradient(aux_only("per_sequence"), b) for b in ([whole], halves))
    assert torch.allclose(one, two, rtol=1e-10)
    # The others have a unit that is cut, so this comparison can see a difference.
    one, two = (gradient(aux_only("per_layer"), b) for b in ([whole], halves))
    assert not torch.allclose(one, two, rtol=1e-2)


def run_two(options: dict[str, Any], whole: dict[str, Tensor]) -> list[Tensor]:
    """Gradients of two dp ranks with half of the sequences each, each loss divided by dp."""
    shared, barrier = [None, None], threading.Barrier(2)
    grads: list[Any] = [None, None]

    def rank(number: int, model: nn.Module) -> None:
        inputs = part(whole, 2 * number, 2 * number + 2)
        (model(**inputs).aux_loss / 2).backward()
        grads[number] = router_grads(model)

    threads = []
    for number in (0, 1):
        model = build()
        balanced(model, options, comm=OfTwo(number, shared, barrier))
        threads.append(threading.Thread(target=rank, args=(number, model)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return grads


def test_global_batch_is_invariant_to_dp() -> None:
    whole = batch(4)
    grads = run_two(aux_only("global_batch"), whole)
    expected = gradient(aux_only("global_batch"), [whole])
    assert torch.allclose(grads[0] + grads[1], expected, rtol=1e-10)


def test_global_batch_counts_the_microbatches_before() -> None:
    model = build()
    balance = balanced(model, aux_only("global_batch"))
    assert balance is not None
    first = [model(**batch(2, seed=seed)).aux_loss.item() for seed in (0, 1)]
    balance.close_batch(torch.optim.SGD(model.parameters(), lr=0.1))
    again = [model(**batch(2, seed=seed)).aux_loss.item() for seed in (1, 0)]
    assert first[0] != again[1]
    assert first[1] != again[0]


@pytest.mark.parametrize("formula", FORMULAS)
def test_even_load_gives_one_a_layer_and_top_k_for_the_model_formula(formula: str) -> None:
    model = build()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("gate.weight"):
                param.zero_()
    balanced(model, aux_only(formula), router="balanced")
    # 2 sequences of 8 tokens, top-2 of 8 experts: every expert is taken equally often.
    out = model(torch.zeros(2, 8, dtype=torch.long))
    assert out.aux_loss.item() == pytest.approx(2.0)


# ------------------------------------------------------------ what is counted


def test_tokens_at_padding_change_nothing() -> None:
    inputs = batch(3)
    other = inputs | {"input_ids": inputs["input_ids"].clone()}
    other["input_ids"][0, 6:] = 7
    options = {"aux_losses": [{"formula": f, "coefficient": 0.1} for f in FORMULAS], "z_loss": 0.1}
    values = []
    for given in (inputs, other):
        model = build()
        balanced(model, options)
        values.append(model(**given).aux_loss.item())
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_nan_at_padding_does_not_spread() -> None:
    logits, index = torch.randn(6, 4).double(), torch.zeros(6, 1, dtype=torch.long)
    logits[4:] = torch.nan
    layout_mask = torch.tensor([[True] * 4 + [False] * 2])

    class Layout:
        num_sequences, num_tokens = 1, 6

        def valid_T(self) -> Tensor:
            return layout_mask[0]

    routed = formulas.Routed(logits, index, "softmax", Layout())  # type: ignore[arg-type]
    load = formulas.local_load(routed)
    assert load.counts_BE.tolist() == [[4, 0, 0, 0]]
    assert torch.isfinite(load.probs_BE).all()
    assert torch.isfinite(load.squares)


def test_sequence_of_padding_alone_counts_as_zero() -> None:
    inputs = batch(2, padded=False)
    alone = gradient(aux_only("per_sequence"), [part(inputs, 0, 1)])
    inputs["attention_mask"][1] = 0
    beside = gradient(aux_only("per_sequence"), [inputs])
    assert torch.allclose(alone / 2, beside, rtol=1e-10)


def test_no_tokens_give_zero_and_a_graph() -> None:
    logits = torch.zeros(0, 4, requires_grad=True)
    routed = formulas.Routed(logits, torch.zeros(0, 2, dtype=torch.long), "sigmoid", None)
    load = formulas.local_load(routed)
    for value in (formulas.per_layer(load), formulas.per_sequence(load), formulas.z_loss(load)):
        assert value.item() == 0
        value.backward(retain_graph=True)


@pytest.mark.parametrize("repeats", [False, True])
def test_layers_that_backward_repeats_are_counted_once(repeats: bool) -> None:
    options = aux_only("per_layer") | {"bias_update_rate": 0.1}
    model = build(use_expert_bias=True, gradient_checkpointing=repeats)
    balance = balanced(model, options)
    inputs = batch(3)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert balance is not None
    assert [int(c.sum()) for c in balance._own.values()] == [2 * 22, 2 * 22]
    assert int(inputs["attention_mask"].sum()) == 22
    plain = build(use_expert_bias=True)
    balanced(plain, options)
    plain(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert torch.allclose(router_grads(model), router_grads(plain), rtol=1e-12)


def test_only_training_with_gradients_counts() -> None:
    model = build(use_expert_bias=True)
    balance = balanced(model, aux_only("per_layer") | {"bias_update_rate": 0.1})
    assert balance is not None
    with torch.no_grad():
        assert model(**batch(2)).aux_loss is None
    model.eval()
    out = model(**batch(2), labels=batch(2)["input_ids"])
    assert out.aux_loss is None
    assert not balance._own


def test_reentrant_checkpointing_is_refused() -> None:
    model = build()
    balanced(model, aux_only("per_layer"))
    gate = model.model.layers[0].mlp.gate
    forward = gate.forward

    def without_graph(hidden: Tensor) -> Any:
        with torch.no_grad():
            return forward(hidden)

    gate.forward = without_graph
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate ran without .*use_reentrant': False"):
        model(**batch(2))


# ------------------------------------------------------------ the bias


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> None:
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()


def biases(model: Any) -> Tensor:
    return torch.stack([layer.mlp.gate.e_score_correction_bias for layer in model.model.layers])


def with_bias() -> tuple[Any, Balance, torch.optim.Optimizer]:
    model = build(use_expert_bias=True, scoring_func="sigmoid")
    balance = balanced(model, {"bias_update_rate": 0.25})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert balance is not None
    balance.watch([optimizer])
    return model, balance, optimizer


def test_bias_moves_once_a_step_by_the_counts_of_all_its_microbatches() -> None:
    model, balance, optimizer = with_bias()
    seen = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda m, a, out: seen.append(out[2]))
    first, second = batch(2, padded=False), batch(2, seed=1, padded=False)
    model(**first).logits.sum().backward()
    assert not biases(model).any()
    step(model, optimizer, second)
    counts = torch.bincount(torch.cat(seen).flatten(), minlength=8).double()
    assert torch.equal(biases(model)[0], 0.25 * (counts.mean() - counts).sign())
    balance.close_batch(optimizer)
    before, seen[:] = biases(model)[0], []
    step(model, optimizer, second)
    counts = torch.bincount(torch.cat(seen).flatten(), minlength=8).double()
    assert torch.equal(biases(model)[0] - before, 0.25 * (counts.mean() - counts).sign())


def test_skipped_step_moves_nothing_and_its_counts_are_forgotten() -> None:
    model, balance, optimizer = with_bias()
    model(**batch(2)).logits.sum().backward()
    # What `strategy.optimizer_step` does when a scaler does not call the optimizer.
    balance.close_batch(optimizer)
    assert not balance._own
    # A fused optimizer is called, and told.
    fused = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    balance.watch([fused])
    fused.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    step(model, fused, batch(2))
    assert balance._own
    assert not biases(model).any()


def test_watching_again_moves_once() -> None:
    model, balance, optimizer = with_bias()
    balance.watch([optimizer])
    step(model, optimizer, batch(2))
    assert biases(model).abs().max() == 0.25


def test_counts_of_a_fit_that_ended_between_steps_are_forgotten() -> None:
    model, balance, optimizer = with_bias()
    model(**batch(2)).logits.sum().backward()
    assert balance._own
    balance.watch([optimizer])
    assert not balance._own


def test_counts_are_exact_and_ties_with_the_mean_rest() -> None:
    huge = 2**40
    counts = torch.tensor([huge, huge + 1, huge - 1, huge])
    assert formulas.bias_step(counts).tolist() == [0, -1, 1, 0]
    assert formulas.bias_step(torch.zeros(4, dtype=torch.long)).tolist() == [0] * 4


def test_narrow_bias_becomes_fp32() -> None:
    model = build(use_expert_bias=True).bfloat16()
    balanced(model, {"bias_update_rate": 1e-3})
    assert model.model.layers[0].mlp.gate.e_score_correction_bias.dtype == torch.float32
    model(**batch(2), labels=batch(2)["input_ids"]).loss.backward()


# ------------------------------------------------------------ folded and balanced routers


def test_folded_without_options_decides_as_the_model() -> None:
    for fields in ({}, {"scoring_func": "sigmoid", "n_group": 4, "topk_group": 2}):
        model, own = build(**fields), build(**fields)
        balanced(model, {}, router="folded")
        assert torch.equal(model(**batch(2)).logits, own(**batch(2)).logits)


def test_folded_adds_a_bias_that_checkpoints_hold() -> None:
    model = build()
    balanced(model, {"bias_update_rate": 0.1}, router="folded")
    assert "model.layers.0.mlp.gate.e_score_correction_bias" in model.state_dict()


def test_jitter_acts_in_training_alone() -> None:
    inputs = batch(2)
    jittered, plain = build(router_jitter_noise=0.5), build()
    folded = build()
    balanced(folded, {"input_jitter": 0.5}, router="folded")
    expected = plain(**inputs).logits
    for model in (jittered, folded):
        assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
        model.eval()
        assert torch.equal(model(**inputs).logits, expected)


def test_balanced_spreads_evenly_and_keeps_gradients() -> None:
    model = build()
    seen: list[Tensor] = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda m, a, out: seen.append(out[2]))
    balanced(model, {}, router="balanced")
    inputs = batch(4, padded=False)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert torch.bincount(seen[0].flatten(), minlength=8).tolist() == [9] * 8
    assert router_grads(model).abs().max() > 0


# ------------------------------------------------------------ outputs and refusals


class Bare(NamedTuple):
    loss: Tensor | None
    logits: Tensor


def test_losses_reach_every_kind_of_output() -> None:
    transformers = pytest.importorskip("transformers")
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    hf = transformers.modeling_outputs.MoeCausalLMOutputWithPast(loss=one, logits=two)
    out = with_losses(hf, two, two)
    assert (out.loss, out.aux_loss, out["aux_loss"], out.logits) == (3, 2, 2, 2)
    assert with_losses(one, two, two) == 3
    assert with_losses(Bare(one, one), two, two) == Bare(torch.tensor(3.0), one)
    assert with_losses(DecoderOutput(None, one), two, two).aux_loss == 2
    assert with_losses({"loss": one}, two, two) == {"loss": 3}
    with pytest.raises(ValueError, match="returns Bare without `loss` and without a field"):
        with_losses(Bare(None, one), two, two)
    with pytest.raises(ValueError, match="an aux loss of its own"):
        with_losses(DecoderOutput(one, one, one), two, two)


def mixtral(**fields: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {k: v for k, v in TINY.items() if k not in ("moe_intermediate_size",)}
    config = transformers.MixtralConfig(
        **sizes, num_key_value_heads=2, intermediate_size=8, **fields
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def no_router(model: Any) -> nn.Module:
    model.model.layers[1].mlp.gate = None
    return model


def other_router(model: Any) -> nn.Module:
    model.model.layers[1].mlp.gate.forward = lambda hidden: hidden
    return model


def asking_router(model: Any) -> nn.Module:
    model.model.layers[1].mlp.gate.forward = lambda hidden, input_ids: hidden
    return model


def wide_router(model: Any) -> nn.Module:
    model.model.layers[1].mlp.gate.extra = nn.Linear(4, 4)
    return model


@pytest.mark.parametrize(
    ("change", "router", "options", "told"),
    [
        (no_router, "model", aux_only("model"), r"layers.1.mlp cannot serve aux.*no router"),
        (other_router, "balanced", {}, r"layers.1.mlp.gate cannot serve router='balanced': it do"),
        (asking_router, "folded", {}, r"its forward also takes input_ids"),
        (wide_router, "folded", {}, r"it has further parameters \(extra.weight, extra.bias\)"),
        (None, "folded", {"top_k": 9}, r"layers.0.mlp.gate: top_k=9 of a router must be in 1..8"),
        (None, "model", {"bias_update_rate": 0.1}, r"no expert bias for .*Set router='folded'"),
        (
            None,
            "model",
            {"aux_losses": [{"formula": "model"}]},
            r"the config of Decoder has no `router_aux_loss_coef`",
        ),
    ],
)
def test_refusals_name_the_router_and_the_reason(
    change: Callable[[Any], Any] | None, router: str, options: dict[str, Any], told: str
) -> None:
    model = build()
    if change is not None:
        change(model)
    with pytest.raises(ValueError, match=told):
        balanced(model, options, router=router)


def test_own_aux_loss_of_the_model_is_taken_over_under_tp() -> None:
    inputs = batch(3) | {"labels": batch(3)["input_ids"]}
    fields = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    torch.manual_seed(1)
    theirs = mixtral(**fields)
    torch.manual_seed(1)
    ours = mixtral(**fields)
    balanced(ours, {}, folding=SPREAD)
    for training in (True, False):
        expected, out = (model.train(training)(**inputs) for model in (theirs, ours))
        assert torch.allclose(out.loss, expected.loss, rtol=1e-6)
        assert torch.allclose(out.aux_loss, expected.aux_loss, rtol=1e-5)
        assert out.router_logits is None
    assert ours.config.output_router_logits is True


def test_coefficient_comes_from_the_config() -> None:
    model = mixtral(router_aux_loss_coef=0.25)
    balance = balanced(model, {"aux_losses": [{"formula": "model"}]})
    assert balance is not None
    assert balance.options.aux_losses[0].coefficient == 0.25


def test_two_sources_of_balance_are_refused() -> None:
    with pytest.raises(ValueError, match="balance the experts twice"):
        balanced(mixtral(output_router_logits=True), aux_only("per_layer"))


def test_per_sequence_needs_the_sequences() -> None:
    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, tokens: Tensor) -> DecoderOutput:
            return self.inner(tokens)

    core = Core()
    balanced(core, aux_only("per_sequence"))
    with pytest.raises(ValueError, match=r"'per_sequence' needs the sequences, and Core.forward"):
        core(batch(2)["input_ids"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"scoring_func": "tanh"}, r"scoring_func=tanh must be one of \('softmax', 'sigmoid'"),
        ({"n_group": 3}, r"n_group=3 must be a divisor of 8"),
        ({"n_group": 4, "num_experts_per_tok": 3}, r"topk_group=1 must be in 2..4"),
        ({"softmax_after_topk": True, "scoring_func": "sigmoid"}, r"softmax_after_topk=True must"),
        ({"router_jitter_noise": 1.0}, r"router_jitter_noise=1.0 must be in \[0, 1\)"),
        ({"router_dtype": "bf16"}, r"router_dtype=bf16 must be one of"),
    ],
)
def test_decoder_refuses_impossible_routers(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DecoderConfig(**(TINY | fields))
