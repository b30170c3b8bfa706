"""Weight gradients put off on real ranks: shards of tp and ep, parameters that FSDP2 gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from rank_records import read_records, write_record
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fold_kernels.weight_store import WeightStore, deferring
from lightning_fold.model import decoder
from lightning_fold.model.fold import FoldedModel, fold_model
from lightning_fold.model.linear import defer_linears
from lightning_fold.model.sentinel import install_sentinel
from lightning_fold.params import hold_back, local_tensor, reduce_held
from lightning_fold.telemetry import Telemetry
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.meshes import build_meshes
from lightning_fold.verify import cases
from lightning_fold.verify.plan import Case

MICROBATCHES = 2
TP = Case("decoder-shared-bias", "tp2cp1dp1pp1-etp1ep2edp1")
DP = Case("mixtral-tied", "tp1cp1dp2pp1-etp1ep1edp2")
BOTH = [
    Case("decoder-shared-bias", "tp2cp1dp2pp1-etp1ep2edp2"),
    # Two key and value heads over four ranks: whole weights, of which a rank uses some rows.
    Case("qwen3_moe", "tp4cp1dp1pp1-etp2ep2edp1"),
]


class Folded:
    """One model on this rank's mapping, and two microbatches through it."""

    def __init__(self, case: Case, comm: Comm, *, defers: bool, mode: Any = "none") -> None:
        self.module = pl.LightningModule()
        self.module.model = cases.build_model(case.model, decoder=decoder).double()
        self.comm = comm
        self.folded: FoldedModel = fold_model(
            self.module, comm=comm, dispatcher="auto", activation_checkpointing=mode
        )
        if defers:
            defer_linears(self.module.model)

    def loss(self, index: int) -> Tensor:
        batch = cases.sub_batch(index, self.comm.rank("dp"))
        return self.module.model(**batch).loss

    def ordinary(self) -> None:
        for index in range(MICROBATCHES):
            for root in self.folded.roots:
                root.set_requires_gradient_sync(index == MICROBATCHES - 1)
            self.loss(index).backward()

    def deferred(self) -> tuple[int, int]:
        """All backwards, then the weights from the last one on; counts what was there between."""
        store, late = WeightStore(), []
        hold_back(self.folded.roots)
        with deferring(store):
            losses = [self.loss(index) for index in range(MICROBATCHES)]
        for loss in losses:
            loss.backward()
            late.append(store.take())
        linears = [m for m in self.module.modules() if isinstance(m, nn.Linear)]
        early = sum(m.weight.grad is not None for m in linears)
        for run in reversed(late):
            run()
        reduce_held(self.folded.roots)
        return early, len(linears)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.module.named_parameters()}


def differences(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    errors = {}
    for name, want in wanted.items():
        grad = got[name]
        assert grad is not None, name
        assert type(grad) is type(want), name
        if isinstance(want, DTensor):
            assert (grad.placements, grad.shape) == (want.placements, want.shape), name
        # A shard of a small parameter may be empty.
        error = (local_tensor(grad) - local_tensor(want)).abs().flatten()
        errors[name] = max(error.tolist(), default=0.0)
    return errors


def sentinel_says(case: Case, comm: Comm, *, loses: bool) -> str:
    """What a check of one deferred step finds; with a weight gradient that is thrown away."""
    subject = Folded(case, comm, defers=True)
    sentinel = install_sentinel(subject.folded, comm=comm, every=1)
    sentinel.begin(0)
    store = WeightStore()
    hold_back(subject.folded.roots)
    with deferring(store):
        loss = subject.loss(0)
    sentinel.before_backward()
    loss.backward()
    late = store.take()
    if not loses:
        late()
    reduce_held(subject.folded.roots)
    noted = set(sentinel._window.computed)
    try:
        sentinel.finish()
    except RuntimeError as error:
        return str(error)
    return "" if noted == {w.name for w in subject.folded.watched} else f"noted {noted}"


def check(case: Case, folder: Path) -> None:
    dist.init_process_group("gloo")
    comm = Comm(build_meshes(case.folding, "cpu"), Telemetry())
    plain = Folded(case, comm, defers=False)
    plain.ordinary()
    record: dict[str, Any] = {"errors": {}}
    for mode in ("none", "full"):
        subject = Folded(case, comm, defers=True, mode=mode)
        early, linears = subject.deferred()
        record["errors"][mode] = differences(subject.gradients(), plain.gradients())
    record |= {"early": early, "linears": linears}
    record["sentinel"] = {str(x): sentinel_says(case, comm, loses=x) for x in (False, True)}
    record["largest"] = max(float(local_tensor(g).abs().sum()) for g in plain.gradients().values())
    write_record(folder, record)


def check_world(world: int, cases_: list[Case], folder: Path) -> None:
    for case, ranks in read_records(world, cases_, folder, check).items():
        for record in ranks:
            assert record["largest"] > 0.1, case
            for mode, errors in record["errors"].items():
                assert max(errors.values()) < 1e-14, (case, mode, errors)
            # What a tied head leaves at once is the embedding's.
            assert record["early"] <= 1, case
            assert record["linears"] > 10, case
            assert record["sentinel"]["False"] == "", case
            assert "has no gradient" in record["sentinel"]["True"], case


@pytest.mark.dist(2)
def test_gradients_are_those_of_an_ordinary_backward(tmp_path: Path) -> None:
    check_world(2, [TP, DP], tmp_path)


@pytest.mark.slow
@pytest.mark.dist(4)
def test_gradients_of_shards_that_are_gathered_too(tmp_path: Path) -> None:
    check_world(4, BOTH, tmp_path)
