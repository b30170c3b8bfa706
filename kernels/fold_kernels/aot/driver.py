"""A machine without a GPU that compiles like one: all that the JIT binder asks of a driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

WARP = 32


class StubDriver(DriverBase):
    """Names the target; refuses everything that needs a device."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self.target = GPUTarget("cuda", capability, WARP)

    @classmethod
    def is_active(cls) -> bool:
        """Tell Triton that it may be chosen."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Leave types alone: no launcher is built."""
        return ty

    def get_current_target(self) -> Any:
        """What is compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """Key of the cache of compiled kernels."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Never used: nothing runs."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where tensors of a launch lie."""
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("ahead of time there is nothing to measure")


@dataclass(frozen=True)
class Launch:
    """One launch, compiled.

    Attributes:
        kernel: Triton's compiled kernel; the same object where a launch needs no further one.
        log: What ptxas said; empty where the kernel was there already.
    """

    kernel: Any
    log: str


def activate(capability: int) -> None:
    """Compile for `capability` in this process from here on, and let ptxas speak."""
    triton.runtime.driver.set_active(StubDriver(capability))
    triton.knobs.nvidia.dump_ptxas_log = True


@contextmanager
def compiling(kernel: str) -> Iterator[list[Launch]]:
    """Within it, launches of `kernel` compile and are listed; those of others do nothing."""
    stock = JITFunction.run
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if self.fn.__name__ != kernel:
            return None
        with redirect_stdout(StringIO()) as log:
            compiled = stock(self, *args, grid=grid, warmup=True, **options)
        launches.append(Launch(compiled, log.getvalue()))
        return compiled

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = stock
