"""The routing decision: ties, NaN, groups, bias, and equality with Hugging Face's routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fold_kernels.router import RouterSpec, route_ref, router_logits, top_ids, weights_of
from lightning_fold.verify.plain_router import decide

E, D, T = 8, 6, 40


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_scores_go_to_the_lower_id(dtype: torch.dtype) -> None:
    # Wide rows: torch sorts short ones stably anyway.
    values = torch.randint(-2, 3, (60, 90), generator=torch.Generator().manual_seed(3)).to(dtype)
    values[0] = -1.0
    values[0, :4] = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    rows = values.tolist()
    expected = [sorted(range(90), key=lambda e, row=row: (-row[e], e))[:5] for row in rows]
    assert top_ids(values, 5).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ids_differ_in_rows_of_nan_and_infinity(dtype: torch.dtype) -> None:
    logits = draw(4, E, dtype=dtype)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2, ::2] = -torch.inf
    logits[3] = torch.inf
    spec = RouterSpec(top_k=5, num_groups=4, top_groups=3)
    _, index, _ = route_ref(logits, spec, torch.zeros(E))
    assert all(len(set(row)) == 5 for row in index.tolist())


def test_all_equal_logits_take_the_first_experts() -> None:
    _, index, _ = route_ref(torch.zeros(3, E), RouterSpec(top_k=3))
    assert index.tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_the_textbook(scores: Any, groups: tuple[int, int], biased: bool) -> None:
    class Gate:
        weight = draw(E, D, seed=1)
        top_k = 3

    if biased:
        Gate.e_score_correction_bias = draw(E, seed=2) * 0.3
    options = {"scores": scores, "num_groups": groups[0], "top_groups": groups[1]}
    options |= {"renormalise": biased, "scaling_factor": 1.7}
    hidden = draw(T, D)
    logits, weights, index = decide(Gate(), options, hidden)
    spec = RouterSpec(top_k=3, **options)
    bias = getattr(Gate, "e_score_correction_bias", None)
    got = route_ref(router_logits(hidden, Gate.weight), spec, bias)
    assert torch.equal(got[1], index)
    assert torch.allclose(got[0], weights, rtol=1e-12)
    assert got[2].shape == logits.shape


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    logits = draw(T, E)
    bias = torch.zeros(E)
    bias[5] = 10.0
    spec = RouterSpec(top_k=2, scores="sigmoid", renormalise=False)
    weights, index, scores = route_ref(logits, spec, bias)
    assert (index[:, 0] == 5).all()
    assert torch.equal(weights, scores.gather(1, index))
    assert torch.equal(scores, logits.sigmoid())


def test_gradients_of_all_kinds() -> None:
    logits = draw(5, E).requires_grad_()
    specs = [
        RouterSpec(3),
        RouterSpec(3, scores="sigmoid", num_groups=2, top_groups=1),
        RouterSpec(3, scores="sqrt_softplus", renormalise=False, scaling_factor=2.0),
        RouterSpec(3, softmax_after_topk=True),
    ]
    for spec in specs:
        assert torch.autograd.gradcheck(lambda x, s=spec: route_ref(x, s)[0], logits)


def test_scores_are_fp32_at_least_and_the_product_has_its_dtype() -> None:
    hidden, weight = draw(T, D, dtype=torch.bfloat16), draw(E, D, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(hidden, weight, torch.float32)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, hidden.float() @ weight.float().T)
    narrow = router_logits(hidden, weight)
    weights, _, scores = route_ref(narrow, RouterSpec(2))
    assert (narrow.dtype, weights.dtype, scores.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (RouterSpec(9), "top_k"),
        (RouterSpec(0), "top_k"),
        (RouterSpec(2, num_groups=3), "num_groups"),
        (RouterSpec(5, num_groups=4, top_groups=2), "top_groups"),
        (RouterSpec(1, num_groups=4, top_groups=5), "top_groups"),
        (RouterSpec(1, softmax_after_topk=True), "softmax_after_topk"),
        (RouterSpec(2, scores="sigmoid", softmax_after_topk=True), "softmax_after_topk"),
    ],
)
def test_impossible_decisions_are_refused(spec: RouterSpec, field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}=.* must be .*Change `{field}`"):
        spec.check(E)


# ------------------------------------------------------------ Hugging Face's own routers


def hugging_face(family: str) -> tuple[Any, RouterSpec]:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    sizes = {"hidden_size": D, "num_attention_heads": 1, "num_key_value_heads": 1}
    plain = {**sizes, "num_experts": E, "num_experts_per_tok": 3}
    groups = {
        **sizes,
        "n_routed_experts": E,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    }
    mixtral = transformers.MixtralConfig(**sizes, num_local_experts=E)
    v3 = transformers.DeepseekV3Config(num_experts_per_tok=3, **groups)
    v2 = transformers.DeepseekV2Config(
        num_experts_per_tok=3, topk_method="group_limited_greedy", **groups
    )
    oss = transformers.GptOssConfig(**sizes, num_local_experts=E, num_experts_per_tok=3)
    limited = {"num_groups": 4, "top_groups": 2, "scaling_factor": 2.5}
    qwen3 = transformers.Qwen3MoeConfig(**plain, norm_topk_prob=True)
    raw = RouterSpec(3, renormalise=False)
    cases = {
        "mixtral": (MixtralTopKRouter, mixtral, RouterSpec(2)),
        "qwen3_moe": (Qwen3MoeTopKRouter, qwen3, RouterSpec(3)),
        "olmoe": (OlmoeTopKRouter, transformers.OlmoeConfig(**plain), raw),
        "deepseek_v3": (DeepseekV3TopkRouter, v3, RouterSpec(3, scores="sigmoid", **limited)),
        "deepseek_v2": (
            DeepseekV2TopkRouter,
            v2,
            RouterSpec(3, renormalise=False, group_score="max", **limited),
        ),
        "gpt_oss": (GptOssTopKRouter, oss, RouterSpec(3, softmax_after_topk=True)),
    }
    kind, config, spec = cases[family]
    return kind(config), spec


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "deepseek_v2", "gpt_oss"]
)
def test_equals_the_router_of_transformers(family: str) -> None:
    router, spec = hugging_face(family)
    with torch.no_grad():
        router.weight.copy_(draw(E, D, dtype=torch.float32, seed=1))
        for name in ("bias", "e_score_correction_bias"):
            if getattr(router, name, None) is not None:
                getattr(router, name).copy_(draw(E, dtype=torch.float32, seed=2) * 0.2)
    hidden = draw(T, D, dtype=torch.float32)
    theirs, weights, index = router(hidden)
    logits = router_logits(hidden, router.weight, bias_E=getattr(router, "bias", None))
    assert torch.equal(logits, theirs)
    ours, chosen, _ = route_ref(logits, spec, getattr(router, "e_score_correction_bias", None))
    order = index.argsort(dim=1)
    mine = chosen.argsort(dim=1)
    assert torch.equal(index.gather(1, order), chosen.gather(1, mine))
    assert torch.allclose(weights.gather(1, order), ours.gather(1, mine), rtol=1e-6)


def test_weights_of_a_given_choice_are_those_of_the_decision() -> None:
    logits = draw(T, E)
    for spec in (RouterSpec(3), RouterSpec(3, softmax_after_topk=True, scaling_factor=2.0)):
        weights, index, scores = route_ref(logits, spec)
        assert torch.equal(weights_of(logits, scores, index, spec), weights)
