"""Save under one mapping, resume under another: weights, moments and the next step, by value.

Every mapping trains the same global batch, so the single-process run on it is the reference of all.
A case either trains and saves (no sources), or resumes from what other cases have saved, in both
forms, and compares. Starting ranks is `launch`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_fold.model import decoder
from lightning_fold.strategy import FoldedMoEStrategy
from lightning_fold.verify import cases
from lightning_fold.verify.harness import be_quiet, build_strategy, build_trainer
from lightning_fold.verify.plan import Case
from lightning_fold.verify.worker import leave_groups

ROWS, LENGTH = 8, 12
"""The global batch: sequences with equally many targets, so a mean of means is the mean."""
SAVED_AT = 2
"""Steps before the save; one more follows."""
FORMS = ("folder", "file")


@dataclass(frozen=True)
class Resharding(Case):
    """One mapping that saves, or that resumes from `sources`.

    Attributes:
        optimizer: AdamW or SGD with momentum, in two parameter groups.
        sources: Keys of the cases that have saved.
    """

    optimizer: Literal["adamw", "sgd"] = "adamw"
    sources: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of the case in folders and test ids."""
        full = ".full" if self.shard == "full" else ""
        role = f".from.{'+'.join(self.sources)}" if self.sources else ""
        feature = f".{self.feature}" if self.feature else ""
        return f"{self.mapping}.{self.model}.{self.optimizer}{feature}{full}{self._pipeline}{role}"


class ReshardModule(pl.LightningModule):
    """A model, its step, two parameter groups and the global batch of every epoch."""

    def __init__(self, case: Resharding, *, seed: int = 0) -> None:
        super().__init__()
        self.case = case
        self.model = cases.build_model(case.model, decoder=decoder)
        if seed:
            with torch.no_grad():
                for param in self.model.parameters():
                    param.add_(torch.randn_like(param))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of this rank's rows."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        """One step an epoch: the global batch, dealt by the strategy's sampler arguments."""
        rows = [{name: value[i] for name, value in batch().items()} for i in range(ROWS)]
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        data: Any = rows
        sampler: Any = DistributedSampler(data, shuffle=False, **kwargs)
        return DataLoader(data, batch_size=ROWS // kwargs["num_replicas"], sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Two groups that the parameters' order does not follow."""
        return build_optimizer(self.model, self.case.optimizer)


def batch() -> dict[str, Tensor]:
    """The global batch."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, cases.VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def build_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """AdamW or SGD with momentum; vectors in the first group."""
    vectors = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() != 1]
    groups: Any = [{"params": vectors, "weight_decay": 0.0}, {"params": others, "lr": 0.02}]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1)


def reference(case: Resharding) -> dict[str, Any]:
    """The same training in plain torch: state at the save, weights one step later."""
    model = cases.build_model(case.model, decoder=decoder).double()
    optimizer = build_optimizer(model, case.optimizer)
    kept: dict[str, Any] = {}
    for step in range(SAVED_AT + 1):
        if step == SAVED_AT:
            kept = {"weights": _cloned(model.state_dict()), "moments": moments(model, optimizer)}
        optimizer.zero_grad()
        model(**batch()).loss.backward()
        optimizer.step()
    return {**kept, "next": _cloned(model.state_dict())}


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of a plain optimizer's state as `KEY:NAME`."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    return {
        f"{key}:{names[param]}": value.clone()
        for param, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor) and value.dim()
    }


def run_resharding(case: Case, folder: Path) -> None:
    """Run one case. Collective over all ranks; rank 0 writes `errors.json`."""
    assert isinstance(case, Resharding), case
    be_quiet()
    if not case.sources:
        _train_and_save(case, folder)
        leave_groups()
        return
    expected = torch.load(folder.parent / "reference.pt", weights_only=True)
    errors = {
        f"{source} {form}": _resume(case, folder.parent / source / form, expected)
        for source in case.sources
        for form in FORMS
    }
    (folder / f"errors.{torch.distributed.get_rank()}.json").write_text(json.dumps(errors))
    leave_groups()


def _train_and_save(case: Resharding, folder: Path) -> None:
    for form in FORMS:
        strategy = build_strategy(case, sharded=form == "folder")
        trainer = _trainer(case, strategy, max_epochs=SAVED_AT)
        trainer.fit(ReshardModule(case))
        trainer.save_checkpoint(folder / form)


class _Resumed(pl.Callback):
    """What has been loaded, before the next step."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.weights = strategy.consolidate(pl_module.state_dict())
        names: dict[Tensor, str] = {p: name for name, p in pl_module.named_parameters()}
        (optimizer,) = trainer.optimizers
        self.moments = {}
        keys = sorted({k for values in optimizer.state.values() for k in values if k != "step"})
        for key in keys:
            live = {names[p]: values[key] for p, values in optimizer.state.items()}
            whole = strategy.consolidate(live)
            self.moments |= {f"{key}:{name}": value for name, value in whole.items()}


def _resume(case: Resharding, path: Path, expected: Mapping[str, Any]) -> dict[str, float]:
    resumed = _Resumed()
    strategy = build_strategy(case, sharded=True)
    module = ReshardModule(case, seed=1)
    trainer = _trainer(case, strategy, max_epochs=SAVED_AT + 1, callbacks=[resumed])
    trainer.fit(module, ckpt_path=str(path))
    assert trainer.global_step == SAVED_AT + 1, trainer.global_step
    after = strategy.consolidate(module.state_dict())
    if not strategy.is_global_zero:
        return {}
    kept = {f"model.{n}": v for n, v in expected["weights"].items()}
    then = {f"model.{n}": v for n, v in expected["next"].items()}
    moved = {f"{n.replace(':', ':model.', 1)}": v for n, v in expected["moments"].items()}
    return {
        **_errors("weights", resumed.weights, kept),
        **_errors("moments", resumed.moments, moved),
        **_errors("next", after, then),
    }


def _errors(what: str, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Worst relative error of all tensors, and of gate and up rows by themselves."""
    if set(got) != set(wanted):
        return {what: float("inf"), f"{what} names": float("inf")}
    errors = {what: max(_relative(got[name], wanted[name]) for name in wanted)}
    for name in wanted:
        if name.endswith("gate_up_proj"):
            kind = f"{what} {name.partition(':')[0]}" if ":" in name else what
            for half, g, w in zip(
                ("gate", "up"), got[name].chunk(2, 1), wanted[name].chunk(2, 1), strict=True
            ):
                key = f"{kind} {half}"
                errors[key] = max(errors.get(key, 0.0), _relative(g, w))
    return errors


def _relative(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    scale = float(wanted.norm())
    return float((got - wanted).norm()) / scale if scale else float(got.norm())


def _trainer(case: Resharding, strategy: FoldedMoEStrategy, **options: Any) -> pl.Trainer:
    return build_trainer(case, strategy, use_distributed_sampler=False, **options)


def _cloned(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}
