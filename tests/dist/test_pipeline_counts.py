"""What a schedule may cost: calls, collectives and gathers a step, and what it keeps alive."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from rank_records import Records, read_records, write_record
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fold.callbacks import ExpertLoadMonitor, PipelineTimeline
from lightning_fold.model import decoder
from lightning_fold.pipeline.actions import SEND_B, SEND_F
from lightning_fold.pipeline.executor import Executor
from lightning_fold.pipeline.schedules import Plan, actions_of
from lightning_fold.pipeline.sends import Sends
from lightning_fold.pipeline.simulate import simulate
from lightning_fold.pipeline.timeline import read_trace
from lightning_fold.topology.comm import Comm
from lightning_fold.verify import cases
from lightning_fold.verify.harness import CaseModule, be_quiet, build_strategy, build_trainer
from lightning_fold.verify.plan import Case
from lightning_fold.verify.plan_pipelines import FOUR, SCHEDULES

PP, NUMBER, BATCHES = 2, 4, 2
MESSAGES = ("send", "recv_")


@dataclass(frozen=True)
class Counted(Case):
    """One schedule whose calls are counted, or that runs microbatches of different lengths."""

    lengths: bool = False

    @property
    def key(self) -> str:
        return super().key + (".lengths" if self.lengths else "")

    @property
    def plan(self) -> Plan:
        virtual = self.virtual_stages
        return actions_of(self.schedule, pp=PP, vpp=virtual, num_microbatches=NUMBER)


def counted(schedule: str, **options: Any) -> Counted:
    virtual = SCHEDULES[schedule]
    return Counted(
        "decoder",
        "tp2cp1dp1pp2-etp1ep2edp1",
        batch="rows",
        schedule=schedule,
        virtual_stages=virtual,
        num_microbatches=NUMBER,
        layout=FOUR if virtual == 2 else None,
        **options,
    )


COUNTED = [counted(name) for name in SCHEDULES]
LENGTHS = [
    replace(counted("1f1b", lengths=True), model="decoder-tied"),
    counted("zbv", lengths=True),
]

# ------------------------------------------------------------ on the ranks


class Collectives(TorchDispatchMode):
    """Counts every c10d operation of this rank, whoever issues it, in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class Counts:
    """What the batches of one training count on one rank; a list has an entry a batch."""

    def __init__(self) -> None:
        self.backwards: list[int] = []
        self.operations: list[Counter[str]] = []
        self.peak_live: list[int] = []
        self.num_sent: list[int] = []
        # Sent activations that are alive when all actions are done.
        self.alive: list[int] = []
        self.calls: Counter[str] = Counter()
        self._sent: list[weakref.ref[Tensor]] = []
        self._is_activation = False

    def watch(self, stack: contextlib.ExitStack) -> None:
        for owner, name in (
            (_fsdp_param_group, "foreach_all_gather"),
            (_fsdp_param_group, "foreach_reduce"),
        ):
            self._replace(stack, owner, name, self._counter(name))
        self._replace(stack, torch.autograd, "backward", self._backward)
        self._replace(stack, Executor, "run", self._run)
        self._replace(stack, Executor, "_send", self._send)
        self._replace(stack, Sends, "finish", self._finish)
        self._replace(stack, Comm, "start_send", self._start_send)

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    @staticmethod
    def _replace(stack: Any, owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)
        patched = mock.patch.object(owner, name, lambda *args, **more: around(inner, *args, **more))
        stack.enter_context(patched)

    def _counter(self, name: str) -> Callable[..., Any]:
        def call(inner: Any, *args: Any, **more: Any) -> Any:
            self.calls[name] += 1
            return inner(*args, **more)

        return call

    def watch_layers(self, layers: Iterable[torch.nn.Module]) -> None:
        def enter(layer: Any, args: Any, out: Tensor) -> None:
            self.calls["layer forward"] += 1
            out.register_hook(leave)

        def leave(grad: Tensor) -> None:
            self.calls["layer backward"] += 1

        for layer in layers:
            layer.register_forward_hook(enter)

    def _backward(self, inner: Any, roots: Any, *args: Any, **more: Any) -> None:
        # A store of weight gradients calls it with one tensor, for one operation and no layer.
        self.calls["backward"] += isinstance(roots, list)
        inner(roots, *args, **more)

    def _run(self, inner: Any, executor: Executor, *args: Any, **more: Any) -> None:
        before, self._sent = self.calls["backward"], []
        with Collectives() as mode:
            inner(executor, *args, **more)
        self.backwards.append(self.calls["backward"] - before)
        self.operations.append(mode.seen)
        self.peak_live.append(executor.peak_live)

    def _finish(self, inner: Any, sends: Sends) -> None:
        """Before the end of the step waits for messages: those answered have no need of it."""
        deadline = time.monotonic() + 5
        while self._num_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.num_sent.append(len(self._sent))
        self.alive.append(self._num_alive())
        inner(sends)

    def _num_alive(self) -> int:
        return sum(ref() is not None for ref in self._sent)

    def _send(self, inner: Any, executor: Executor, action: Any) -> None:
        self._is_activation = action.computation_type == SEND_F
        inner(executor, action)

    def _start_send(self, inner: Any, comm: Comm, tensors: Any, **more: Any) -> Any:
        if self._is_activation:
            self._sent += [weakref.ref(tensor) for tensor in tensors]
        return inner(comm, tensors, **more)


