"""Which form of an op runs: every rule of `fold_kernels.backend`, for any machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fold_kernels import backend
from fold_kernels.backend import (
    BACKENDS,
    FORCE_VARIABLE,
    TILES_VARIABLE,
    Choice,
    Request,
    choose,
    choose_for,
    grouped_mm_serves,
    runs_triton,
    why_not_grouped_mm,
    why_not_te,
    why_not_triton,
)
from fold_kernels.expert_forms import choose_form, form_of
from fold_kernels.measured import Table
from fold_kernels.swiglu import swiglu
from fold_kernels.tables import BUILT_IN, kind_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# What the kernels and torch serve at their best.
HOPPER = Request("experts", "cuda", BF16, (4096, 1024), 32768, 8, (9, 0))


def measured(request: Request, gain: float) -> Table:
    """A table in which everything has one gain."""
    keys = [f"{request.op}/{kind}" for kind in ("many", "few", "narrow")]
    return Table(BUILT_IN, dict.fromkeys(keys, gain), request.capability)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Variables of this process, and what it remembers of them."""
    for name in (FORCE_VARIABLE, TILES_VARIABLE, "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    caches = backend._log_once, backend.table_for
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


# ------------------------------------------------------------ every call there may be

requests = st.builds(
    Request,
    op=st.sampled_from(["experts", "up", "gemm", "down_backward", "wgrad"]),
    device_type=st.sampled_from(["cpu", "cuda"]),
    dtype=st.sampled_from([BF16, FP16, FP32, FP64]),
    widths=st.lists(
        st.sampled_from([0, 1, 8, 12, 16, 40, 64, 100, 128, 4096]), min_size=2, max_size=2
    ).map(tuple),
    rows=st.sampled_from([0, 1, 300, 1 << 20, (1 << 31) - 1, 1 << 31]),
    experts=st.sampled_from([1, 8, 2047, 2048]),
    capability=st.sampled_from([None, (8, 0), (8, 9), (9, 0), (10, 0)]),
    obstacle=st.sampled_from([None, None, "its activation has no kernel"]),
)
gains = st.sampled_from([None, 0.5, 0.999, 1.0, 1.7])


def table_with(request: Request, gain: float | None) -> Table | None:
    return None if gain is None else measured(request, gain)


@settings(deadline=None)
@given(requests, gains, st.booleans())
def test_nobody_is_given_triton_that_it_cannot_or_need_not_serve(
    request: Request, gain: float | None, interpreted: bool
) -> None:
    choice = choose(request, table=table_with(request, gain), interpreted=interpreted)
    assert choice.reason
    served = (
        request.device_type == "cuda"
        and request.dtype in (BF16, FP16)
        and request.capability is not None
        and request.capability >= (9, 0)
        and all(width % 16 == 0 for width in request.widths)
        and request.experts <= 2047
        and request.rows < 1 << 31
        and request.obstacle is None
    )
    # Also an interpreter that is there is no reason: it takes hours.
    assert (choice.backend == "triton") == (served and gain is not None and gain >= 1.0)


@settings(deadline=None)
@given(requests, gains)
def test_nobody_is_given_grouped_mm_whose_dtype_or_strides_it_refuses(
    request: Request, gain: float | None
) -> None:
    choice = choose(request, table=table_with(request, gain))
    if choice.backend == "torch_grouped_mm":
        assert request.device_type == "cuda"
        assert request.dtype == BF16
        assert all(w > 0 and w * request.dtype.itemsize % 16 == 0 for w in request.widths)


@settings(deadline=None)
@given(requests, gains)
def test_a_cpu_loops_and_nobody_is_given_te(request: Request, gain: float | None) -> None:
    backend_of = choose(request, table=table_with(request, gain)).backend
    assert backend_of in BACKENDS
    assert backend_of != "te"
    if request.device_type == "cpu":
        assert backend_of == "loop"


@settings(deadline=None)
@given(requests, st.sampled_from(BACKENDS), st.booleans())
def test_what_is_forced_runs_or_is_refused_with_one_reason(
    request: Request, forced: str, interpreted: bool
) -> None:
    obstacle = {
        "triton": lambda: why_not_triton(request, interpreted=interpreted),
        "torch_grouped_mm": lambda: why_not_grouped_mm(request),
        "te": lambda: why_not_te(request),
        "loop": lambda: None,
    }[forced]()
    if obstacle is None:
        choice = choose(request, forced=forced, interpreted=interpreted)
        assert choice == Choice(forced, f"{FORCE_VARIABLE} forces it")
        return
    with pytest.raises(ValueError, match=f"^{FORCE_VARIABLE}={forced} cannot serve ") as refused:
        choose(request, forced=forced, interpreted=interpreted)
    message = str(refused.value)
    assert obstacle in message
    assert message.endswith("Change or unset it.")
    assert len(message.splitlines()) == 1


@settings(deadline=None)
@given(requests)
def test_a_choice_depends_on_the_call_alone(request: Request) -> None:
    table = measured(request, 1.2)
    assert choose(request, table=table) == choose(replace(request), table=table)


# ------------------------------------------------------------ single rules


def test_the_best_case_runs_triton() -> None:
    assert choose(HOPPER, table=measured(HOPPER, 1.0)).backend == "triton"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_type": "xpu"}, "tensors are on xpu"),
        ({"dtype": FP32}, "no form for torch.float32"),
        ({"dtype": FP64}, "no form for torch.float64"),
        ({"capability": None}, "capability None is below"),
        ({"capability": (8, 9)}, r"capability \(8, 9\) is below \(9, 0\)"),
        ({"widths": (4096, 1032)}, r"widths \[1032\] are no multiples of 16"),
        ({"experts": 2048}, "2048 experts are more than 2047"),
        ({"rows": 1 << 31}, "2147483648 rows are not below"),
        ({"obstacle": "its activation has no kernel"}, "its activation has no kernel"),
    ],
    ids=str,
)
def test_each_obstacle_keeps_triton_away_and_is_named(change: dict, reason: str) -> None:
    request = replace(HOPPER, **change)
    choice = choose(request, table=measured(HOPPER, 2.0))
    assert choice.backend != "triton"
    with pytest.raises(ValueError, match=reason):
        choose(request, forced="triton")


