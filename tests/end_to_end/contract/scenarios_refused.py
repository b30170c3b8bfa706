"""What set-up refuses: every case returns its error, or nothing if it was accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from contract.models import Lit, mixtral
from contract.scenarios_loop import Generating
from contract.scenarios_model import build_unsupported
from contract.scenarios_parity import Headed, Manual, Toggling, experts_and_rest
from contract.worker import Context


class Direct(Lit):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))


class Bypassing(Lit):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model.lm_head(self.model.model(batch["input_ids"]).last_hidden_state).mean()


class Asking(Lit):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch, output_router_logits=True).loss


class Silent(Lit):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.zeros((), requires_grad=True)


class Counting(Lit):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch, num_items_in_batch=7).loss


class Iterating(Lit):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return self.loss(next(dataloader_iter)[0])


class Uneven(Lit):
    def split_batch(self, batch: dict[str, Tensor], num_microbatches: int) -> list[Any]:
        return [batch] * (num_microbatches + 1)


class EnginePrecision(Precision):
    precision = "transformer-engine"


def _optimizer(kind: Any, **options: Any) -> Callable[[Lit], Any]:
    return lambda module: kind(module.parameters(), lr=0.1, **options)


def _foreign(module: Lit) -> Any:
    return torch.optim.SGD([*module.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)


def _plain_mlp() -> Any:
    model = mixtral()
    for layer in model.model.layers:
        layer.mlp = nn.Linear(16, 16).double()
    return model


def _compiled() -> Any:
    module = mixtral()
    module.compile()
    return module


def cases(context: Context) -> dict[str, Callable[[], Any]]:
    def fit(module: Lit, **trainer: Any) -> Callable[[], Any]:
        return lambda: context.trainer(**trainer).fit(module)

    if context.mapping == "pp2":
        return _under_pipelines(context, fit)
    everywhere = {
        "swa": fit(Lit(mixtral()), callbacks=[StochasticWeightAveraging(1e-2)]),
        "ema": fit(Lit(mixtral()), callbacks=[EMAWeightAveraging()]),
        "lbfgs": fit(Lit(mixtral(), optimizers=_optimizer(torch.optim.LBFGS))),
        "fused_sgd": fit(Lit(mixtral(), optimizers=_optimizer(torch.optim.SGD, fused=True))),
        "foreign": fit(Lit(mixtral(), optimizers=_foreign)),
        "compiled": fit(Lit(_compiled())),
        "compiled_core": fit(Lit(torch.compile(mixtral()))),
        "direct": fit(Direct(mixtral())),
        "bypassing": fit(Bypassing(mixtral())),
        "no_moe": fit(Lit(_plain_mlp())),
        "half": lambda: context.trainer(precision="16-true"),
        "engine": lambda: context.trainer(plugins=[EnginePrecision()]),
        "graph": fit(
            Lit(mixtral()),
            logger=TensorBoardLogger(context.folder, log_graph=True, version=0),
        ),
    }
    return everywhere | _by_mapping(context, fit)


def _by_mapping(context: Context, fit: Any) -> dict[str, Callable[[], Any]]:
    if context.mapping == "ep2":
        return {
            "list": fit(Lit(build_unsupported("list"))),
            "gpt_oss": fit(Lit(build_unsupported("gpt_oss"))),
            "three_experts": fit(Lit(mixtral(num_local_experts=3))),
        }
    return {
        "headed": fit(Headed(mixtral())),
        "hidden_states": fit(Lit(mixtral(output_hidden_states=True))),
        "asked_router_logits": fit(Asking(mixtral())),
        "heads": fit(Lit(mixtral(num_attention_heads=3, num_key_value_heads=3))),
    }


def _under_pipelines(context: Context, fit: Any) -> dict[str, Callable[[], Any]]:
    def validate(module: Lit) -> Callable[[], Any]:
        trainer = context.trainer(limit_val_batches=1)
        return lambda: trainer.validate(module, verbose=False)

    two_optimizers = {"optimizers": experts_and_rest}
    return {
        "manual": fit(Manual(mixtral())),
        "toggling": fit(Toggling(mixtral(), **two_optimizers)),
        "iterating": fit(Iterating(mixtral())),
        "batch_size": fit(Lit(mixtral()), callbacks=[BatchSizeFinder()]),
        "headed": fit(Headed(mixtral())),
        "direct": fit(Direct(mixtral())),
        "bypassing": fit(Bypassing(mixtral())),
        "silent": fit(Silent(mixtral())),
        "asked_router_logits": fit(Asking(mixtral())),
        "hidden_states": fit(Lit(mixtral(output_hidden_states=True))),
        "counting": fit(Counting(mixtral())),
        "generate": validate(Generating(mixtral())),
        "uneven": fit(Uneven(mixtral())),
    }


def refused(context: Context) -> dict[str, Any]:
    messages: dict[str, Any] = {}
    for name, attempt in cases(context).items():
        try:
            attempt()
            messages[name] = ""
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages
