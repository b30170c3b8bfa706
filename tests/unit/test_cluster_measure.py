"""What the emulated cluster sleeps, leaves out, and measures."""

import math
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cluster import emulate, measure, report
from benchmarks.cluster.measure import Exchange
from benchmarks.cluster.no_exchange import without_exchanges
from benchmarks.cluster.proportions import Proportions
from fold_kernels.swiglu import swiglu
from fold_kernels.weight_store import WeightNode, WeightStore, deferring
from lightning_fold.model.decoder import Decoder, DecoderConfig
from lightning_fold.moe.experts import ExpertRows
from lightning_fold.topology.comm import Comm, Pending


class Work:
    """A message that arrives when it is told to."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def get_future(self) -> Any:
        return self.future

    def wait(self) -> None:
        self.future.result()


class Clock:
    """Time that passes where somebody sleeps, and not otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(emulate, "time", clock)
    monkeypatch.setattr(measure, "time", clock)
    return clock


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    """Two ranks on each axis, of which nobody is there."""
    meshes: Any = SimpleNamespace(size=lambda axis: 2, rank=lambda axis: 1)
    return Comm(meshes, SimpleNamespace(wants=lambda kind: False))  # type: ignore[arg-type]


def pieces(sleeper: emulate.Sleeper) -> list[tuple[str, float]]:
    return [(piece.kind, pytest.approx(piece.end_s - piece.start_s)) for piece in sleeper.slept]


def test_a_piece_takes_its_time_forward_backward_and_for_weights(clock: Clock) -> None:
    sleeper, x = emulate.Sleeper(), torch.ones(3, requires_grad=True)
    sleeper.piece("experts", 2.0, lambda x: x * 2, x).sum().backward()
    assert pieces(sleeper) == [("F", 2.0), ("I", 2.0), ("W", 2.0)]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_arithmetic_is_part_of_a_piece(clock: Clock) -> None:
    def slow(x: Tensor) -> Tensor:
        clock.sleep(1.5)
        return x * 2

    sleeper = emulate.Sleeper()
    sleeper.piece("experts", 2.0, slow, torch.ones(3))
    assert pieces(sleeper) == [("F", 2.0)]
    assert clock.now == 2.0


def test_what_lies_between_pieces_may_be_part_of_them_and_waits_are_not(clock: Clock) -> None:
    sleeper = emulate.Sleeper(counts_rest=True)
    clock.sleep(0.5)
    with sleeper.waiting():
        clock.sleep(7.0)
    clock.sleep(0.25)
    sleeper.piece("attend", 2.0, torch.relu, torch.ones(3))
    # 0.75 of the 2.0 had passed.
    assert clock.now == 0.5 + 7.0 + 0.25 + 1.25
    assert [piece.start_s for piece in sleeper.slept] == [7.5]
    sleeper.piece("attend", 2.0, torch.relu, torch.ones(3))
    clock.sleep(3.0)
    sleeper.start()
    sleeper.piece("attend", 2.0, torch.relu, torch.ones(3))
    assert [piece.end_s - piece.start_s for piece in sleeper.slept[1:]] == [2.0, 2.0]


def test_waits_in_comm_are_told(clock: Clock) -> None:
    class Late(Work):
        def wait(self) -> None:
            clock.sleep(7.0)

    sleeper = emulate.Sleeper(counts_rest=True)
    with emulate.waits_told(sleeper):
        Pending(torch.ones(1), Late()).wait()
        sleeper.piece("attend", 2.0, torch.relu, torch.ones(3))
    assert clock.now == 9.0


def test_weights_wait_in_the_active_store(clock: Clock) -> None:
    sleeper, store = emulate.Sleeper(), WeightStore()
    with deferring(store):
        out = sleeper.piece("attend", 2.0, torch.relu, torch.ones(3, requires_grad=True))
    out.sum().backward()
    assert pieces(sleeper) == [("F", 2.0), ("I", 2.0)]
    store.take()()
    assert pieces(sleeper) == [("F", 2.0), ("I", 2.0), ("W", 2.0)]


