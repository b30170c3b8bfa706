"""The sentinel reports each kind of violation by its right name, and nothing in a healthy run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_records import Records, read_records, write_record
from torch import Tensor, nn

from lightning_fold.params.sentinel import Sentinel
from lightning_fold.verify.harness import CaseModule, be_quiet, build_strategy, build_trainer
from lightning_fold.verify.mutations import injected
from lightning_fold.verify.plan import Case

MAPPING = "tp2cp1dp2pp1-etp1ep2edp2"
GATE = "model.model.layers.2.mlp.gate.weight"
DOWN = "model.model.layers.0.mlp.experts.down_proj"
Inject = Callable[[CaseModule], None]


@dataclass(frozen=True)
class Watch(Case):
    """A case with a sentinel and a fault.

    Attributes:
        fault: Key of `FAULTS`, or of the mutations.
    """

    fault: str = ""

    @property
    def key(self) -> str:
        return f"{super().key}.{self.fault or 'healthy'}"


def one_copy_changed(module: CaseModule) -> None:
    """Rank 1 computes with another router than its peers."""

    def change(router: nn.Module, args: Any) -> None:
        with torch.no_grad():
            router.weight[0, 0] += 1e-7

    module.model.model.layers[2].mlp.gate.register_forward_pre_hook(change)


def gradient_doubled(module: CaseModule) -> None:
    """Rank 1 has twice its part of one gradient after the reduction."""
    before_checks(module, lambda named: named[GATE].grad.to_local().mul_(2))


def gradient_lost(module: CaseModule) -> None:
    """Rank 1 has no gradient for one expert parameter."""
    before_checks(module, lambda named: setattr(named[DOWN], "grad", None))


def token_lost(module: CaseModule) -> None:
    """The last token of rank 1 does not reach the experts of layer 0."""
    experts = module.model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(
        lambda module, args: tuple(a[:-1] for a in args), prepend=True
    )
    experts.register_forward_hook(
        lambda module, args, out: torch.cat([out, out.new_zeros(1, out.shape[1])])
    )


def before_checks(module: CaseModule, change: Callable[[dict[str, Tensor]], Any]) -> None:
    strategy: Any = module.trainer.strategy
    finish = strategy.sentinel.finish

    def changed() -> None:
        change(dict(module.named_parameters()))
        finish()

    strategy.sentinel.finish = changed


FAULTS: dict[str, Inject] = {
    f.__name__: f for f in (one_copy_changed, gradient_doubled, gradient_lost, token_lost)
}
TOLD = {
    "one_copy_changed": (
        f"step 0: the copies of {GATE} (router) that ranks compute with differ: "
        "rank 1 differs from rank 0, group [0, 1, 2, 3] (stage)"
    ),
    "gradient_doubled": f"step 0: the gradient of {GATE} (router) is not the sum of what",
    "gradient_lost": f"step 0: {DOWN} (expert) has no gradient on rank 1 of [0, 1, 2, 3] (stage)",
    "token_lost": "step 0: the MoE layer model.model.layers.0.mlp.experts (expert) has got ",
    "router-not-summed-over-tp": (
        "step 0: the gradient of model.model.layers.0.mlp.gate.weight (router) should be equal on "
        "all ranks of tp after the reduction: rank 1 differs from rank 0, group [0, 1] (tp)"
    ),
    "expert-grad-times-ep": "",
}
HEALTHY = (
    Watch("decoder", MAPPING),
    Watch("decoder-tied", "tp2cp1dp2pp1-etp2ep2edp1", shard="full"),
    Watch("mixtral", "tp4cp1dp1pp1-etp1ep2edp2", clip=True),
    Watch("decoder-shared-bias", "tp2cp2dp1pp1-etp1ep4edp1", feature="layers"),
)
FAULTY = tuple(Watch("decoder", MAPPING, fault=fault) for fault in TOLD if TOLD[fault])


class Starts(CaseModule):
    fault = ""

    def on_train_start(self) -> None:
        if self.fault in FAULTS and dist.get_rank() == 1:
            FAULTS[self.fault](self)


def train(case: Case, folder: Path) -> None:
    assert isinstance(case, Watch)
    be_quiet()
    strategy = build_strategy(case, sentinel_every=2)
    module = Starts(case)
    module.fault = case.fault
    trainer = build_trainer(case, strategy, max_steps=3, accumulate_grad_batches=2)
    told = ""
    with injected("" if case.fault in FAULTS else case.fault):
        try:
            trainer.fit(module)
        except RuntimeError as error:
            told = str(error)
    sentinel = strategy.sentinel
    assert isinstance(sentinel, Sentinel)
    record = {"told": told, "checked": sentinel.checked, "seconds": sentinel.seconds}
    write_record(folder, record)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return read_records(4, [*HEALTHY, *FAULTY], tmp_path_factory.mktemp("sentinel"), train)


@pytest.mark.dist(4)
@pytest.mark.parametrize("watch", FAULTY, ids=lambda watch: watch.fault)
def test_violation_is_told_by_its_name_on_every_rank(watch: Watch, records: Records) -> None:
    for record in records[watch]:
        assert TOLD[watch.fault] in record["told"]


@pytest.mark.dist(4)
@pytest.mark.parametrize("watch", HEALTHY, ids=lambda watch: watch.key)
def test_healthy_run_is_checked_at_the_first_step_and_every_second(
    watch: Watch, records: Records
) -> None:
    for record in records[watch]:
        assert record["told"] == ""
        assert record["checked"] == 2
        assert record["seconds"] > 0
