"""Exact arithmetic of gradients: who is summed with whom, and what a norm counts.

Every rank r puts 2**r where autograd would put the gradient of a gathered parameter. What arrives
in a shard then names the ranks that were summed, bit by bit, whatever the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_records import Records, read_records, write_record
from torch import Tensor, nn

from lightning_fold.params import Family, gradient_norm, local_tensor, reduce_axes
from lightning_fold.topology.folding import Folding
from lightning_fold.verify.harness import CaseModule, be_quiet, build_strategy, build_trainer
from lightning_fold.verify.plan import Case

CASES = (
    Case("decoder-shared-bias", "tp2cp1dp2pp1-etp1ep4edp1"),
    Case("decoder-shared-bias", "tp2cp1dp2pp1-etp2ep1edp2"),
    Case("decoder-shared-bias", "tp1cp1dp4pp1-etp1ep2edp2", shard="full"),
    Case("decoder-shared-bias", "tp4cp1dp1pp1-etp2ep2edp1"),
    Case("decoder-shared-bias", "tp2cp2dp1pp1-etp1ep2edp2"),
    Case("decoder-shared-bias", "tp2cp1dp2pp1-etp1ep4edp1", feature="layers"),
)


class PowersOfTwo(CaseModule):
    """Replaces every gradient by 2**rank, and compares in front of the optimizer's step.

    Attributes:
        wrong: Parameters whose shard is not the sum that the table says.
        norm: Gradient norm when all gradients are one.
        routers: Whether all ranks gather the same router, bit for bit, after the steps.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.wrong: list[str] = []
        self.norm = 0.0
        self.checked = 0

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        for unit in strategy._folded.sharded:
            # First: FSDP2's own hook may free the gathered parameters.
            unit.register_forward_hook(self._replace_gradients, prepend=True)
        if not strategy._folded.sharded:
            raise AssertionError("nothing is sharded here, so nothing would be tested")

    def _replace_gradients(self, unit: nn.Module, args: Any, output: Any) -> None:
        if self.checked == 0:
            for param in unit.parameters():
                param.register_hook(lambda grad: torch.full_like(grad, 2.0 ** dist.get_rank()))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.checked += 1
        if self.checked > 1:
            return
        strategy: Any = self.trainer.strategy
        for w in strategy._folded.watched:
            grad = local_tensor(w.current.grad)
            wanted = wanted_sum(w.name, w.family, w.current, w.comm.meshes.folding)
            if not torch.equal(grad, torch.full_like(grad, wanted)):
                self.wrong.append(f"{w.name}: {grad.unique().tolist()} instead of {wanted}")
            grad.fill_(1.0)
        self.norm = float(gradient_norm(self.parameters(), device=torch.device("cpu")))
        optimizer.zero_grad()


def wanted_sum(name: str, family: Family, param: Tensor, folding: Folding) -> float:
    """Sum of 2**r over the ranks that the table names, for a parameter of this rank."""
    sharded = {"etp", "ep"} if family is Family.EXPERT else sharded_over_tp(name)
    if family is Family.EXPERT and folding.etp * folding.ep == 1:
        sharded = set()
    ranks = {dist.get_rank()}
    for axis in reduce_axes(family, sharded):
        ranks = {peer for rank in ranks for peer in folding.group_of(rank, axis)}
    # Two forwards are accumulated before the step.
    return 2.0 * sum(2.0**rank for rank in ranks)


def sharded_over_tp(name: str) -> set[str]:
    """By name and not by the strategy's own storage; tp = 4 leaves both key/value heads whole."""
    folding = Folding.from_id(MAPPING[0])
    by_columns = ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
    weights = ("o_proj.weight", "down_proj.weight")
    heads = ("k_proj", "v_proj") if folding.tp <= 2 else ()
    parts = name.split(".")
    is_shared = any(part.startswith("shared_") for part in parts)
    sharded = any(part in parts for part in (*by_columns, *heads)) or name.endswith(weights)
    return {"tp"} if sharded and not is_shared and folding.tp > 1 else set()


MAPPING = [""]


def run(case: Case, folder: Path) -> None:
    be_quiet()
    MAPPING[0] = case.mapping
    strategy, module = build_strategy(case), PowersOfTwo(case)
    build_trainer(case, strategy, max_steps=3, accumulate_grad_batches=2).fit(module)
    count = torch.tensor(sum(local_tensor(p).numel() for p in module.parameters()))
    dist.all_reduce(count)
    record = {
        "wrong": module.wrong,
        "norm": module.norm,
        "numel": int(count),
        "routers": [router.tolist() for router in whole_routers(module)],
    }
    write_record(folder, record)


def whole_routers(module: nn.Module) -> Iterator[Tensor]:
    for name, param in module.named_parameters():
        if name.endswith("mlp.gate.weight"):
            whole = param.full_tensor() if hasattr(param, "full_tensor") else param
            yield whole.detach()


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return read_records(4, CASES, tmp_path_factory.mktemp("sums"), run)


@pytest.mark.dist(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_powers_of_two_arrive_as_the_table_says(case: Case, records: Records) -> None:
    assert [record["wrong"] for record in records[case]] == [[]] * 4


@pytest.mark.dist(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_norm_of_all_ones_is_the_root_of_the_number_of_parameters(
    case: Case, records: Records
) -> None:
    for record in records[case]:
        assert record["norm"] == pytest.approx(record["numel"] ** 0.5, rel=1e-14)


@pytest.mark.dist(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_router_is_bitwise_equal_on_all_ranks_after_steps(case: Case, records: Records) -> None:
    first, *others = [record["routers"] for record in records[case]]
    assert len(first) == 2
    assert all(other == first for other in others)
