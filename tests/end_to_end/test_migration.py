"""A DDP project whose only change is the strategy: equal validation loss after 20 AdamW steps."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).with_name("migration_project.py")


def validation_loss(strategy: str, devices: int, folder: Path) -> float:
    out = folder / f"{strategy}.json"
    run = subprocess.run(
        [sys.executable, str(PROJECT), strategy, str(devices), str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return float(json.loads(out.read_text())["val_loss"])


@pytest.fixture(scope="module")
def ddp_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    return validation_loss("ddp", 2, tmp_path_factory.mktemp("ddp"))


# dp is 2 in all of them, so the global batch is the same and is divided alike.
@pytest.mark.parametrize(("strategy", "devices"), [("dp2ep2", 2), ("tp2ep2", 4)])
def test_only_the_strategy_changes(
    strategy: str, devices: int, ddp_loss: float, tmp_path: Path
) -> None:
    loss = validation_loss(strategy, devices, tmp_path)
    print(f"{strategy}: val_loss {loss:.7f}, ddp {ddp_loss:.7f}, difference {loss - ddp_loss:.1e}")
    assert ddp_loss < math.log(257) - 0.5, "the reference did not learn"
    assert loss == pytest.approx(ddp_loss, abs=1e-5)
