"""Kernels on the GPU if there is one, else in Triton's interpreter, which then rounds as a GPU."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
SETTINGS = {"LIGHTNING_FOLD_MOE_BACKEND": "triton"}
if INTERPRETED:
    SETTINGS["TRITON_INTERPRET"] = "1"

# Kernels decide when they are decorated.
with mock.patch.dict(os.environ, SETTINGS):
    import fold_kernels.gpu as kernels

    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"fold_kernels.gpu.{module.name}")
    if INTERPRETED:
        from fold_kernels.interpreter import install

        install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """numpy warns where fp32 overflows to infinity, which a GPU does without a word."""
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.filterwarnings("ignore:overflow encountered"))
            item.add_marker(pytest.mark.filterwarnings("ignore:invalid value encountered"))
            item.add_marker(pytest.mark.filterwarnings("ignore:All-NaN slice"))


@pytest.fixture(autouse=True)
def triton_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op runs its kernel, and refuses what no kernel serves."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What a kernel does not write is NaN, or the largest integer."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run here."""
    return torch.device("cpu" if INTERPRETED else "cuda")
