"""`lightning-fold tune`: its options, the sweep in the interpreter, and what a table is made of."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from fold_kernels.gpu import launch
from fold_kernels.measured import read_table, table_of
from fold_kernels.tables import BUILT_IN, OPS, Tile
from fold_kernels.tune import machine, sweep
from fold_kernels.tune.cases import CALLS, Case, product_cases
from fold_kernels.tune.compile import jobs_of
from fold_kernels.tune.layers import DRY_LAYER, LAYERS, Inputs, Layer, draw_inputs
from fold_kernels.tune.machine import DRY_CAPABILITY, Budget, Machine, tiles_of
from fold_kernels.tune.report import as_json, lines_of, spell
from fold_kernels.tune.sweep import (
    Timing,
    error_of,
    sweep_products,
    table_from,
    tiles_from,
    time_case,
)
from lightning_fold import cli_tune
from lightning_fold.cli import main

ROOT = Path(__file__).parents[2]
CPU, META = torch.device("cpu"), torch.device("meta")
WIDE, HIGH, OTHER = Tile(128, 256, 64, 3, 8), Tile(128, 128, 64, 4, 4), Tile(64, 256, 64, 4, 4)
ONCE = Machine(CPU, DRY_CAPABILITY, lambda run: float(len(run())), lambda op: [WIDE, HIGH], ())


def error(capfd: pytest.CaptureFixture[str], *words: str, status: int) -> str:
    """The one line with which the command ends."""
    assert main(["tune", *words]) == status
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


# ------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One dry run: its file and what it printed."""
    folder = tmp_path_factory.mktemp("tune")
    path, printed = folder / "tiles.json", folder / "out.txt"
    sizes = "hidden-size 32 expert-width 16 experts 4 top-k 2 tokens 12 budget 900"
    options = re.sub(r"([a-z-]+) ", r"--\1=", sizes).split()
    words = ["tune", "--dry", *options, "--out", str(path)]
    stdout = os.dup(1)
    with printed.open("w") as file:
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        try:
            status = main(words)
            sys.stdout.flush()
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
    assert status == 0
    return path, printed.read_text()


def test_a_dry_run_writes_a_table_that_no_gpu_takes(dry: tuple[Path, str]) -> None:
    path, _ = dry
    table = read_table(path)
    assert table.capability == DRY_CAPABILITY
    assert table.origin["device"] == "interpreter, nothing was timed"
    assert {"torch", "triton", "date"} < set(table.origin)
    with pytest.raises(ValueError, match=r"made for capability \(0, 0\), not \(9, 0\)"):
        table_of((9, 0), str(path))


def test_a_dry_run_times_every_op_and_finds_all_of_them_right(dry: tuple[Path, str]) -> None:
    path, printed = dry
    ops = {key.partition("/")[0] for key in read_table(path).gains}
    rows = {"experts", "router_topk", "expert_index", "gather_rows", "combine_rows"}
    assert ops == {op for op, _ in CALLS} | rows
    assert "not right" not in printed
    assert "the budget is spent" not in printed
    assert [path] == list(path.parent.glob("*.json"))


