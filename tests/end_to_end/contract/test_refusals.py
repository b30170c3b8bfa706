"""What set-up refuses, with its reason."""

from __future__ import annotations

import pytest

from contract.launch import Run

EVERYWHERE = {
    "swa": "ValueError: StochasticWeightAveraging keeps whole copies",
    "ema": "ValueError: EMAWeightAveraging keeps whole copies",
    "lbfgs": "ValueError: LBFGS flattens all parameters",
    "fused_sgd": "ValueError: SGD(fused=True) has no kernel for sharded parameters",
    "foreign": "ValueError: SGD holds a parameter of shape (3,)",
    "compiled": "ValueError: model is wrapped by torch.compile",
    "compiled_core": "ValueError: model is wrapped by torch.compile",
    "direct": "ValueError: parameters directly on Direct (temperature)",
    "bypassing": "RuntimeError: training_step did not call `self.model(...)`",
    "no_moe": "ValueError: Lit has no MoE block",
    "half": "ValueError: precision '16-true' (HalfPrecision) is not supported",
    "engine": "ValueError: precision 'transformer-engine' (EnginePrecision) is not supported",
    "graph": "ValueError: TensorBoardLogger(log_graph=True) runs the model on rank 0 alone",
}
EP2 = {
    "list": "ValueError: model.model.layers.0.mlp.experts (ListExperts) cannot be spread",
    "gpt_oss": "ValueError: model.model.layers.0.mlp.experts (GptOssExperts) cannot be spread",
    "three_experts": "ValueError: model.model.layers.0.mlp.experts: 3 experts cannot be split",
}
TP2 = {
    "headed": "ValueError: self.head has parameters outside self.model",
    "hidden_states": "ValueError: config.output_hidden_states cannot run under tensor_parallel",
    "asked_router_logits": "ValueError: output_router_logits=True cannot be served under tensor",
    "heads": "ValueError: model.model.layers.0.self_attn: 3 heads cannot be split over tp=2",
}
ON_ONE_DEVICE = ("swa", "ema", "compiled", "compiled_core", "no_moe", "half", "engine")


@pytest.mark.parametrize("case", [*EVERYWHERE, *EP2])
def test_refused_under_ep2(case: str, two: Run) -> None:
    for rank in two.ranks("refused@ep2"):
        assert rank[case].startswith({**EVERYWHERE, **EP2}[case]), rank[case]


@pytest.mark.parametrize("case", [*EVERYWHERE, *TP2])
def test_refused_under_tp2(case: str, two: Run) -> None:
    for rank in two.ranks("refused@tp2"):
        assert rank[case].startswith({**EVERYWHERE, **TP2}[case]), rank[case]


@pytest.mark.parametrize("case", EVERYWHERE)
def test_one_device_refuses_only_what_cannot_work_there(case: str, one: Run) -> None:
    message = one("refused@plain")[case]
    if case in ON_ONE_DEVICE or case == "foreign":
        assert message.startswith(EVERYWHERE[case]), message
    else:
        assert message == ""