def test_attention_takes_its_time_by_tokens(clock: Clock) -> None:
    config = DecoderConfig(hidden_size=16, num_hidden_layers=2, moe_intermediate_size=8)
    model, sleeper = Decoder(config), emulate.Sleeper()
    emulate.slow_attention(model, sleeper, 0.5)
    model(torch.zeros(2, 5, dtype=torch.long))
    assert pieces(sleeper) == [("F", 5.0), ("F", 5.0)]
    assert {piece.what for piece in sleeper.slept} == {"attend"}


def test_experts_take_their_time_by_rows_and_local_width(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_fold.moe import layer

    def two_rows(inputs: Any, *, gate_up_e2FD: Tensor) -> Tensor:
        return torch.zeros(2, 4)

    monkeypatch.setattr(layer, "run_experts", two_rows)
    sleeper = emulate.Sleeper()
    with emulate.slow_experts(sleeper, 0.5, width=8):
        nothing = torch.zeros(0)
        rows = ExpertRows(torch.zeros(2, 4), torch.zeros(6), nothing, nothing, [])
        layer.run_experts(rows, gate_up_e2FD=torch.zeros(1, 2, 4, 4))  # type: ignore[call-arg]
    assert layer.run_experts is two_rows
    # Six rows of half an expert.
    assert pieces(sleeper) == [("F", 1.5)]


@pytest.mark.parametrize("apart", [False, True])
def test_weight_gradients_take_their_time_where_they_are_computed(
    clock: Clock, apart: bool
) -> None:
    from lightning_fold.moe import layer

    sleeper = emulate.Sleeper()
    gate_up, down = torch.ones(1, 2, 4, 4).requires_grad_(), torch.ones(1, 4, 4).requires_grad_()
    with emulate.slow_experts(sleeper, 0.5, width=4):
        counts = torch.tensor([2])
        source = torch.ones(2, 4).requires_grad_()
        rows = ExpertRows(source, torch.arange(2), torch.ones(2), counts, [2])
        out = layer.run_experts(
            rows,
            gate_up_e2FD=gate_up,
            down_eDF=down,
            activation=swiglu,
            put_off=WeightNode(gate_up, down) if apart else None,
        )
        out.sum().backward()
    assert pieces(sleeper) == [("F", 1.0), ("I", 1.0), ("W", 1.0)]
    assert gate_up.grad is not None
    assert down.grad is not None


def test_without_exchanges_nothing_is_sent_and_shapes_are_right(comm: Comm) -> None:
    rows, counts = torch.ones(4, 3), torch.tensor([[1, 2], [3, 4]])
    with without_exchanges():
        arrived = comm.start_all_to_all_rows(rows, [1, 3], [2, 5], axis="ep").wait()
        assert arrived.tolist() == torch.zeros(7, 3).tolist()
        told = comm.start_all_to_all_rows(counts, [1, 1], [1, 1], axis="ep").wait()
        assert told.tolist() == counts.tolist()
        assert comm.all_gather_rows(counts, [2, 2], axis="etp").shape == (4, 2)
        assert comm.start_all_gather_rows(rows, [4, 6], axis="etp").wait().shape == (10, 3)
        assert comm.reduce_scatter_rows(torch.ones(10, 3), [4, 6], axis="etp").shape == (6, 3)
    assert "_local" not in Comm.all_to_all_rows.__qualname__


def test_an_exchange_is_timed_from_start_to_arrival(
    clock: Clock, comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[Work] = []

    def start(comm: Comm, x: Tensor, send: Any, recv: Any, *, axis: str) -> Pending:
        works.append(Work())
        return Pending(x, works[-1])

    monkeypatch.setattr(Comm, "start_all_to_all_rows", start)
    records: list[Exchange] = []
    with measure.watched(records, is_woven=lambda: True):
        pending = comm.start_all_to_all_rows(torch.ones(2, 3), [1, 1], [1, 1], axis="ep")
        counts = comm.start_all_to_all_rows(torch.ones(2, 1).long(), [1, 1], [1, 1], axis="ep")
        clock.sleep(3.0)
        for work in works:
            work.future.set_result(None)
        clock.sleep(2.0)
        assert pending.wait().shape == (2, 3)
        counts.wait()
    assert records == [
        Exchange("ep", 0.0, 3.0, 0.0, True),
        Exchange("ep numbers", 0.0, 3.0, 0.0, True),
    ]


def test_an_exchange_waited_for_at_once_hides_nothing(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comm, "all_gather_rows", lambda comm, x, sizes, axis: x)
    records: list[Exchange] = []
    with measure.watched(records):
        comm.all_gather_rows(torch.ones(2, 3), [2, 2], axis="etp")
        comm.all_gather_rows(torch.ones(2, 3), [2, 2], axis="tp")
    assert [record.axis for record in records] == ["etp"]
    assert measure.hidden_fraction(records) == 0.0


def test_hidden_and_closed_fractions() -> None:
    listed = [Exchange("ep", 0.0, 4.0, 1.0, True), Exchange("ep", 5.0, 6.0, 0.0, False)]
    counts = Exchange("ep numbers", 0.0, 1.0, 1.0, True)
    assert measure.hidden_fraction([*listed, counts]) == pytest.approx(0.8)
    assert measure.hidden_fraction([]) is None
    assert measure.within(listed, (4.5, 7.0)) == listed[1:]
    assert measure.closed_fraction(10.0, 7.0, 6.0) == pytest.approx(0.75)
    assert math.isnan(measure.closed_fraction(10.0, 7.0, 11.0))


def test_proportions_are_those_of_the_real_machine() -> None:
    """Compute of a token against the time of its rows on the link, with any slowdown and width."""
    real, slowdown, hidden = Proportions(), 1000.0, 32
    costs = real.costs(slowdown)
    rates = real.rates(slowdown, hidden=hidden, per_node=4)
    compute = costs.attend + real.top_k * costs.experts
    on_link = real.top_k * hidden * 4 * 8 / (rates.link * 1e6 / 4)
    experts = 2 * 3 * real.hidden * real.width * real.top_k
    attention = 4 * real.hidden * (real.query + real.key_value) + 2 * real.sequence * real.query
    assert compute == pytest.approx(slowdown * (experts + attention) / real.flops)
    assert on_link == pytest.approx(slowdown * real.top_k * real.hidden * 2 / real.link)
    assert rates.inside == pytest.approx(9 * rates.link)


def test_aims_compare_the_right_runs() -> None:
    def ranks(seconds: float, exchanges: list[Exchange]) -> list[dict[str, Any]]:
        timelines: dict[str, Any] = {}
        one = {"seconds": [seconds], "exchanges": exchanges, "timelines": timelines}
        return [one, one]

    woven = [Exchange("ep", 0.0, 10.0, 0.5, True), Exchange("ep", 0.0, 10.0, 10.0, False)]
    results = {
        "overlap.1f1b.plain": ranks(10.0, []),
        "overlap.1f1b.woven": ranks(7.0, woven),
        "overlap.1f1b.bound": ranks(6.0, []),
    }
    pairs, closed, quiet = report.aims(results)
    assert quiet.is_met
    assert (pairs.got, closed.got) == (pytest.approx(0.95), pytest.approx(0.75))
    assert pairs.is_met
    assert closed.is_met


def test_report_lines_are_aligned() -> None:
    assert report.aligned([("a", "b"), ("long", "c")]) == "a     b\nlong  c"


def test_sleeper_serves_any_module() -> None:
    # No attention of the built-in decoder, nothing to slow.
    sleeper, module = emulate.Sleeper(), nn.Linear(2, 2)
    emulate.slow_attention(module, sleeper, 1.0)
    module(torch.ones(1, 2)).sum().backward()
    assert sleeper.slept == []