def test_without_a_gpu_the_command_refuses(capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = error(capfd, status=1)
    assert line.startswith("lightning-fold: error: tune: there is no GPU here, ")
    assert line.endswith("`--dry`.")


def test_a_gpu_that_the_kernels_do_not_serve_is_refused(capfd, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "capability (8, 0) is below (9, 0)" in error(capfd, status=1)


def test_a_sweep_that_fails_is_told(capfd, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli_tune.sys, "executable", "false")
    words = ["--dry", "--out", str(tmp_path / "tiles.json")]
    assert "the sweep ended with status 1" in error(capfd, *words, status=1)
    assert list(tmp_path.iterdir()) == []


SIZES = "--hidden-size 64 --expert-width 48 --experts 8 --top-k 2"
RECIPE = str(next((ROOT / "recipes").glob("qwen3-moe.*.yaml")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--budget 0", "budget=0 must be positive. Change `--budget`."),
        ("--budget nan", "budget=nan must be positive. Change `--budget`."),
        ("--budget long", "argument --budget: invalid float value"),
        ("--out .", "is a directory. Change `--out`."),
        ("--out missing/tiles.json", "lies in no directory"),
        ("--experts 8 --top-k 2", "`--hidden-size`, `--expert-width` missing"),
        (f"{SIZES} --config {RECIPE}", "Leave out `--config` or the sizes."),
        ("--config missing.yaml", "config file 'missing.yaml' does not exist"),
        (f"{SIZES} --ep 3", "ep=3 does not divide 8. Change `--ep`."),
        (f"{SIZES} --etp 5", "etp=5 does not divide 48. Change `--etp`."),
        (f"{SIZES} --ep 0", "ep=0 does not divide 8. Change `--ep`."),
        (f"{SIZES} --ep -1", "ep=-1 does not divide 8"),
        (f"{SIZES} --tokens 0", "tokens=0 must be positive"),
        (f"{SIZES} --top-k 9", "top_k=9 is more than experts=8"),
        (f"{SIZES} --tiles 3", "unrecognized arguments: --tiles 3"),
    ],
)
def test_what_makes_no_sense_is_refused(capfd, words: str, message: str) -> None:
    assert message in error(capfd, *words.split(), status=2)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Any]]:
    """The layers that the command would sweep."""
    requests: list[Any] = []
    monkeypatch.setattr(cli_tune, "_sweep", requests.append)

    def run(words: str) -> list[Any]:
        assert main(["tune", "--dry", "--out", str(tmp_path / "t.json"), *words.split()]) == 0
        layers: list[Any] = requests[-1]["layers"]
        return layers

    return run


def layer(*sizes: int) -> dict[str, Any]:
    return asdict(Layer("layer", *sizes))


def test_one_rank_sees_its_part_of_a_layer(requested: Callable[..., list[Any]]) -> None:
    words = f"{SIZES} --tokens 100"
    assert requested(words) == [layer(64, 48, 8, 2, 100)]
    # Under ep and etp rows arrive once for each of their experts, from all etp peers.
    assert requested(f"{words} --ep 4") == [layer(64, 48, 2, 1, 200)]
    assert requested(f"{words} --ep 4 --etp 2") == [layer(64, 24, 2, 1, 400)]


def test_a_recipe_gives_the_sizes_of_its_layers_and_its_degrees(
    requested: Callable[..., list[Any]],
) -> None:
    # 8 experts of width 64 over ep 4, top-2, hidden size 96; two layers of equal sizes.
    assert requested(f"--config {RECIPE} --tokens 100") == [layer(96, 64, 2, 1, 200)]
    assert requested(f"--config {RECIPE} --tokens 100 --ep 1") == [layer(96, 64, 8, 2, 100)]


def test_without_sizes_public_models_are_swept(requested: Callable[..., list[Any]]) -> None:
    assert requested("") == []
    assert {entry.grain for entry in LAYERS} == {"coarse", "fine"}


# ------------------------------------------------------------ cases


def test_the_calls_of_a_layer_are_its_six_products() -> None:
    inputs = draw_inputs(DRY_LAYER, "uniform", META)
    cases = list(product_cases(inputs))
    assert tuple((case.op, case.variant) for case in cases) == CALLS
    assert sum(case.flop for case in cases) == DRY_LAYER.flop


def test_every_kernel_of_a_sweep_is_compiled_beforehand() -> None:
    jobs = jobs_of([DRY_LAYER], tiles_of)
    assert {(job.op, job.variant) for job in jobs} == set(CALLS)
    assert len(set(jobs)) == len(jobs) == sum(len(tiles_of(op)) for op, _ in CALLS)
    assert {job.layer.experts % 16 for job in jobs_of(LAYERS, tiles_of)} == {0, 8}


