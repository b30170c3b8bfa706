"""The built-in decoder against Mixtral, its own loop path, and finite differences."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_fold.model import decoder as decoder_file
from lightning_fold.model.decoder import (
    Decoder,
    DecoderConfig,
    Experts,
    RMSNorm,
    TopKRouter,
    causal_padding_mask,
    grouped_linear,
    grouped_linear_ref,
    next_token_loss,
    serves_grouped_mm,
)

TINY = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "mlp_only_layers": (1,),
}


def build(*, dtype: torch.dtype = torch.float64, seed: int = 0, **fields: object) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(**(TINY | {"initializer_range": 0.2} | fields))).to(dtype)


def tokens(batch: int = 2, length: int = 12, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TINY["vocab_size"], (batch, length), generator=generator)


def gradients(model: Decoder, ids: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def test_import_stays_free_of_the_package() -> None:
    script = (
        "import importlib, sys, types\n"
        "package = sys.modules['plain_model'] = types.ModuleType('plain_model')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "module = importlib.import_module('plain_model.decoder')\n"
        "module.Decoder(module.DecoderConfig())\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('lightning_fold', "
        "'lightning', 'transformers')])"
    )
    command = [sys.executable, "-c", script, str(Path(decoder_file.__file__).parent)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert printed.stdout.strip() == "[]"


# ---------------------------------------------------------------- against Hugging Face


def mixtral_pair(**fields: object) -> tuple[Decoder, torch.nn.Module]:
    transformers = pytest.importorskip("transformers")
    ours = build(
        dtype=torch.float32, shared_expert_intermediate_size=0, mlp_only_layers=(), **fields
    )
    config = transformers.MixtralConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        sliding_window=None,
        use_cache=False,
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_equals_mixtral(padding: str) -> None:
    ours, theirs = mixtral_pair()
    ids, mask = tokens(3, 10), torch.ones(3, 10, dtype=torch.long)
    if padding != "none":
        hidden = slice(0, 4) if padding == "left" else slice(6, 10)
        mask[1, hidden] = 0
    labels = ids.masked_fill(mask == 0, -100)
    # The output at padding is undefined, so nobody asks it for the first token after it.
    labels[1, 4] = -100
    inputs = {"labels": labels} | ({} if padding == "none" else {"attention_mask": mask})
    a, b = ours(ids, **inputs), theirs(ids, **inputs)
    assert relative(a.logits[mask == 1], b.logits[mask == 1]) < 1e-5
    assert abs(a.loss - b.loss) < 1e-6
    a.loss.backward()
    b.loss.backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert relative(parameter.grad, expected[name].grad) < 1e-4, name


def test_explicit_positions_equal_mixtral() -> None:
    ours, theirs = mixtral_pair()
    ids, positions = tokens(2, 6), torch.arange(6)[None] + 5
    a, b = ours(ids, position_ids=positions), theirs(ids, position_ids=positions)
    assert relative(a.logits, b.logits) < 1e-5


def test_experts_are_called_by_the_contract() -> None:
    model = build()
    seen = []

    def record(module: Experts, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append([tuple(a.shape) for a in args] + [tuple(output.shape)])

    for module in model.modules():
        if isinstance(module, Experts):
            module.register_forward_hook(record)
    model(tokens(2, 5))
    assert seen == [[(10, 16), (10, 2), (10, 2), (10, 16)]] * 2


def test_layer_and_attention_are_called_as_in_hugging_face() -> None:
    model = build()
    calls: dict[str, tuple[int, set[str]]] = {}

    def note(name: str) -> object:
        def hook(module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            calls[name] = len(args), set(kwargs)

        return hook

    layer = model.model.layers[0]
    layer.register_forward_pre_hook(note("layer"), with_kwargs=True)
    layer.self_attn.register_forward_pre_hook(note("attention"), with_kwargs=True)
    model(tokens())
    names = {"attention_mask", "position_embeddings"}
    assert calls == {"layer": (1, names), "attention": (0, names | {"hidden_states"})}


# ---------------------------------------------------------------- attention and loss


def test_no_position_sees_its_future() -> None:
    model, ids = build(), tokens(1, 12)
    changed = ids.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % TINY["vocab_size"]
    before, after = model(ids).logits, model(changed).logits
    # Not bit for bit: the later tokens change how many rows each expert multiplies at once.
    assert relative(after[:, :7], before[:, :7]) < 1e-12
    assert relative(after[:, 7:], before[:, 7:]) > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_real_token(side: str) -> None:
    model, ids = build(), tokens(1, 8)
    pad, ones = torch.full((1, 5), 3), torch.ones_like(ids)
    order = slice(None, None, -1) if side == "left" else slice(None)
    padded = torch.cat([ids, pad][order], dim=1)
    mask = torch.cat([ones, torch.zeros_like(pad)][order], dim=1)
    real = model(padded, attention_mask=mask).logits[:, mask[0] == 1]
    # Rotary embedding sees differences of positions only, so a shift by the padding is no change.
    assert relative(real, model(ids).logits) < 1e-12


def test_every_position_may_see_itself() -> None:
    mask = causal_padding_mask(torch.tensor([[0, 0, 1, 0]]))
    assert mask.int().tolist() == [[[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]]


def test_fully_masked_rows_give_finite_gradients() -> None:
    model, ids = build(), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[0] = 0
    mask[1, :3] = 0
    assert model(ids, attention_mask=mask).logits.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(model, ids, attention_mask=mask).values())


def test_heads_and_groups_are_read_at_run_time() -> None:
    model, ids = build(mlp_only_layers=(0, 1, 2)), tokens()
    attention = model.model.layers[0].self_attn
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    angles = decoder_file.rotary_angles(hidden, torch.arange(5)[None], model.config)
    whole = attention(hidden, position_embeddings=angles, attention_mask=None)
    parts = []
    for half in range(2):
        torch.manual_seed(0)
        part = decoder_file.Attention(model.config).double()
        for name, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            weight = getattr(attention, name).weight.detach().chunk(2, dim)[half]
            getattr(part, name).weight = torch.nn.Parameter(weight)
        parts.append(part(hidden, position_embeddings=angles, attention_mask=None))
    assert relative(sum(parts), whole) < 1e-12
    assert model(ids).logits.shape == (2, 12, 31)


def test_loss_is_the_mean_over_targets_that_count() -> None:
    logits, labels = torch.randn(2, 4, 7, dtype=torch.float64), torch.randint(0, 7, (2, 4))
    labels[0, 2] = labels[1, 0] = -100
    logs = logits.log_softmax(-1)
    pairs = [(b, s) for b in range(2) for s in range(3) if labels[b, s + 1] != -100]
    expected = -sum(logs[b, s, labels[b, s + 1]] for b, s in pairs) / len(pairs)
    assert len(pairs) == 5
    torch.testing.assert_close(next_token_loss(logits, labels), expected, rtol=1e-12, atol=0)


def test_targets_and_their_number_may_be_given() -> None:
    model, ids = build(), tokens()
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    loss = model(ids, labels=ids).loss
    assert relative(model(ids, labels=shifted, shift_labels=shifted).loss, loss) < 1e-14
    given = model(ids, labels=ids, num_items_in_batch=torch.tensor(44)).loss
    assert relative(given, loss * 22 / 44) < 1e-14


def test_documents_of_a_packed_row_do_not_see_each_other() -> None:
    model, ids = build(), tokens(batch=1)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    together = model(ids, position_ids=positions).logits
    apart = torch.cat([model(part).logits for part in ids.split([5, 7], 1)], 1)
    assert relative(together, apart) < 1e-12
    # Positions that follow one another are one document, wherever they begin; a mask forbids more.
    later = model(ids, position_ids=torch.arange(3, 15)[None]).logits
    assert relative(later, model(ids).logits) < 1e-12
    masked = model(ids, torch.ones_like(ids), position_ids=positions).logits
    assert relative(masked, together) > 1e-3


def test_attention_and_mask_can_be_replaced() -> None:
    model, ids = build(), tokens()
    expected = model(ids, torch.ones_like(ids)).logits
    given = []

    def attend(module, query, key, value, attention_mask, *, scaling, dropout):
        given.append(attention_mask)
        return decoder_file.sdpa_attend(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout
        )

    model.model.mask = lambda attention_mask, position_ids: None
    for layer in model.model.layers:
        layer.self_attn.attend = attend
    assert relative(model(ids, torch.ones_like(ids)).logits, expected) < 1e-12
    assert given == [None] * 3


def test_loss_without_targets_is_zero_with_zero_gradients() -> None:
    model, ids = build(), tokens()
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_fp64_stays_fp64() -> None:
    output = build()(tokens(), labels=tokens())
    assert output.loss.dtype == output.logits.dtype == torch.float64
    norm = RMSNorm(16, 1e-6).double()
    x = torch.randn(4, 16, dtype=torch.float64)
    assert relative(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()) < 1e-14


def test_logits_to_keep_cuts_the_front() -> None:
    model, ids = build(), tokens()
    kept, whole = model(ids, logits_to_keep=3).logits, model(ids).logits
    torch.testing.assert_close(kept, whole[:, -3:], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="logits_to_keep=3 drops logits"):
        model(ids, labels=ids, logits_to_keep=3)


def test_gradients_match_finite_differences() -> None:
    model = build(num_hidden_layers=2, attention_bias=True, num_experts=3, hidden_size=8)
    named = dict(model.named_parameters())
    ids = tokens(2, 5)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])

    def loss(*values: Tensor) -> Tensor:
        replaced = dict(zip(named, values, strict=True))
        inputs = {"attention_mask": mask, "labels": ids}
        return torch.func.functional_call(model, replaced, (ids,), inputs).loss

    assert torch.autograd.gradcheck(loss, tuple(named.values()), fast_mode=True, atol=1e-7)


# ---------------------------------------------------------------- router and experts


def test_router_ranks_and_weighs_by_softmax() -> None:
    for renormalise in (True, False):
        router = TopKRouter(DecoderConfig(**(TINY | {"norm_topk_prob": renormalise}))).double()
        torch.nn.init.normal_(router.weight)
        logits, weights, index = router(torch.randn(9, 16, dtype=torch.float64))
        scores = logits.softmax(-1)
        expected, order = scores.sort(dim=-1, descending=True)
        expected = expected[:, :2]
        if renormalise:
            expected = expected / expected.sum(-1, keepdim=True)
        assert torch.equal(index, order[:, :2])
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


def plain_experts(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[token])
        for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
            gate, up = (experts.gate_up_proj[expert] @ x[token]).chunk(2)
            total = total + weight * (
                experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            )
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=["loop", "grouped"]
)
def test_experts_equal_one_token_at_a_time(dtype: torch.dtype, tolerance: float) -> None:
    experts = build(dtype=dtype).model.layers[0].mlp.experts
    x = torch.randn(11, 16, dtype=dtype, requires_grad=True)
    index = torch.tensor([[0, 1], [3, 0]]).repeat(6, 1)[:11]  # expert 2 gets no row
    weights = torch.rand(11, 2, dtype=dtype, requires_grad=True)
    probe = torch.randn(11, 16, dtype=dtype)
    inputs = (x, weights, experts.gate_up_proj, experts.down_proj)
    actual, expected = experts(x, index, weights), plain_experts(experts, x, index, weights)
    assert relative(actual, expected) < tolerance
    ours = torch.autograd.grad((actual * probe).sum(), inputs)
    reference = torch.autograd.grad((expected * probe).sum(), inputs)
    for a, b in zip(ours, reference, strict=True):
        assert relative(a, b) < tolerance
    assert not ours[2][2].any()


@pytest.mark.parametrize("counts", [[5, 0, 3, 4], [0, 0, 12, 0], [12, 0, 0, 0], [0, 4, 4, 4]])
def test_grouped_mm_equals_the_loop(counts: list[int]) -> None:
    torch.manual_seed(0)
    rows = torch.randn(12, 16, requires_grad=True)
    weight = torch.randn(4, 8, 16, requires_grad=True)
    assert serves_grouped_mm(rows, weight)
    results = []
    for op in (grouped_linear, grouped_linear_ref):
        out = op(rows, weight, torch.tensor(counts))
        results.append((out, *torch.autograd.grad(out.square().sum(), (rows, weight))))
    for a, b in zip(*results, strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "out", "inner", "serves"),
    [
        (torch.float32, 8, 16, True),
        (torch.bfloat16, 8, 16, True),
        (torch.float64, 8, 16, False),
        (torch.float32, 6, 16, False),
        (torch.bfloat16, 8, 60, False),
    ],
)
def test_grouped_mm_is_chosen_where_it_serves(
    dtype: torch.dtype, out: int, inner: int, serves: bool
) -> None:
    rows = torch.randn(6, inner, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, out, inner, dtype=dtype, requires_grad=True)
    assert serves_grouped_mm(rows, weight) is serves
    assert not serves_grouped_mm(rows[:0], weight)
    grouped_linear(rows, weight, torch.tensor([2, 4, 0])).square().sum().backward()
    assert rows.grad.isfinite().all()
    assert not weight.grad[2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_tokens_keep_a_graph(dtype: torch.dtype) -> None:
    experts = build(dtype=dtype).model.layers[0].mlp.experts
    x = torch.zeros(0, 16, dtype=dtype, requires_grad=True)
    out = experts(x, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2, dtype=dtype))
    assert out.shape == (0, 16)
    out.sum().backward()
    assert not experts.gate_up_proj.grad.any()
    assert not experts.down_proj.grad.any()


def test_autocast_computes_experts_in_its_dtype() -> None:
    model, seen = build(dtype=torch.float32), []
    experts = model.model.layers[0].mlp.experts
    gate = experts._apply_gate
    experts._apply_gate = lambda x: (seen.append(x.dtype), gate(x))[1]
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens(), labels=tokens())
    output.loss.backward()
    assert seen == [torch.bfloat16]
    assert output.loss.dtype == torch.float32
    assert relative(output.logits.float(), model(tokens()).logits) < 0.05
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_bf16_model_runs() -> None:
    output = build(dtype=torch.bfloat16)(tokens(), labels=tokens())
    output.loss.backward()
    assert output.loss.dtype == torch.float32


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_gradient(dropout: float) -> None:
    results = []
    for on in (False, True):
        options = {"hidden_dropout": dropout, "attention_dropout": dropout}
        model = build(gradient_checkpointing=on, **options)
        torch.manual_seed(7)
        results.append(gradients(model, tokens()))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_checkpointing_recomputes_in_training_only() -> None:
    model, calls = build(gradient_checkpointing=True), []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model.eval()
    gradients(model, tokens())
    assert len(calls) == 1
    model.train()
    gradients(model, tokens())
    assert len(calls) == 3


def test_dropout_acts_in_training_only() -> None:
    for field in ("hidden_dropout", "attention_dropout"):
        model, plain = build(**{field: 0.4}), build()
        assert not torch.allclose(model(tokens()).logits, model(tokens()).logits), field
        assert torch.equal(model.eval()(tokens()).logits, plain(tokens()).logits), field


def test_tied_head_is_the_embedding() -> None:
    model = build(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" in model.state_dict()


def test_initial_weights_follow_the_seed_and_the_scale() -> None:
    fields = {"initializer_range": 0.02, "hidden_size": 64, "attention_bias": True}
    a, b, c = (build(seed=seed, **fields).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    assert a["model.layers.0.self_attn.o_proj.weight"].std() == pytest.approx(
        0.02 / math.sqrt(6), rel=0.05
    )
    assert a["model.layers.0.mlp.experts.gate_up_proj"].std() == pytest.approx(0.02, rel=0.05)
    assert a["model.layers.2.input_layernorm.weight"].eq(1).all()
    assert not a["model.layers.0.self_attn.q_proj.bias"].any()


@pytest.mark.parametrize("tied", [False, True])
def test_active_parameters_leave_out_idle_experts(tied: bool) -> None:
    model = build(tie_word_embeddings=tied, attention_bias=True)
    total = sum(p.numel() for p in model.parameters())
    one_expert = 3 * 16 * 8
    assert model.config.num_active_parameters == total - 2 * (4 - 2) * one_expert


def test_counting_parameters_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert DecoderConfig().num_active_parameters > 0
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads=3 must be a divisor of hidden_size=16"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must be a divisor of num_attention"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok=5 must be in 1\.\.4"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"mlp_only_layers": [0, 3]}, r"mlp_only_layers=\(0, 3\) must be in 0\.\.2"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size=-1"),
        ({"hidden_dropout": 1.0}, "hidden_dropout=1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**(TINY | fields))


def test_config_is_hashable_and_derives_the_head_width() -> None:
    config = DecoderConfig(**(TINY | {"mlp_only_layers": [1]}))
    assert hash(config) == hash(DecoderConfig(**TINY))
    assert config.head_dim == 4
