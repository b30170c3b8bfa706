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
_CUT = "Under pipeline_parallel_size > 1 a step has to call the core once"
PP2 = {
    "manual": "ValueError: Manual.automatic_optimization is False: its training_step calls",
    "toggling": "ValueError: Toggling.automatic_optimization is False: its training_step calls",
    "iterating": "ValueError: Iterating.training_step takes `dataloader_iter`, and with pipe",
    # By Lightning itself.
    "batch_size": "MisconfigurationException: The Batch size finder is not supported with dist",
    "headed": "ValueError: self.head has parameters outside self.model",
    "direct": EVERYWHERE["direct"],
    "bypassing": f"ValueError: Bypassing.training_step calls parts of it (`self.model`). {_CUT}",
    "silent": f"ValueError: Silent.training_step does not call it (`self.model`). {_CUT}",
    "asked_router_logits": "ValueError: Asking.training_step asks it for `output_router_logits`",
    "hidden_states": "ValueError: MixtralForCausalLM cannot be cut into pipeline stages: config.",
    "counting": "ValueError: Counting.training_step gives it `num_items_in_batch`, and micro",
    "generate": "ValueError: Generating.validation_step gives it `past_key_values`",
    "uneven": "ValueError: Uneven.split_batch returns 4 microbatches for num_microbatches=3",
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


@pytest.mark.parametrize("case", PP2)
def test_refused_under_pp2(case: str, two: Run) -> None:
    for rank in two.ranks("refused@pp2"):
        assert rank[case].startswith(PP2[case]), rank[case]


@pytest.mark.parametrize("case", EVERYWHERE)
def test_one_device_refuses_only_what_cannot_work_there(case: str, one: Run) -> None:
    message = one("refused@plain")[case]
    if case in ON_ONE_DEVICE or case == "foreign":
        assert message.startswith(EVERYWHERE[case]), message
    else:
        assert message == ""