@pytest.mark.parametrize("routing", ["uniform", "random", "skewed"])
def test_a_routing_serves_every_token_once_an_expert(routing) -> None:
    torch.manual_seed(0)
    tokens, experts, top_k = 64, 8, 2
    x = draw_inputs(Layer("l", 16, 16, experts, top_k, tokens), routing, CPU).x
    assert sum(x.sizes) == tokens * top_k
    for part in x.origin_R.split(list(x.sizes)):
        assert part.unique().shape == part.shape
    assert x.origin_R.bincount(minlength=tokens).tolist() == [top_k] * tokens
    assert (0 in x.sizes) is (routing == "skewed")
    if routing == "uniform":
        assert len(set(x.sizes)) == 1


# ------------------------------------------------------------ timings


def inputs_of() -> Inputs:
    return draw_inputs(Layer("l", 16, 16, 2, 1, 4), "uniform", CPU)


def case_of(kernel: Callable[[Tile | None], Any]) -> Case:
    wanted = torch.arange(1.0, 5.0)
    return Case("gemm", "NT", "many", kernel, {"replaced": lambda: (wanted,)})


def test_a_tile_with_right_results_is_timed() -> None:
    timing = time_case(inputs_of(), case_of(lambda _: (torch.arange(1.0, 5.0),)), ONCE)
    assert timing.tiles == {WIDE: 1.0, HIGH: 1.0}
    assert timing.wrong == {}
    assert timing.baselines == {"replaced": 1.0}


