"""The ahead-of-time gate: what it finds wrong, what it reads, and the budget it compares with.

`make aot` compiles every kernel; here only their launches are bound.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fold_kernels.aot import budget
from fold_kernels.aot.gate import SHARED_LIMIT, Expected, Readout, faults
from fold_kernels.aot.readout import count_opcodes
from fold_kernels.tables import BUILT_IN, CANDIDATES, OPS

CLEAN = Readout(
    registers=168,
    spilled=0,
    shared=1000,
    serialized=False,
    opcodes={"wgmma": 4, "tma": 6, "cp.async": 0, "local": 0},
)
EXPECTED = Expected(opcodes=("wgmma", "tma"), pipelined=1000)

SASS = """
        .headerflags    @"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;        /* 0x00000a00ff017b82 */
                                                                 /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R3], desc[UR4][R6.64] ;
        /*0020*/             @!UP1 UTMALDG.3D [UR8], [UR4], desc[UR6] ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0040*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], RZ, !UPT ;
        /*0050*/                   STL.64 [R1], R2 ;
        /*0060*/              @UP0 LDL R2, [R1+0x8] ;
        /*12340*/              @P6 LDG.E R0, desc[UR28][R4.64] ;
"""

# Binds every launch of what is shipped for several numbers of rows, and compiles nothing.
BIND = """
import json
from fold_kernels.aot.driver import activate, compiling
from fold_kernels.aot.shipped import OPS, ROW_COUNTS, shipped
from triton.runtime.jit import JITFunction

activate(90)
bound = {}
for case in shipped():
    keys = bound[case.name] = []
    JITFunction._do_compile = lambda self, key, *rest: keys.append(key) or object()
    with compiling(OPS[case.op].kernel) as launches:
        for rows in ROW_COUNTS:
            OPS[case.op].launch(case, rows)
    assert len(launches) == len(ROW_COUNTS), case.name
print(json.dumps({name: len(set(keys)) for name, keys in bound.items()}))
"""


def test_a_clean_kernel_has_no_faults() -> None:
    assert faults(CLEAN, EXPECTED) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spilled": 8}, "spills 8 bytes"),
        ({"spilled": 8, "opcodes": {**CLEAN.opcodes, "local": 2}}, "spills 8 bytes"),
        ({"opcodes": {**CLEAN.opcodes, "local": 2}}, "local memory, 2 loads and stores"),
        ({"shared": SHARED_LIMIT + 1}, "fewer stages"),
        ({"shared": 999}, "not loaded ahead"),
        ({"serialized": True}, "C7510"),
        ({"compiled": 2}, "compiles 2 times"),
        ({"opcodes": {**CLEAN.opcodes, "wgmma": 0}}, "has no wgmma"),
        ({"opcodes": {**CLEAN.opcodes, "tma": 0}}, "has no tma"),
    ],
)
def test_a_fault_is_found_alone(change: dict, fault: str) -> None:
    (line,) = faults(replace(CLEAN, **change), EXPECTED)
    assert fault in line


def test_what_an_op_does_not_need_is_not_asked_for() -> None:
    bare = replace(CLEAN, shared=0, opcodes=dict.fromkeys(CLEAN.opcodes, 0))
    assert faults(bare, Expected()) == []


def test_instructions_are_counted_behind_their_predicates() -> None:
    assert count_opcodes(SASS) == {"wgmma": 2, "tma": 1, "cp.async": 1, "local": 2}


@pytest.mark.parametrize("costs", [[128, 1000], [127, 1000], [128, 999]])
def test_costs_within_the_budget_pass(costs: list[int]) -> None:
    assert budget.overruns({"up": costs}, {"up": [128, 1000]}) == {}


@pytest.mark.parametrize("costs", [[129, 1000], [128, 1001], [129, 10]])
def test_a_rise_above_the_budget_fails(costs: list[int]) -> None:
    assert "> budget [128, 1000]" in budget.overruns({"up": costs}, {"up": [128, 1000]})["up"]


def test_a_kernel_without_a_budget_fails_and_so_does_a_budget_without_a_kernel() -> None:
    lines = budget.overruns({"up": [1, 1]}, {"gemm": [1, 1]})
    assert lines["up"].startswith("has no budget")
    assert lines["gemm"].startswith("is not shipped")


def test_a_written_budget_reads_back_and_leaves_other_targets(tmp_path: Path) -> None:
    file = tmp_path / "budget.json"
    old, new = budget.target_of("3.6.0", 90), budget.target_of("3.7.0", 90)
    budget.save(old, {"up": [1, 2]}, file)
    budget.save(new, {"up": [3, 4], "gemm": [5, 6]}, file)
    budget.save(new, budget.costs_of({"up": CLEAN}), file)
    assert budget.load(file) == {old: {"up": [1, 2]}, new: {"up": [168, 1000]}}


def test_the_committed_budget_has_one_kernel_a_line() -> None:
    assert budget.BUDGET.read_text() == budget.to_text(budget.load())
    kernels = sum(len(costs) for costs in budget.load().values())
    assert sum(": [" in line for line in budget.BUDGET.read_text().splitlines()) == kernels


def test_both_compilers_have_a_budget_for_the_same_kernels() -> None:
    budgets = budget.load()
    assert set(budgets) == {budget.target_of(version, 90) for version in ("3.6.0", "3.7.0")}
    first, second = budgets.values()
    assert first.keys() == second.keys()


@pytest.mark.parametrize("op", OPS)
def test_candidates_are_not_built_in_already(op: str) -> None:
    built_in = {tile for key, tile in BUILT_IN.items() if key.startswith(f"{op}/")}
    assert built_in.isdisjoint(CANDIDATES[op])
    assert len(set(CANDIDATES[op])) == len(CANDIDATES[op])


def test_what_is_shipped_has_a_budget_and_one_kernel_for_all_numbers_of_rows() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", BIND], env=environment, check=True, capture_output=True, text=True
    )
    bound = json.loads(done.stdout)
    assert bound.keys() == budget.load()[budget.target_of("3.7.0", 90)].keys()
    assert {name: count for name, count in bound.items() if count != 1} == {}
