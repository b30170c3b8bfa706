"""What a compiled kernel costs and which instructions it is made of: ptxas and its SASS say so."""

from __future__ import annotations

import re
import subprocess
import tempfile

import triton

from fold_kernels.aot.driver import Launch
from fold_kernels.aot.gate import Readout

# What is counted in the SASS of sm_90: by kind, a pattern of opcodes.
OPCODES = {
    "wgmma": r"[HQ]GMMA",
    "tma": r"UTMALDG",
    "cp.async": r"LDGSTS",
    "local": r"LDL|STL",
}
OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
# ptxas' warning that wgmma instructions are serialized.
SERIALIZED = "C7510"


def read(launches: list[Launch], *, opcodes: bool) -> Readout:
    """Read the kernel that this process compiled for the first of some launches.

    Args:
        launches: Of one kernel.
        opcodes: Whether instructions are counted; it takes half a second.

    Raises:
        ValueError: ptxas said nothing that is understood.
    """
    kernel, log = launches[0].kernel, launches[0].log
    return Readout(
        registers=_number(r"Used (\d+) registers", log),
        spilled=_number(r"(\d+) bytes spill stores", log)
        + _number(r"(\d+) bytes spill loads", log),
        shared=kernel.metadata.shared,
        serialized=SERIALIZED in log,
        opcodes=count_opcodes(_disassemble(kernel.asm["cubin"]) if opcodes else ""),
        compiled=len({id(launch.kernel) for launch in launches}),
    )


def count_opcodes(sass: str) -> dict[str, int]:
    """How many instructions of each kind."""
    found = OPCODE.findall(sass)
    return {
        kind: sum(re.match(pattern, opcode) is not None for opcode in found)
        for kind, pattern in OPCODES.items()
    }


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    if found is None:
        raise ValueError(f"ptxas does not say {pattern!r}:\n{log}")
    return int(found.group(1))


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Without the analysis of its data flow, which takes longest.
        command = [triton.knobs.nvidia.nvdisasm.path, "-ndf", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
