"""What the ranks of `test_executor` run: schedules of slots that sleep, through the real executor.

A slot's forward, input gradient and weight gradient sleep for one unit each and compute next to
nothing, so that what is measured is the schedule and not the machine.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_records import write_record
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fold_kernels.weight_store import delay
from lightning_fold.model.passage import StageOutput
from lightning_fold.pipeline.executor import Border, Executor
from lightning_fold.pipeline.schedules import actions_of
from lightning_fold.telemetry import Telemetry
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.meshes import build_meshes
from lightning_fold.verify.plan import Case

WIDTH = 8
UNIT_S = 0.2
"""Long beside the milliseconds in which a message passes between four ranks on two cores."""


class _Slot(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, anchor: Tensor, put_off: Any) -> Tensor:
        ctx.put_off = put_off
        ctx.save_for_backward(x, weight)
        time.sleep(UNIT_S)
        return x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        time.sleep(UNIT_S)

        def weight_gradient() -> tuple[Tensor]:
            time.sleep(UNIT_S)
            return ((grad * x).sum(0),)

        late = ctx.put_off is not None
        if late:
            ctx.put_off.leave(weight_gradient)
        return grad * weight, None if late else weight_gradient()[0], None, None


@dataclass
class Slots:
    """Stages that sleep.

    Attributes:
        weights: By stage.
        sent: Activations that were handed on, with their microbatch.
    """

    weights: dict[int, nn.Parameter]
    num_stages: int
    sent: list[weakref.ref[Tensor]] = field(default_factory=list)

    def border(self, stage: int, microbatch: int) -> Border:
        """A microbatch of another size than its neighbours."""
        return Border((1 + microbatch % 3, WIDTH), torch.float64)

    def forward(
        self, stage: int, microbatch: int, hidden: Tensor | None, loads: Tensor | None
    ) -> StageOutput | Tensor:
        """Multiply by the stage's weight."""
        x = torch.ones(self.border(stage, microbatch).shape, dtype=torch.float64)
        weight = self.weights[stage]
        put_off = delay(weight)
        anchor = put_off.anchor() if put_off else torch.empty(0)
        used = weight.detach() if put_off else weight
        out = _Slot.apply(x if hidden is None else hidden, used, anchor, put_off)
        if stage == self.num_stages - 1:
            return out.sum() * (microbatch + 1)
        self.sent.append(weakref.ref(out))
        return StageOutput(out)


def run_schedule(case: Case, folder: Path) -> None:
    """Run one step, and note what happened when. Collective over all ranks."""
    dist.init_process_group("gloo")
    comm = Comm(build_meshes(case.folding, "cpu"), Telemetry())
    count = case.num_microbatches or 1
    plan = actions_of(
        case.schedule, pp=case.folding.pp, vpp=case.virtual_stages, num_microbatches=count
    )
    executor = Executor(comm, num_stages=plan.num_stages, device=torch.device("cpu"))
    rank = comm.rank("pp")
    weights = {
        stage: nn.Parameter(torch.full((WIDTH,), 1.0 + stage, dtype=torch.float64))
        for stage in plan.stages_of(rank)
    }
    slots = Slots(weights, plan.num_stages)
    executor.stamps.on = True
    dist.barrier()
    executor.stamps.start()
    executor.run(plan, slots, train=True)
    spans = [
        (rank, a.stage_index, a.microbatch_index, a.computation_type.value, start, end)
        for a, start, end in executor.stamps.readings()
    ]
    grads = {stage: w.grad.tolist() for stage, w in weights.items() if w.grad is not None}
    record = {
        "spans": spans,
        "grads": grads,
        "peak_live": executor.peak_live,
        "peak_sent": executor.sends.peak,
        "alive": sum(ref() is not None for ref in slots.sent),
    }
    write_record(folder, record)
