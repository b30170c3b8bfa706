"""What is logged by microbatches on the last stage is, on all ranks, what one process logs."""

from __future__ import annotations

import csv
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from logging_subject import OPTIONS, TwoStages, fit_and_test
from rank_records import Records, read_records, write_record

from lightning_fold.verify.harness import be_quiet
from lightning_fold.verify.plan import Case

MAPPING = "tp1cp1dp1pp2-etp1ep1edp1"


@dataclass(frozen=True)
class Run(Case):
    """A case of `OPTIONS`."""

    name: str = ""

    @property
    def key(self) -> str:
        return self.name


RUNS = {name: Run("", MAPPING, name=name) for name in OPTIONS}


def train(case: Case, folder: Path) -> None:
    assert isinstance(case, Run)
    be_quiet()
    shared = folder.parent / f"{case.name}-files"
    write_record(folder, fit_and_test(case.name, shared, TwoStages))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def records(folder: Path) -> Records:
    return read_records(2, list(RUNS.values()), folder, train)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], dict[str, Any]]:
    """What a plain Trainer on one process gives, on whole batches."""

    def run(name: str) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fit_and_test(name, folder / f"{name}-expected")

    return functools.cache(run)


def assert_close(got: Any, wanted: Any, where: str) -> None:
    """Equal structures, and numbers to rounding."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for key in wanted:
            assert_close(got[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), where
        for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_close(one, other, f"{where}[{i}]")
    elif isinstance(wanted, float):
        # Metrics of torchmetrics are in float32.
        assert got == pytest.approx(wanted, rel=1e-6), where
    else:
        assert got == wanted, where


@pytest.mark.dist(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("what", ["seen", "events", "tested", "weights"])
def test_every_rank_sees_what_one_process_sees(
    name: str, rank: int, what: str, records: Records, expected: Callable[[str], Any]
) -> None:
    assert_close(records[RUNS[name]][rank][what], expected(name)[what], what)


@pytest.mark.dist(2)
@pytest.mark.parametrize("name", RUNS)
def test_monitors_decide_alike(name: str, records: Records, expected: Callable[[str], Any]) -> None:
    for record in records[RUNS[name]]:
        for what in ("best", "stopped_epoch", "ended", "progress", "lr", "never"):
            assert_close(record[what], expected(name)[what], what)


@pytest.mark.dist(2)
def test_plain_run_stops_early_and_lowers_the_rate(expected: Callable[[str], Any]) -> None:
    # Otherwise the comparison would say nothing of EarlyStopping and ReduceLROnPlateau.
    plain = expected("plain")
    assert plain["stopped_epoch"] > 0
    assert plain["lr"] < 0.3


@pytest.mark.dist(2)
def test_logger_of_rank_0_writes_the_same_file(
    records: Records, folder: Path, expected: Callable[[str], Any]
) -> None:
    expected("plain")
    own, wanted = (
        _rows(folder / f"plain-{run}/csv/version_0/metrics.csv") for run in ("files", "expected")
    )
    assert_close(own, wanted, "csv")


def _rows(path: Path) -> list[dict[str, float | None]]:
    return [
        {key: float(value) if value else None for key, value in row.items()}
        for row in csv.DictReader(path.read_text().splitlines())
    ]