def test_without_triton_nothing_asks_for_it(monkeypatch) -> None:
    monkeypatch.setattr(backend, "has_triton", lambda: False)
    choice = choose(HOPPER, table=measured(HOPPER, 2.0))
    assert choice == Choice("torch_grouped_mm", "no triton: triton is not installed")


@pytest.mark.parametrize("table", [None, Table(), measured(HOPPER, 0.97)], ids=str)
def test_what_was_not_timed_or_is_slower_runs_as_torch(table: Table | None) -> None:
    choice = choose(HOPPER, table=table)
    assert choice.backend == "torch_grouped_mm"
    slower = table is not None and table.gains
    wanted = "0.97 of the speed of what it replaces" if slower else "never timed on this GPU"
    assert wanted in choice.reason


@pytest.mark.parametrize(
    ("rows", "width", "kind"), [(32768, 1024, "many"), (1024, 1024, "few"), (32768, 64, "narrow")]
)
def test_a_gain_holds_for_its_own_kind_of_shape(rows: int, width: int, kind: str) -> None:
    request = replace(HOPPER, rows=rows, widths=(4096, width))
    assert kind_of(rows=rows, experts=8, width=width) == kind
    one = Table(BUILT_IN, {f"experts/{kind}": 1.5}, (9, 0))
    others = Table(BUILT_IN, {f"experts/{k}": 1.5 for k in ("many", "few", "narrow") if k != kind})
    assert choose(request, table=one).backend == "triton"
    assert choose(request, table=others).backend == "torch_grouped_mm"


def test_both_obstacles_are_named_where_neither_serves() -> None:
    choice = choose(replace(HOPPER, dtype=FP64))
    assert choice.backend == "loop"
    assert "no triton: " in choice.reason
    assert "no grouped_mm: " in choice.reason


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_an_interpreter_serves_what_is_forced_on_a_cpu(dtype: torch.dtype) -> None:
    request = Request("experts", "cpu", dtype, (48, 40), 7, 4)
    assert choose(request, forced="triton", interpreted=True).backend == "triton"
    assert choose(request, interpreted=True).backend == "loop"
    with pytest.raises(ValueError, match="tensors are on cpu"):
        choose(request, forced="triton")


def test_an_interpreter_has_no_fp64() -> None:
    with pytest.raises(ValueError, match=r"no form for torch\.float64 on cpu"):
        choose(Request("experts", "cpu", FP64), forced="triton", interpreted=True)


@pytest.mark.parametrize("name", ["cutlass", "Triton", "torch"])
def test_an_unknown_backend_is_refused_with_the_legal_ones(name: str) -> None:
    with pytest.raises(ValueError, match="must be one of triton, torch_grouped_mm, te, loop") as e:
        choose(HOPPER, forced=name)
    assert str(e.value).startswith(f"{FORCE_VARIABLE}={name!r}")
    assert str(e.value).endswith("Change or unset it.")


def test_nothing_is_forced_by_an_empty_variable(monkeypatch) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, "")
    assert choose_for(torch.zeros(3, 8), Request("experts", "cpu", FP32)).backend == "loop"


