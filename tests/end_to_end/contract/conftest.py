"""One run of the worker per world; the tests read its results."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.cases import scenarios_of
from contract.launch import Run, run_scenarios


@pytest.fixture(scope="session")
def contract_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(scope="session")
def two(contract_root: Path, request: pytest.FixtureRequest) -> Run:
    return _run(2, contract_root, request)


@pytest.fixture(scope="session")
def four(contract_root: Path, request: pytest.FixtureRequest, two: Run) -> Run:
    """Comes after `two`, whose checkpoints it reads."""
    return _run(4, contract_root, request)


@pytest.fixture(scope="session")
def plain(contract_root: Path, request: pytest.FixtureRequest, two: Run) -> Run:
    """Plain Lightning on one device; comes after `two`, whose checkpoints it reads."""
    return _run(0, contract_root, request)


@pytest.fixture(scope="session")
def one(contract_root: Path, request: pytest.FixtureRequest) -> Run:
    return _run(1, contract_root, request)


def _run(world: int, root: Path, request: pytest.FixtureRequest) -> Run:
    slow = any(item.get_closest_marker("slow") for item in request.session.items)
    return run_scenarios(world, scenarios_of(world, slow=slow), root / f"run{world}")
