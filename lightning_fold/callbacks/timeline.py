"""The real timeline of one pipelined step, beside the one that the schedule predicts.

The prediction is the schedule's own list on a clock, each action taking what it took on average in
the step that was recorded: what differs between the two is waiting that the list does not explain.
Recording one step costs two readings of a clock an action.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_fold.callbacks.run import run_folder
from lightning_fold.pipeline.picture import draw_timelines
from lightning_fold.pipeline.simulate import Costs, simulate
from lightning_fold.pipeline.timeline import Span, Timeline, write_trace

PICTURE, TRACE = "pipeline.png", "pipeline.json"


class PipelineTimeline(Callback):
    """Writes `pipeline.png` and `pipeline.json`, a trace for Perfetto or Chrome, of one step.

    Stamps are of each rank's own clock, counted from where all ranks have agreed on the number of
    microbatches; ranks are apart by as much as one small message takes. The ranks of the first
    pipeline group are shown.

    Args:
        batch: Batch of the fit to record, from 0; the first ones allocate memory.
        dirpath: Folder of the files; None is the Trainer's log folder.

    Attributes:
        timelines: "predicted" and "measured" of the recorded step, on rank 0.
    """

    def __init__(self, batch: int = 10, dirpath: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        if batch < 0:
            raise ValueError(f"PipelineTimeline(batch={batch}): legal values: 0, 1, 2, ...")
        self.batch = batch
        self.dirpath = dirpath
        self.timelines: dict[str, Timeline] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a run without a pipeline before anything is built."""
        folding = getattr(trainer.strategy, "folding", None)
        if folding is None or folding.pp == 1:
            raise ValueError(
                "PipelineTimeline shows the stages of a pipeline, and this run has none. Set "
                "`pipeline_parallel_size` of FoldedMoEStrategy above 1, or remove the callback."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Switch the stamps on for the one batch."""
        _executor(trainer).stamps.on = self._is_due(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write, after the one batch. Collective over all ranks then."""
        if not self._is_due(trainer):
            return
        pipeline: Any = trainer.strategy.pipeline  # type: ignore[attr-defined]
        stamps = _executor(trainer).stamps
        rank, stamps.on = pipeline.comm.rank("pp"), False
        own = [
            Span(rank, a.stage_index, a.microbatch_index, a.computation_type.value, start, end)
            for a, start, end in stamps.readings()
        ]
        group = pipeline.comm.meshes.group("pp")
        parts: list[list[Span]] = [[]] * pipeline.comm.size("pp")
        dist.all_gather_object(parts, own, group=group)
        folder = run_folder(trainer, self.dirpath)
        if trainer.is_global_zero:
            self._write(Timeline.merged(parts), pipeline.plan, folder)

    def _write(self, measured: Timeline, plan: Any, folder: Path) -> None:
        predicted = simulate(plan, Costs.measured(measured))
        self.timelines = {"predicted": predicted, "measured": measured}
        folder.mkdir(parents=True, exist_ok=True)
        woven = ", woven" if plan.overlap else ""
        shape = f"pp {plan.pp}, vpp {plan.vpp}, {plan.num_microbatches} microbatches"
        title = f"{plan.name}{woven}, {shape}"
        draw_timelines(self.timelines, folder / PICTURE, title=title)
        write_trace(folder / TRACE, self.timelines)
        rank_zero_info(
            f"pipeline of batch {self.batch}: bubble {measured.bubble:.1%} measured, "
            f"{predicted.bubble:.1%} predicted; {folder / PICTURE}"
        )

    def _is_due(self, trainer: Trainer) -> bool:
        return bool(trainer.fit_loop.total_batch_idx == self.batch)


def _executor(trainer: Trainer) -> Any:
    return trainer.strategy.pipeline.executor  # type: ignore[attr-defined]