def test_transformer_engine_is_refused_where_it_is_not_installed() -> None:
    with pytest.raises(ValueError, match="tensors are on cpu"):
        choose(Request("experts", "cpu", BF16), forced="te")
    if why_not_te(HOPPER) is not None:
        with pytest.raises(ValueError, match="transformer_engine"):
            choose(HOPPER, forced="te")


# ------------------------------------------------------------ what this process was told


def test_the_variable_decides_the_form_of_the_experts(monkeypatch) -> None:
    source, weight = torch.zeros(6, 8), torch.zeros(2, 2, 16, 8)
    assert choose_form(source, weight, swiglu, [3, 3]) is form_of("loop")
    monkeypatch.setenv(FORCE_VARIABLE, "torch_grouped_mm")
    assert choose_form(source, weight, swiglu, [3, 3]) is form_of("torch_grouped_mm")
    monkeypatch.setenv(FORCE_VARIABLE, "triton")
    with pytest.raises(ValueError, match=f"{FORCE_VARIABLE}=triton cannot serve experts"):
        choose_form(source, weight, swiglu, [3, 3])


def test_an_activation_without_a_kernel_is_no_work_for_triton(monkeypatch) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="its activation has no kernel"):
        choose_form(torch.zeros(6, 8), torch.zeros(2, 2, 16, 8), torch.relu, [3, 3])


def test_a_table_that_is_none_is_refused_when_it_is_first_asked(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(TILES_VARIABLE, str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match=r"Table of tiles .*missing\.json: cannot be read"):
        choose_for(torch.zeros(3, 8), Request("experts", "cpu", FP32))


def test_an_empty_variable_names_no_table(monkeypatch) -> None:
    monkeypatch.setenv(TILES_VARIABLE, "")
    assert choose_for(torch.zeros(3, 8), Request("experts", "cpu", FP32)).backend == "loop"


def test_the_interpreter_asks_rows_to_be_aligned_as_well() -> None:
    for width, dtype, serves in ((20, BF16, False), (24, BF16, True), (20, FP32, True)):
        request = Request("gemm", "cpu", dtype, widths=(width, 16))
        obstacle = why_not_triton(request, interpreted=True)
        assert (obstacle is None) is serves
        assert serves or obstacle == "rows of [20] elements are no multiples of 16 bytes"


def test_a_choice_is_logged_once_an_op_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fold_kernels.backend")
    rows = torch.zeros(3, 8)
    for _ in range(3):
        choose_for(rows, Request("experts", "cpu", FP32))
        choose_for(rows, Request("wgrad", "cpu", FP32))
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "experts: loop",
        "wgrad: loop",
    ]


@pytest.mark.parametrize(
    ("forced", "interpreted", "runs"),
    [(None, "0", False), (None, "1", False), ("triton", "1", True), ("loop", "1", False)],
)
def test_ops_around_the_products_run_as_kernels_where_they_are_forced(
    forced: str | None, interpreted: str, runs: bool, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    if forced is not None:
        monkeypatch.setenv(FORCE_VARIABLE, forced)
    assert runs_triton(torch.zeros(3, 8), "combine_rows") is runs
    assert not runs_triton(torch.zeros(3, 8), "router_topk", obstacle="an odd number of groups")


@pytest.mark.parametrize(
    ("rows", "widths", "dtype", "serves"),
    [
        (5, (8, 8), BF16, True),
        (5, (4, 4), FP32, True),
        (5, (8, 4), BF16, False),
        (5, (60, 64), BF16, False),
        (5, (8, 8), FP64, False),
        (0, (8, 8), BF16, False),
    ],
)
def test_grouped_mm_serves_what_torch_accepts(rows, widths, dtype, serves: bool) -> None:
    operand = torch.zeros(rows, widths[0], dtype=dtype)
    assert grouped_mm_serves(operand, *widths) is serves
    weight = torch.zeros(2, widths[1], widths[0], dtype=dtype)
    ends = torch.tensor([rows, rows], dtype=torch.int32)
    if serves:
        torch.nn.functional.grouped_mm(operand, weight.mT, offs=ends)


def test_a_forced_loop_keeps_grouped_mm_away(monkeypatch) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, "loop")
    assert not grouped_mm_serves(torch.zeros(5, 8, dtype=BF16), 8, 8)


@pytest.mark.parametrize(
    ("dtypes", "dtype"), [((torch.float32,), torch.float32), ((torch.int64,), torch.int64)]
)
def test_kernels_of_other_dtypes_serve_a_gpu_too(dtypes, dtype) -> None:
    """The router's takes fp32 and the index's int64, which no product takes."""
    request = Request("op", "cuda", dtype, rows=8, capability=(9, 0), dtypes=dtypes)
    assert why_not_triton(request, interpreted=False) is None
    product = Request("op", "cuda", dtype, rows=8, capability=(9, 0))
    assert f"no form for {dtype}" in str(why_not_triton(product, interpreted=False))
