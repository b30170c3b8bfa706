"""Routers on real ranks: copies agree to the bit, the bias is in checkpoints, decisions replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fold.model.replay import RouterReplay
from lightning_fold.verify import cases
from lightning_fold.verify.harness import CaseModule, be_quiet, build_strategy, build_trainer
from lightning_fold.verify.launch import run_world
from lightning_fold.verify.plan import Case

TP2 = Case("decoder-groups", "tp2cp1dp1pp1-etp1ep2edp1", feature="bias")
ETP2 = replace(TP2, mapping="tp2cp1dp1pp1-etp2ep1edp1")


class AfterStart(pl.Callback):
    """What the model has when training starts or goes on."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.biases = biases(pl_module)


def biases(module: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in cases.saved_buffers(module).items()}


def fit(case: Case, *, steps: int, ckpt: Path | None, sharded: bool) -> tuple[Any, Any, Any]:
    module, start = CaseModule(case), AfterStart()
    strategy = build_strategy(case, sharded=sharded)
    trainer = build_trainer(case, strategy, max_steps=steps, callbacks=[start])
    trainer.fit(module, ckpt_path=None if ckpt is None else str(ckpt))
    return module, trainer, start


def equal_on_all_ranks(named: dict[str, Tensor]) -> None:
    for name, value in named.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        copies = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, whole.detach().contiguous())
        assert all(torch.equal(copy, copies[0]) for copy in copies), name


def check_copies_and_checkpoints(case: Case, folder: Path) -> None:
    be_quiet()
    for sharded in (True, False):
        module, trainer, _ = fit(case, steps=2, ckpt=None, sharded=sharded)
        gates = {n: p for n, p in module.named_parameters() if n.endswith("gate.weight")}
        assert len(gates) == 2
        equal_on_all_ranks(gates)
        saved = biases(module)
        assert len(saved) == 2
        equal_on_all_ranks(saved)
        assert all(0 < b.abs().max() <= 2 * 0.05 for b in saved.values())
        trainer.save_checkpoint(folder / f"sharded-{sharded}")
        for other in (case, ETP2):
            path = folder / f"sharded-{sharded}"
            resumed, _, start = fit(other, steps=3, ckpt=path, sharded=sharded)
            assert all(torch.equal(start.biases[name], saved[name]) for name in saved)
            after = biases(resumed)
            assert any(not torch.equal(after[name], saved[name]) for name in saved)
            equal_on_all_ranks(after)
    check_replay(module)
    dist.barrier()
    dist.destroy_process_group()


def check_replay(module: Any) -> None:
    """The folded model, with every rank's own tokens."""
    batch = cases.sub_batch(0, 0)
    replay = RouterReplay(module)
    with torch.no_grad():
        with replay.record():
            expected = module.model(**batch).logits
        with torch.no_grad():
            for _, buffer in module.named_buffers():
                buffer.add_(torch.randn_like(buffer) if buffer.dtype.is_floating_point else 0)
        with replay.replay():
            assert torch.equal(module.model(**batch).logits, expected)


@pytest.mark.dist(2)
def test_copies_agree_and_the_bias_survives_in_both_forms(tmp_path: Path) -> None:
    result = run_world(2, [TP2], tmp_path, run=check_copies_and_checkpoints)
    assert result.failure is None, result.failure
