"""`expert_precision="fp8_block"`: what set-up refuses, and that it reaches the layers it serves."""

from __future__ import annotations

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from fold_kernels.quantized import BLOCK
from lightning_fold import FoldedMoEStrategy
from lightning_fold.model.decoder import Decoder, DecoderConfig
from lightning_fold.model.fold import check_model
from lightning_fold.model.inspect import find_parts
from lightning_fold.model.swap import swap_experts
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.telemetry import Telemetry
from lightning_fold.topology import doctor
from lightning_fold.topology.folding import Folding

ONE = Folding.from_world(1)
NAME = "model.model.layers.0.mlp.experts"
ONE_RANK = SimpleNamespace(
    global_rank=0,
    telemetry=Telemetry(),
    size=lambda axis: 1,
    to_host=lambda tensor, why: tensor.tolist(),
)


class Wrapped(nn.Module):
    """What a LightningModule is to the strategy."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(DecoderConfig(num_hidden_layers=1, num_experts=4, **sizes))
        self.name = find_parts(self).experts[0].name

    @property
    def experts(self) -> nn.Module:
        return self.get_submodule(self.name)


def refusal(module: nn.Module, folding: Folding = ONE) -> str:
    with pytest.raises(ValueError, match="Change") as caught:
        check_model(module, folding, expert_precision="fp8_block")
    # The same model passes as it is.
    check_model(module, folding)
    return str(caught.value)


def test_the_doctor_knows_the_blocks_of_the_kernels() -> None:
    assert doctor.FP8_BLOCK == BLOCK


def test_a_model_width_that_is_no_multiple() -> None:
    message = refusal(Wrapped(hidden_size=96))
    assert message.startswith(f"{NAME}: model width 96 = 0*128 + 96 cannot be cut into blocks")
    assert message.endswith(
        "legal: 'bf16', or a width that 128 divides.  Change `expert_precision`."
    )


def test_an_expert_width_that_is_no_multiple() -> None:
    message = refusal(Wrapped(moe_intermediate_size=200))
    assert f"{NAME}: expert width 200 = 1*128 + 72 cannot be cut into blocks of 128" in message


def test_an_expert_width_that_etp_cuts_too_narrow() -> None:
    folding = Folding.from_world(8, ep=1, etp=4)
    message = refusal(Wrapped(moe_intermediate_size=256), folding)
    assert "expert width/etp = 256/4 = 64 = 0*128 + 64 cannot be cut" in message
    assert "legal etp: 1 2 (they divide 256/128 = 2 and stage_size/ep = 8/1 = 8)" in message
    assert message.endswith("Change `expert_tensor_parallel_size` or `expert_precision`.")
    check_model(
        Wrapped(moe_intermediate_size=256),
        Folding.from_world(8, etp=2),
        expert_precision="fp8_block",
    )


def test_a_layer_with_its_own_etp_is_judged_by_it() -> None:
    module, narrow = Wrapped(moe_intermediate_size=128), Folding.from_world(2, etp=2)
    with pytest.raises(ValueError, match="expert width/etp = 128/2 = 64"):
        check_model(module, Folding.from_world(2), {0: narrow}, expert_precision="fp8_block")


def test_experts_that_stay_the_models_own() -> None:
    module = Wrapped()
    module.experts.is_transposed = True
    message = refusal(module)
    assert "computes its own experts (its weights are stored transposed" in message
    assert message.endswith("Legal: 'bf16'.  Change `expert_precision`.")


def test_a_model_of_fp64() -> None:
    message = refusal(Wrapped().double())
    assert "which holds weights of fp64, makes the experts compute in torch.float64" in message
    assert "'32-true', 'bf16-true', 'bf16-mixed', '16-mixed'" in message


def test_a_trainer_of_fp64_is_refused_before_any_process_starts() -> None:
    strategy = FoldedMoEStrategy(expert_precision="fp8_block")
    with pytest.raises(ValueError, match=r"Trainer\(precision='64-true'\) makes the experts"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, precision="64-true")


def folded(precision: str) -> Wrapped:
    module = Wrapped()
    swap_experts(
        find_parts(module).experts,
        comm=ONE_RANK,
        dispatcher="auto",
        tokens=RunningTokens(),
        precision=precision,
    )
    return module


@pytest.mark.parametrize("autocast", [False, True])
def test_it_reaches_the_products_of_a_layer(autocast: bool) -> None:
    ids = torch.randint(200, (2, 9))
    found: list[tuple[Tensor, Tensor]] = []
    for precision in ("bf16", "fp8_block"):
        module = folded(precision)
        assert module.experts.forward.precision == precision
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = module.model(ids).logits
        logits.float().square().sum().backward()
        found.append((logits.detach().float(), module.experts.down_proj.grad))
    for wanted, got in zip(*found, strict=True):
        error = (got - wanted).norm() / wanted.norm()
        # Not the same numbers, and not other ones.
        assert 1e-3 < error < 8e-2
