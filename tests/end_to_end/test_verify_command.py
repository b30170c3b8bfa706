"""`lightning-fold verify`, as a user starts it: equal, off by a fault, and a model of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(sys.executable).with_name("lightning-fold"))
PP2, TP2_EP2, ETP2, DATA_EP2 = (
    "tp1cp1dp1pp2-etp1ep1edp1",
    "tp2cp1dp1pp1-etp1ep2edp1",
    "tp1cp1dp2pp1-etp2ep1edp1",
    "tp1cp1dp2pp1-etp1ep2edp1",
)


def run(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [PROGRAM, "verify", *options]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def only(*mappings: str) -> list[str]:
    return [word for mapping in mappings for word in ("--mapping", mapping)]


@pytest.mark.dist(2)
def test_the_built_in_decoder_is_equal_and_drawn(tmp_path: Path) -> None:
    wanted = [*only(TP2_EP2, ETP2), "--json", "told.json", "--png", "matrix.png"]
    done = run("--ranks", "2", *wanted, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 legal mappings, 0 refused, 2 run" in done.stdout
    told: dict[str, Any] = json.loads((tmp_path / "told.json").read_text())
    assert told["passed"]
    for mapping, under in zip(told["mappings"], (ETP2, TP2_EP2), strict=True):
        assert mapping["resumed_under"] == under
        assert set(mapping["checks"]) == {
            *("names", "routing", "outputs", "clip norm", "weights", "resume"),
            *(f"{family} gradient" for family in ("dense", "shared", "router", "expert")),
        }
        for check in mapping["checks"].values():
            assert check["error"] <= check["tolerance"] <= 1e-10
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.dist(2)
def test_an_injected_fault_is_named_with_family_and_axis(tmp_path: Path) -> None:
    fault = ["--inject", "router-not-summed-over-tp", "--json", "told.json"]
    done = run("--ranks", "2", *fault, *only(TP2_EP2, DATA_EP2), cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    last = done.stderr.splitlines()[-1]
    assert "1 of 2 mappings differ. router gradient: not summed over tp" in last
    assert ".mlp.gate.weight under tp2cp1dp1pp1" in last
    (finding,) = json.loads((tmp_path / "told.json").read_text())["findings"]
    assert (finding["family"], finding["axes"], finding["certain"]) == ("router", ["tp"], True)


@pytest.mark.dist(2)
def test_a_loop_of_experts_behind_an_adapter_equals_the_loop(tmp_path: Path) -> None:
    model = f"{ROOT / 'recipes' / 'loop_experts.py'}:LoopDecoder"
    done = run("--ranks", "2", "--model", model, *only(DATA_EP2, ETP2, TP2_EP2), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 legal mappings, 1 refused, 2 run" in done.stdout
    assert "no submodule holds `embed_tokens`" in done.stdout


@pytest.mark.dist(2)
def test_a_pipeline_is_equal_and_resumes_what_other_mappings_save(tmp_path: Path) -> None:
    wanted = [*only(PP2, TP2_EP2), "--json", "told.json"]
    done = run("--ranks", "2", *wanted, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 legal mappings (1 with pp = 1), 0 refused, 2 run" in done.stdout
    told = json.loads((tmp_path / "told.json").read_text())["mappings"]
    assert {mapping["resumed_under"] for mapping in told} == {PP2, TP2_EP2}
    assert [mapping["schedule"] for mapping in told] == ["gpipe", ""]


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("fault", "check", "axes"),
    [
        ("microbatches-weighed-equally", "outputs", ["pp"]),
        ("twins-not-summed", "dense gradient", ["pp"]),
        ("last-weights-left-out", "dense gradient", ["pp"]),
    ],
)
def test_faults_of_pipelines_name_theirs(
    fault: str, check: str, axes: list[str], tmp_path: Path
) -> None:
    wanted = ["--inject", fault, *only(PP2, DATA_EP2), "--json", "told.json"]
    done = run("--ranks", "2", *wanted, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    found = json.loads((tmp_path / "told.json").read_text())["findings"]
    assert check in {finding["check"] for finding in found}
    assert all(finding["axes"] == axes for finding in found), found


TWICE = """
import lightning.pytorch as pl
from lightning_fold.model.decoder import Decoder, DecoderConfig


class Twice(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Decoder(DecoderConfig(num_hidden_layers=2))

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss + self.model(**batch).loss
"""


@pytest.mark.dist(2)
def test_a_step_that_fits_no_pipeline_is_refused_there_alone(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    wanted = ["--model", "twice.py:Twice", *only(PP2, DATA_EP2)]
    done = run("--ranks", "2", *wanted, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 legal mappings (1 with pp = 1), 1 refused, 1 run" in done.stdout
    assert f"refused 1: {PP2}: Twice.training_step calls it more than once" in done.stdout


def test_wrong_options_end_in_one_line_and_status_2(tmp_path: Path) -> None:
    done = run("--ranks", "9", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("Legal ranks: 1 to 8.  Change `--ranks`.")


@pytest.mark.slow
@pytest.mark.dist(4)
def test_all_mappings_of_four_ranks_are_equal(tmp_path: Path) -> None:
    done = run("--ranks", "4", "--json", "told.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["legal"], told["refused"], told["run"]) == (46, 0, 46)
    assert sum(not mapping["schedule"] for mapping in told["mappings"]) == 36


@pytest.mark.slow
@pytest.mark.dist(4)
@pytest.mark.parametrize(
    ("fault", "check", "axes"),
    [
        ("expert-grad-times-ep", "expert gradient", ["ep"]),
        ("norm-not-summed-over-tp", "dense gradient", ["tp"]),
        ("shared-not-summed-over-tp", "shared gradient", ["tp"]),
        ("etp-sum-left-out", "routing", ["etp"]),
        ("equal-data", "routing", ["dp"]),
        ("no-division-by-dp", "dense gradient", ["dp"]),
    ],
)
def test_faults_name_their_axis(fault: str, check: str, axes: list[str], tmp_path: Path) -> None:
    mappings = only(
        *("tp2cp1dp2pp1-etp1ep4edp1", "tp1cp1dp4pp1-etp1ep2edp2", "tp2cp1dp2pp1-etp2ep2edp1"),
        *("tp1cp2dp2pp1-etp4ep1edp1", "tp4cp1dp1pp1-etp1ep1edp4"),
    )
    done = run("--inject", fault, *mappings, "--json", "told.json", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    found = json.loads((tmp_path / "told.json").read_text())["findings"]
    assert (found[0]["check"], found[0]["axes"]) == (check, axes), found


@pytest.mark.slow
@pytest.mark.dist(2)
def test_a_recipe_of_transformers_is_equal(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "qwen3-moe.tp2cp1dp2pp1-etp1ep4edp1.yaml"
    done = run("--ranks", "2", "--config", str(recipe), *only(TP2_EP2, ETP2), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "shrunk: vocab_size 264 -> 101" in done.stdout