def num_units(strategy: Any) -> int:
    """Groups of parameters that FSDP2 gathers and reduces together."""
    states: list[Any] = [fully_shard.state(module) for module in strategy._folded.sharded]
    return sum(len(state._fsdp_param_groups) for state in states)


def count(case: Case, folder: Path) -> None:
    be_quiet()
    assert isinstance(case, Counted)
    if case.lengths:
        write_record(folder, trained_with_lengths(case, folder))
        return
    counts, strategy = Counts(), build_strategy(case)
    # One step of two batches.
    trainer = build_trainer(case, strategy, max_steps=1, accumulate_grad_batches=BATCHES)
    with contextlib.ExitStack() as stack:
        counts.watch(stack)
        module = CaseModule(case)
        counts.watch_layers(module.model.model.layers)
        trainer.fit(module)
    layers = len(strategy._folded.parts.layers)
    place = {"pp": strategy.comm.rank("pp"), "units": num_units(strategy), "layers": layers}
    write_record(folder, counts.record() | place)


class Trimmed(CaseModule):
    """Microbatches without the padding that all of their rows have on the right."""

    seen: tuple[int, ...] | list[int] = ()

    def split_batch(self, batch: dict[str, Tensor], number: int) -> list[dict[str, Tensor]]:
        pieces = []
        for rows in torch.arange(len(batch["input_ids"])).tensor_split(number):
            part = {name: value[rows] for name, value in batch.items()}
            length = int(part["attention_mask"].sum(0).nonzero().max()) + 1
            pieces.append({name: value[:, :length] for name, value in part.items()})
        return pieces

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([long_and_short()], batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen = [*self.seen, batch["input_ids"].shape[1]]
        loss: Tensor = self.model(**batch).loss
        return loss


def long_and_short() -> dict[str, Tensor]:
    """Rows of 3 to 16 tokens, neighbours far apart, padded on the right."""
    ids = torch.randint(0, cases.VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([16, 16, 3, 4, 13, 9, 5, 16]).unsqueeze(1)
    mask = (torch.arange(16).unsqueeze(0) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class FirstGradients(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = {n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None}
        self.grads = trainer.strategy.consolidate(named)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.loss = float(outputs["loss"])


def trained_with_lengths(case: Counted, folder: Path) -> dict[str, Any]:
    """Errors against one process that runs the whole padded batch; sentinel and callbacks look on.

    The files of the callbacks appear in `folder`.
    """
    model = cases.build_model(case.model, decoder=decoder).double()
    loss = model(**long_and_short()).loss
    loss.backward()
    module, first = Trimmed(case), FirstGradients()
    strategy = build_strategy(case, sentinel_every=1)
    timeline, load = PipelineTimeline(0, folder), ExpertLoadMonitor(folder)
    callbacks = [first, timeline, load]
    build_trainer(
        case, strategy, max_steps=1, callbacks=callbacks, use_distributed_sampler=False
    ).fit(module)
    errors = {"loss": abs(first.loss - float(loss)) / float(loss)}
    for name, param in model.named_parameters() if strategy.is_global_zero else ():
        assert param.grad is not None
        got = first.grads[f"model.{name}"]
        errors[name] = float((got - param.grad).norm() / param.grad.norm())
    measured = timeline.timelines.get("measured")
    return {
        "errors": errors,
        "lengths": module.seen,
        "order": {} if measured is None else {r: measured.order(r) for r in measured.by_rank},
        "routed": {name: int(n.sum()) for name, n in load.history[-1].counts.items()},
    }


# ------------------------------------------------------------ what they have counted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counts")


@pytest.fixture(scope="module")
def records(folder: Path) -> Records:
    return read_records(4, [*COUNTED, *LENGTHS], folder, count)


def of_all(ranks: list[dict[str, Any]], batch: int) -> Counter[str]:
    """Operations of all ranks in one batch, without the messages between stages."""
    total: Counter[str] = Counter()
    for rank in ranks:
        total.update(rank["operations"][batch])
    return Counter({name: n for name, n in total.items() if name not in MESSAGES})


pytestmark = pytest.mark.dist(4)


def test_each_microbatch_has_one_backward_on_each_stage(records: Records) -> None:
    for case in COUNTED:
        for rank in records[case]:
            assert rank["backwards"] == [case.virtual_stages * NUMBER] * BATCHES, case.key
            each = rank["layers"] * NUMBER * BATCHES
            assert rank["calls"]["layer forward"] == each, case.key
            assert rank["calls"]["layer backward"] == each, case.key


def test_schedules_have_equal_collectives_per_microbatch(records: Records) -> None:
    per_microbatch = {}
    for case in COUNTED:
        # The second of the step: the first has gathered the parameters.
        total = of_all(records[case], 1)
        assert all(n % NUMBER == 0 for n in total.values()), (case.key, total)
        per_microbatch[case.schedule] = {name: n // NUMBER for name, n in total.items()}
    assert all(found == per_microbatch["gpipe"] for found in per_microbatch.values()), (
        per_microbatch
    )
    assert per_microbatch["gpipe"]["alltoall_base_"] > 0, per_microbatch


def test_messages_are_those_of_the_plan(records: Records) -> None:
    for case in COUNTED:
        for rank in records[case]:
            listed = case.plan.lowered[rank["pp"]]
            sends = sum(action.computation_type in (SEND_F, SEND_B) for action in listed)
            assert [batch["send"] for batch in rank["operations"]] == [sends] * BATCHES, case.key


def test_parameters_are_gathered_once_and_reduced_once_a_step(records: Records) -> None:
    for case in COUNTED:
        for rank in records[case]:
            assert rank["units"] > 1
            assert rank["calls"]["foreach_all_gather"] == rank["units"], (case.key, rank["calls"])
            assert rank["calls"]["foreach_reduce"] == rank["units"], (case.key, rank["calls"])


def test_live_microbatches_are_those_of_the_simulator(records: Records) -> None:
    for case in COUNTED:
        predicted = simulate(case.plan).peak_live
        for rank in records[case]:
            assert set(rank["peak_live"]) == {predicted[rank["pp"]]}, case.key
    for rank in records[COUNTED[0]]:
        assert rank["peak_live"][0] == NUMBER
    for rank in records[COUNTED[1]]:
        assert rank["peak_live"][0] == PP - rank["pp"]


def test_sent_activations_are_let_go(records: Records) -> None:
    for case in COUNTED:
        for rank in records[case]:
            listed = case.plan.lowered[rank["pp"]]
            sends = sum(action.computation_type == SEND_F for action in listed)
            assert rank["num_sent"] == [sends] * BATCHES, case.key
            assert set(rank["alive"]) == {0}, (case.key, rank["alive"])


def test_neighbours_of_other_lengths_give_the_right_numbers(records: Records) -> None:
    for case in LENGTHS:
        for rank in records[case]:
            assert len(set(rank["lengths"])) >= 3
            assert max(rank["errors"].values()) < 1e-12, (case.key, rank["errors"])
        assert len(records[case][0]["errors"]) > 20


def test_the_timeline_of_a_run_is_that_of_its_plan(records: Records, folder: Path) -> None:
    for case in LENGTHS:
        order = records[case][0]["order"]
        clock = simulate(case.plan)
        assert order == {str(rank): list(clock.order(rank)) for rank in range(PP)}, case.key
        written = read_trace(folder / case.key / "pipeline.json")
        assert written["measured"].order(0) == clock.order(0)
        assert (folder / case.key / "pipeline.png").stat().st_size > 1000


def test_expert_load_is_that_of_all_stages_on_every_rank(records: Records) -> None:
    for case in LENGTHS:
        model = cases.build_model(case.model, decoder=decoder)
        # Of two rows each, whose padding is cut off; it is routed where it is left.
        tokens = sum(2 * length for length in records[case][-1]["lengths"][-NUMBER:])
        top_k = model.config.num_experts_per_tok
        moe = [n for n, m in model.named_modules(prefix="model") if n.endswith(".experts")]
        for rank in records[case]:
            assert rank["routed"] == dict.fromkeys(moe, tokens * top_k), case.key
