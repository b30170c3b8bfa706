"""What set-up refuses: every case returns its error, or nothing if it was accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from contract.models import Lit, mixtral
from contract.scenarios_model import build_unsupported
from contract.scenarios_parity import Headed
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


def refused(context: Context) -> dict[str, Any]:
    messages: dict[str, Any] = {}
    for name, attempt in cases(context).items():
        try:
            attempt()
            messages[name] = ""
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages
