"""The process that runs scenarios: `python -m contract.worker WORLD FOLDER SCENARIO[@MAPPING] ...`.

World 0 is plain Lightning on one device. Scenarios are functions `name(context) -> dict`, found in
the modules below; their results are tensors and primitives, one file a rank.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_fold import FoldedMoEStrategy

PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 3}
MAPPINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain2": {},
    "plain4": {},
    "ddp": {},
    "dp2": {},
    "dp4": {},
    "ep2": {"expert_parallel_size": 2},
    "etp2": {"expert_tensor_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "tp2ep2": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    "tp2ep4": {"tensor_parallel_size": 2, "expert_parallel_size": 4},
    "tp4ep4": {"tensor_parallel_size": 4, "expert_parallel_size": 4},
    "ep2etp2": {"expert_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "tp2ep2etp2": {
        "tensor_parallel_size": 2,
        "expert_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    },
    # Three microbatches of four rows: one of them has another size.
    "pp2": PP2,
    # One layer and nothing else on two of its four stages.
    "pp2zbv": {
        "pipeline_parallel_size": 2,
        "num_microbatches": 4,
        "pipeline_schedule": "zbv",
        "virtual_pipeline_size": 2,
        "pipeline_layout": "E|t|t|L",
    },
    "pp2woven": {**PP2, "pipeline_overlap": True},
    "pp2ep2": {**PP2, "num_microbatches": 2, "expert_parallel_size": 2},
    "pp2ep2woven": {**PP2, "expert_parallel_size": 2, "pipeline_overlap": True},
    "pp2tp2": {**PP2, "tensor_parallel_size": 2},
}


def woven_stages(trainer: pl.Trainer) -> list[int]:
    """Stages of this rank whose layers run in pieces."""
    pipeline = getattr(trainer.strategy, "pipeline", None)
    return sorted(pipeline.weaving.stages) if pipeline and pipeline.weaving else []


@dataclass
class Context:
    """What a scenario knows of its run.

    Attributes:
        world: Ranks; 0 is plain Lightning.
        rank: This one.
        folder: Shared by the ranks, one a scenario.
        root: Parent of the folders of all worlds.
        mapping: Key of MAPPINGS.
        option: Text after the scenario's name, e.g. "adamw" of "fit-adamw@ep2".
    """

    world: int
    rank: int
    folder: Path
    root: Path
    mapping: str
    option: str

    def strategy(self, **options: Any) -> Any:
        """A strategy of this mapping; "auto" or "ddp" for plain Lightning."""
        if self.world == 0 or self.mapping == "ddp":
            return "auto" if self.world == 0 else "ddp"
        return FoldedMoEStrategy(**{**MAPPINGS[self.mapping], **options})

    def trainer(self, **options: Any) -> pl.Trainer:
        """A quiet Trainer of one epoch, on a strategy of this mapping unless given one."""
        given: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": max(self.world, 1),
            "strategy": options.pop("strategy", None) or self.strategy(),
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "default_root_dir": self.folder,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
        }
        return pl.Trainer(**{**given, **options})


def main() -> None:
    world, folder, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = int(os.environ.get("RANK", "0"))
    for name in names:
        result = folder / f"{name}.{rank}.pt"
        if not result.exists():
            print(f"--- {name}", flush=True)
            value = run(name, world, rank, folder)
            torch.save(value, result.with_suffix(".partial"))
            result.with_suffix(".partial").rename(result)


def run(name: str, world: int, rank: int, folder: Path) -> dict[str, Any]:
    from contract import (
        scenarios_checkpoint,
        scenarios_loop,
        scenarios_model,
        scenarios_parity,
        scenarios_pipeline,
        scenarios_refused,
        scenarios_tokens,
    )

    modules = (
        scenarios_checkpoint,
        scenarios_loop,
        scenarios_model,
        scenarios_pipeline,
        scenarios_parity,
        scenarios_refused,
        scenarios_tokens,
    )
    called, _, mapping = name.partition("@")
    function, _, option = called.partition("-")
    scenario = next(getattr(m, function) for m in modules if hasattr(m, function))
    own = folder / "files" / name
    own.mkdir(parents=True, exist_ok=True)
    context = Context(world, rank, own, folder.parent, mapping or "plain", option)
    # What a scenario before has left by seed_everything.
    os.environ.pop("PL_GLOBAL_SEED", None)
    torch.manual_seed(17)
    value: dict[str, Any] = scenario(context)
    return value


if __name__ == "__main__":
    main()
