"""A decoder under a real Trainer learns with experts in fp8 as it does with those in bf16."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).with_name("fp8_project.py")
# Later the losses are small, and what is left of them depends on every rounding.
STEPS_ALIKE, ALIKE = 18, 0.03


def test_the_loss_falls_as_with_bf16(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROJECT), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = json.loads((tmp_path / "losses.json").read_text())
    fp8, bf16 = losses["fp8_block"], losses["bf16"]
    assert fp8 != bf16
    for got, wanted in zip(fp8[:STEPS_ALIKE], bf16, strict=False):
        assert abs(got - wanted) <= ALIKE * wanted
    for each in (fp8, bf16):
        assert sum(each[-4:]) / 4 < 0.2 * each[0]
