"""What is wrong with a compiled kernel: a pure function of what was read.

A kernel must not spill, must fit into shared memory, must be made of the instructions that its op
is for, must load all steps of its pipeline ahead, and must serve every number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

# Bytes that a program may ask for, of compute capability 9.0 and 10.0 alike.
SHARED_LIMIT = 232448


@dataclass(frozen=True)
class Readout:
    """One compiled kernel.

    Attributes:
        registers: Of a thread.
        spilled: Bytes that a thread stores and loads because registers ran out.
        shared: Bytes of shared memory of a program.
        serialized: Whether products wait for each other.
        opcodes: How many instructions of each kind in `readout.OPCODES`.
        compiled: How many kernels were compiled for several numbers of rows.
    """

    registers: int
    spilled: int
    shared: int
    serialized: bool
    opcodes: dict[str, int]
    compiled: int = 1


@dataclass(frozen=True)
class Expected:
    """What a kernel must look like.

    Attributes:
        opcodes: Kinds of instructions that must be there.
        pipelined: Bytes of all operands in flight. They lie in shared memory; a kernel that has
            less of it waits for one of its loads.
    """

    opcodes: tuple[str, ...] = ()
    pipelined: int = 0


def faults(found: Readout, expected: Expected) -> list[str]:
    """What is wrong, one line each."""
    local = found.opcodes["local"]
    lines = {
        f"spills {found.spilled} bytes: take a smaller tile": found.spilled > 0,
        f"keeps arrays in local memory, {local} loads and stores": found.spilled == 0 < local,
        f"shared memory {found.shared} > {SHARED_LIMIT}: take fewer stages": found.shared
        > SHARED_LIMIT,
        "products wait for each other (ptxas C7510)": found.serialized,
        f"shared memory {found.shared} < {expected.pipelined} of all operands in flight: "
        "one is not loaded ahead": found.shared < expected.pipelined,
        f"compiles {found.compiled} times for different numbers of rows: "
        "name the argument in do_not_specialize": found.compiled > 1,
    }
    missing = [f"has no {kind}" for kind in expected.opcodes if not found.opcodes[kind]]
    return [line for line, wrong in lines.items() if wrong] + missing
