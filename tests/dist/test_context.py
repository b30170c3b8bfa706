"""Models and calls of every kind under context parallelism: the step of a single process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fold.model.decoder import Decoder, DecoderConfig
from lightning_fold.verify.harness import be_quiet, build_strategy, build_trainer
from lightning_fold.verify.launch import run_world
from lightning_fold.verify.plan import Case, Method

MAPPING = "tp1cp2dp1pp1-etp1ep2edp1"
VOCABULARY, LENGTH = 29, 11
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}

Batch = Mapping[str, Any]
Step = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]


def ids(length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, VOCABULARY, (2, length), generator=generator)


def left_padded() -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def packed() -> dict[str, Tensor]:
    positions = torch.cat((torch.arange(4), torch.arange(LENGTH - 4)))[None]
    return {"input_ids": ids(), "position_ids": positions}


def decoder(**options: Any) -> nn.Module:
    sizes = SIZES | {"head_dim": 4, "num_experts": 4, "moe_intermediate_size": 12}
    return Decoder(DecoderConfig(**(sizes | options)))


def hugging_face(kind: str, **options: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **(SIZES | options))
    config._experts_implementation = "eager"
    # With a cache, transformers does not look for documents.
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config)


def checkpointed() -> nn.Module:
    model: Any = hugging_face("mixtral", num_local_experts=4)
    model.activation_checkpointing_enable()
    return model


def qwen2_with_window() -> nn.Module:
    # Its attention function is not told of the window: only the mask has it.
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    sizes = {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 8}
    return hugging_face("qwen2_moe", **window, **sizes)


def deepseek() -> nn.Module:
    """Latent attention: values narrower than keys, keys shared between heads."""
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    routed = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return hugging_face(
        "deepseek_v3",
        **latent,
        **routed,
        v_head_dim=6,
        num_key_value_heads=4,
        moe_intermediate_size=12,
        n_shared_experts=1,
    )


class Wrapped(nn.Module):
    """A core of the user's own, which returns a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        logits: Tensor = self.inner(input_ids, attention_mask, position_ids=position_ids).logits
        return logits * 2