@pytest.mark.parametrize(
    ("got", "fault"),
    [
        (lambda: torch.arange(1.0, 5.0) * 1.02, "off by 2.0e-02"),
        (lambda: torch.tensor([1.0, 2.0, 3.0, torch.nan]), "off by inf"),
        (lambda: torch.empty(4), "off by inf"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
    ids=["off", "nan", "not written", "raises"],
)
def test_a_tile_with_wrong_results_is_not(got: Callable[[], Any], fault: str) -> None:
    def kernel(tile: Tile | None) -> Any:
        return (got() if tile == WIDE else torch.arange(1.0, 5.0),)

    timing = time_case(inputs_of(), case_of(kernel), ONCE)
    assert timing.wrong == {WIDE: fault}
    assert timing.tile == HIGH
    assert f"not right: l gemm NT {spell(WIDE)}, uniform: {fault}" in list(lines_of([timing]))


def test_integers_have_to_be_equal() -> None:
    ids = torch.arange(5)
    assert error_of((ids,), (ids.clone(),)) == 0.0
    assert error_of((ids,), (ids + 1,)) == inf


def test_a_case_that_fails_does_not_end_the_others(monkeypatch) -> None:
    def fail() -> Any:
        raise RuntimeError("out of memory\nand more")

    good, bad = case_of(lambda _: (torch.arange(1.0, 5.0),)), case_of(lambda _: ())
    bad.baselines["replaced"] = fail
    monkeypatch.setattr(sweep, "product_cases", lambda _: iter([bad, good]))
    said: list[str] = []
    timings = list(sweep_products([DRY_LAYER], ["uniform"], ONCE, Budget(900.0), said.append))
    assert [timing.tile for timing in timings] == [WIDE]
    assert said[1:] == ["not timed: tiny gemm NT: out of memory"]


@pytest.mark.parametrize(("milliseconds", "calls"), [(0.001, 20), (5.0, 10), (300.0, 3)])
def test_a_gpu_s_clock_takes_the_median_of_as_many_calls_as_fit(
    milliseconds: float, calls: int, monkeypatch
) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def elapsed_time(self, stop: Event) -> float:
            return milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ran: list[int] = []
    seconds = machine.cuda_seconds(lambda: ran.append(1) or ())
    assert seconds == pytest.approx(milliseconds * 1e-3)
    # One call warms up, one says how many fit.
    assert len(ran) == calls + 2


def timing_of(tiles: dict[Tile | None, float], replaced: float, **changes: Any) -> Timing:
    fields = {"op": "gemm", "variant": "NT", "kind": "many", "flop": 1, "moved": 0} | changes
    baselines = {"replaced": replaced}
    return Timing(DRY_LAYER, "random", tiles=tiles, wrong={}, baselines=baselines, **fields)


def table(*timings: Timing) -> Any:
    return table_from(timings, capability=(9, 0), origin={"device": "here"})


def test_the_tile_of_a_kind_is_the_one_that_loses_least_over_all_its_calls() -> None:
    # In sum HIGH is quicker, but the second call loses more by it than the first gains.
    found = table(timing_of({WIDE: 10.0, HIGH: 9.0}, 12.0), timing_of({WIDE: 1.0, HIGH: 1.5}, 1.2))
    assert found.tiles == {**BUILT_IN, "gemm/many": WIDE}
    assert found.gains == {"gemm/many": 1.2}
    assert (found.capability, found.origin) == ((9, 0), {"device": "here"})


def test_a_gain_is_the_worst_of_a_kind() -> None:
    found = table(timing_of({WIDE: 1.0}, 2.0), timing_of({WIDE: 1.0}, 0.9))
    assert found.gains == {"gemm/many": 0.9}


def test_a_tile_that_is_wrong_somewhere_is_no_tile_of_the_table() -> None:
    found = table(timing_of({WIDE: 1.0, HIGH: 5.0}, 6.0), timing_of({HIGH: 5.0}, 6.0))
    assert found.tiles["gemm/many"] == HIGH
    assert found.gains == {"gemm/many": 1.2}


def test_an_op_without_a_right_tile_has_no_gain() -> None:
    found = table(timing_of({WIDE: 1.0}, 2.0), timing_of({}, 2.0))
    assert found.gains == {}
    assert found.tiles == BUILT_IN


def test_kinds_are_apart_and_ops_without_tiles_have_gains_alone() -> None:
    found = table(
        timing_of({OTHER: 1.0}, 2.0, kind="few"),
        timing_of({None: 1.0}, 3.0, op="combine_rows", kind="narrow"),
    )
    assert found.tiles == {**BUILT_IN, "gemm/few": OTHER}
    assert found.gains == {"gemm/few": 2.0, "combine_rows/narrow": 3.0}


def test_the_quickest_tile_is_tried_in_other_orders() -> None:
    seconds = {WIDE: 2.0, HIGH: 1.0}
    tried: list[Tile | None] = []

    def kernel(tile: Tile | None) -> Any:
        tried.append(tile)
        return (torch.arange(1.0, 5.0),)

    def clock(run: Callable[[], Any]) -> float:
        run()
        return seconds.get(tried[-1], 3.0) if tried else 1.0

    orders = Machine(CPU, DRY_CAPABILITY, clock, lambda op: [WIDE, HIGH], groups=(4, 8))
    timing = time_case(inputs_of(), case_of(kernel), orders)
    assert set(timing.tiles) == {WIDE, HIGH, Tile(128, 128, 64, 4, 4, group=4)}


def test_a_spent_budget_stops_before_the_next_layer() -> None:
    said: list[str] = []
    spent = sweep_products(LAYERS, ["uniform"], ONCE, Budget(0.0), said.append)
    assert list(spent) == []
    assert said == ["the budget is spent before mixtral-8x7b, uniform routing"]


def test_a_part_of_a_budget_begins_with_it(monkeypatch) -> None:
    whole = Budget(100.0, start=0.0)
    monkeypatch.setattr(machine.time, "monotonic", lambda: 60.0)
    assert whole.left == 40.0
    assert whole.part(0.7).left == pytest.approx(10.0)


def test_launches_take_the_tiles_of_a_table_while_they_are_told_to() -> None:
    found = table(timing_of({OTHER: 1.0}, 2.0))
    stock = launch.table_for
    with tiles_from(found):
        assert launch.table_for(CPU) is found
    assert launch.table_for is stock


def test_every_op_has_several_tiles_and_the_others_none() -> None:
    for op in OPS:
        tiles = tiles_of(op)
        assert len(tiles) > 1
        assert len(set(tiles)) == len(tiles)
        assert None not in tiles
    assert tiles_of("combine_rows") == [None]


def test_a_timing_is_written_with_all_its_tiles() -> None:
    written = as_json(timing_of({WIDE: 1.0, None: 2.0}, 3.0))
    assert written["tiles"] == {"128x256x64s3w8g8p2": 1.0, "-": 2.0}
    assert written["layer"]["name"] == "tiny"
