"""What ranks tell the test that starts them: one JSON record a case and rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_fold.verify.launch import CASE_TIMEOUT, run_world
from lightning_fold.verify.plan import Case
from lightning_fold.verify.worker import leave_groups

Records = dict[Case, list[dict[str, Any]]]


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write this rank's record of a case and leave the case's groups. Collective over all ranks."""
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(record))
    leave_groups()


def read_records(
    world: int,
    cases: Sequence[Case],
    folder: Path,
    run: Callable[[Case, Path], None],
    *,
    case_timeout: float = CASE_TIMEOUT,
) -> Records:
    """Run `cases` on `world` ranks, started once; the records of every case, by rank."""
    result = run_world(world, cases, folder, case_timeout=case_timeout, run=run)
    assert result.failure is None, result.failure
    return {
        case: [json.loads((folder / case.key / f"{r}.json").read_text()) for r in range(world)]
        for case in cases
    }