def with_labels(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    out = model(**batch, labels=batch["input_ids"])
    return out.loss, out.loss


def own_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    out = model(**batch)
    logits = out if isinstance(out, Tensor) else out.logits
    # The order of places matters.
    weights = torch.linspace(1, 2, logits[0].numel(), dtype=logits.dtype).view(logits.shape[1:])
    return (logits.tanh() * weights).square().mean(), logits


def own_count(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["input_ids"].masked_fill(batch["input_ids"] % 3 == 0, -100)
    loss = model(**batch, labels=labels, num_items_in_batch=torch.tensor(50)).loss
    return loss, loss


def own_targets(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = F.pad(batch["input_ids"], (0, 2), value=-100)[:, 2:]
    loss = model(**batch, labels=batch["input_ids"], shift_labels=targets).loss
    return loss, loss


def embedded(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    weight = torch.linspace(-1, 1, VOCABULARY * 16, dtype=torch.float64).view(VOCABULARY, 16)
    loss = model(inputs_embeds=F.embedding(batch["input_ids"], weight), labels=batch["input_ids"])
    return loss.loss, loss.loss


@dataclass(frozen=True)
class Scenario:
    """One model, one call."""

    build: Callable[[], nn.Module]
    step: Step = with_labels
    batch: Callable[[], dict[str, Tensor]] = field(default=lambda: {"input_ids": ids()})
    method: Method = "all_gather"
    tolerance: float = 1e-6
    options: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return self.build()


def mixtral(**options: Any) -> nn.Module:
    return hugging_face("mixtral", num_local_experts=4, **options)


def mixtral_with_window() -> nn.Module:
    return mixtral(sliding_window=4)


def token_classifier() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_labels=6)
    config._experts_implementation, config.use_cache = "eager", False
    config.classifier_dropout = 0.0
    return transformers.MixtralForTokenClassification(config)


def dense_and_checkpointed() -> nn.Module:
    return decoder(gradient_checkpointing=True, mlp_only_layers=(0,))


SCENARIOS: Mapping[str, Scenario] = {
    "logits_of_the_decoder": Scenario(decoder, own_loss, left_padded, "ring", 1e-10),
    "logits_of_mixtral": Scenario(mixtral, own_loss, left_padded, "ulysses"),
    "logits_as_a_tensor": Scenario(Wrapped, own_loss, tolerance=1e-10),
    "one_token_in_all": Scenario(
        decoder, own_loss, lambda: {"input_ids": ids(1)[:1]}, "ulysses", 1e-10
    ),
    "number_of_items": Scenario(decoder, own_count, tolerance=1e-10),
    "targets_given": Scenario(decoder, own_targets, left_padded, tolerance=1e-10),
    "embeddings_given": Scenario(mixtral, embedded, method="ring"),
    "decoder_checkpointed": Scenario(dense_and_checkpointed, batch=packed, tolerance=1e-10),
    "mixtral_checkpointed": Scenario(checkpointed, batch=left_padded, method="ring"),
    "window": Scenario(mixtral_with_window, batch=packed, method="ulysses"),
    "window_in_the_mask_alone": Scenario(qwen2_with_window, batch=left_padded, method="ring"),
    "logits_of_a_token_classifier": Scenario(token_classifier, own_loss),
    # Without a mask, attention goes by torch's own kind of mask.
    "every_layer_repeated": Scenario(
        decoder, tolerance=1e-10, options={"activation_checkpointing": "full"}
    ),
    "latent_attention": Scenario(deepseek, batch=left_padded),
    "latent_attention_in_a_ring": Scenario(deepseek, batch=packed, method="ring"),
}


class OneStep(pl.LightningModule):
    """The scenario as a user writes it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario, self.model = scenario, scenario.model()
        self.shown: Tensor | None = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, shown = self.scenario.step(self.model, batch)
        self.shown = shown.detach()
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        data: Any = [self.scenario.batch()]
        return DataLoader(data, batch_size=1, collate_fn=lambda items: items[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def run_scenarios(case: Case, folder: Path) -> None:
    be_quiet()
    for name, scenario in SCENARIOS.items():
        print(name, flush=True)
        module = OneStep(scenario)
        plain = Case("", MAPPING, context_parallel_method=scenario.method)
        strategy = build_strategy(plain, **scenario.options)
        build_trainer(case, strategy, max_steps=1, use_distributed_sampler=False).fit(module)
        weights = strategy.consolidate(dict(module.named_parameters()))
        torch.save({"shown": module.shown, "weights": weights}, folder / f"{name}.{rank_of()}.pt")
    run_drawing(case, folder)


class Drawing(OneStep):
    """Draws outside of the model and watches what dropout draws inside."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.outside = torch.rand(3)
        embedded: list[Tensor] = []
        dropout = self.model.model.dropout
        hook = dropout.register_forward_hook(lambda m, a, out: embedded.append(out == 0))
        loss = super().training_step(batch, batch_idx)
        hook.remove()
        self.inside = embedded[0][:, :4]
        return loss


def decoder_with_dropout() -> nn.Module:
    return decoder(hidden_dropout=0.5)


def run_drawing(case: Case, folder: Path) -> None:
    module = Drawing(Scenario(decoder_with_dropout))
    trainer = build_trainer(case, build_strategy(case), max_steps=1, use_distributed_sampler=False)
    trainer.fit(module)
    reduced = trainer.strategy.reduce(torch.tensor(3.0), reduce_op="sum")
    drawn = {"outside": module.outside, "inside": module.inside, "reduced": reduced}
    torch.save(drawn, folder / f"drawn.{rank_of()}.pt")


def rank_of() -> int:
    return torch.distributed.get_rank()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, case = tmp_path_factory.mktemp("context"), Case("scenarios", MAPPING)
    run = run_world(2, [case], folder, case_timeout=240.0, run=run_scenarios)
    assert run.failure is None, run.failure
    return folder / case.key


def relative(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.dist(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_step_equals_that_of_a_single_process(name: str, results: Path) -> None:
    scenario = SCENARIOS[name]
    model = scenario.model().double().train()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss, shown = scenario.step(model, scenario.batch())
    loss.backward()
    for rank in range(2):
        saved = torch.load(results / f"{name}.{rank}.pt")
        assert relative(saved["shown"], shown.detach()) < scenario.tolerance
    weights = torch.load(results / f"{name}.0.pt")["weights"]
    for key, param in model.named_parameters():
        moved = 0.5 * param.grad if param.grad is not None else torch.zeros_like(param)
        # Of what the step has moved: the weights themselves would hide a small gradient's error.
        error = (weights[f"model.{key}"] - before[key] + moved).norm()
        assert error <= scenario.tolerance * moved.norm() + 1e-15 * before[key].norm(), key


@pytest.mark.dist(2)
@pytest.mark.timeout(600)
def test_peers_draw_the_same_outside_of_the_model_and_reduce_over_dp_alone(results: Path) -> None:
    first, second = (torch.load(results / f"drawn.{rank}.pt") for rank in range(2))
    assert torch.equal(first["outside"], second["outside"])
    assert not torch.equal(first["inside"], second["inside"])
    # The same samples on both ranks: a sum over them would count each twice.
    assert first["reduced"] == second["reduced"] == 3.0
