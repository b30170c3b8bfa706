"""Passes on a tape: gradients of plain autograd, the order of launches, and what is let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fold.pipeline.tape import Steps, Tape, Value, drain, weave
from lightning_fold.topology.comm import Pending
from lightning_fold.topology.in_flight import Hop

ROWS, WIDTH = 6, 4
# Rows turned by two; and a gather of two equal ranks, whose transpose sums the halves.
TURN = Hop("exchange", "ep", (2, 4), (4, 2))
DOUBLE = Hop("gather", "etp", (ROWS, ROWS))


class OneProcess:
    """Exchanges as they are between ranks that hold the same; notes launches and waits."""

    def __init__(self, log: list[str] | None = None, name: str = "") -> None:
        self.log: list[str] = [] if log is None else log
        self.name = name
        self.in_flight = self.most_in_flight = 0

    def start_all_to_all_rows(self, rows: Tensor, send: Any, recv: Any, *, axis: str) -> Pending:
        return self._start("exchange", rows.roll(2 if send[0] == 2 else -2, 0))

    def start_all_gather_rows(self, rows: Tensor, sizes: Any, *, axis: str) -> Pending:
        return self._start("gather", torch.cat([rows, rows]))

    def start_reduce_scatter_rows(self, rows: Tensor, sizes: Any, *, axis: str) -> Pending:
        return self._start("scatter", rows[:ROWS] + rows[ROWS:])

    def _start(self, kind: str, out: Tensor) -> Pending:
        self.log.append(f"{self.name}{kind}")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return Pending(out).then(self._land)

    def _land(self, out: Tensor) -> Tensor:
        self.log.append(f"{self.name}wait")
        self.in_flight -= 1
        return out


class Around:
    """Random numbers of its own, and how often it was entered for what."""

    def __init__(self) -> None:
        self.entered: list[bool] = []
        self._numbers = torch.Generator().manual_seed(11).get_state()

    def mark(self) -> Tensor:
        return self._numbers

    @contextmanager
    def __call__(self, mark: Tensor | None = None, *, repeats: bool = False) -> Iterator[None]:
        self.entered.append(repeats)
        others = torch.get_rng_state()
        torch.set_rng_state(self._numbers if mark is None else mark)
        try:
            yield
        finally:
            if mark is None:
                self._numbers = torch.get_rng_state()
            torch.set_rng_state(others)


def rows(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def upstream(value: Value) -> None:
    generator = torch.Generator().manual_seed(9)
    value.slot.add(torch.randn(value.data.shape, generator=generator, dtype=value.data.dtype))


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(WIDTH, WIDTH).double()


def equal(one: Tensor | None, two: Tensor | None) -> None:
    assert one is not None
    assert two is not None
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------ gradients

Exchanged = Callable[[Hop, Tensor], Tensor]


def turned(hop: Hop, x: Tensor) -> Tensor:
    return x.roll(2, 0) if hop is TURN else torch.cat([x, x])


def steps_of(tape: Tape, comm: Any, weight: nn.Linear, x: Value) -> Steps[Value]:
    """Values used twice, values that nobody uses, integers on the wire."""

    def first(x: Tensor) -> tuple[Tensor, ...]:
        h = weight(x).tanh()
        return h, h * 2, x.sum(1).argsort(), h.square()

    def second(h: Tensor, order: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (weight(h[order % ROWS] + x.repeat(2, 1)).sin(),)

    def last(h: Tensor, back: Tensor, again: Tensor) -> tuple[Tensor, ...]:
        return (h[:ROWS] * h[ROWS:] * back + again,)

    h, unused, order, squared = tape.compute(first, x)
    h, order, _ = yield from tape.exchange(TURN, comm, h, order, unused)
    assert not order.data.is_floating_point()
    h, order = yield from tape.exchange(DOUBLE, comm, h, order)
    (out,) = tape.compute(second, h, order, x)
    (back,) = yield from tape.exchange(TURN, comm, squared)
    (end,) = tape.compute(last, out, back, x)
    return end


def plainly(weight: nn.Linear, x: Tensor) -> Tensor:
    h = weight(x).tanh()
    order = x.sum(1).argsort()
    sent, order_sent = turned(DOUBLE, turned(TURN, h)), turned(DOUBLE, turned(TURN, order))
    out = weight(sent[order_sent % ROWS] + x.repeat(2, 1)).sin()
    return out[:ROWS] * out[ROWS:] * turned(TURN, h.square()) + x


@pytest.mark.parametrize("repeats", [False, True])
def test_outputs_and_gradients_are_those_of_plain_autograd(repeats: bool) -> None:
    weight, x = linear(), rows().requires_grad_()
    out = plainly(weight, x)
    generator = torch.Generator().manual_seed(9)
    out.backward(torch.randn(out.shape, generator=generator, dtype=out.dtype))
    wanted = [x.grad, weight.weight.grad, weight.bias.grad]
    weight.zero_grad()

    tape, start = Tape(Around(), repeats=repeats), Value(rows())
    end = drain(steps_of(tape, OneProcess(), weight, start))
    equal(end.data, out)
    upstream(end)
    drain(tape.backward())
    for got, want in zip(
        [start.slot.take(), weight.weight.grad, weight.bias.grad], wanted, strict=True
    ):
        equal(got, want)


@pytest.mark.parametrize("repeats", [False, True])
def test_outputs_without_a_graph_and_inputs_without_use_have_no_gradient(repeats: bool) -> None:
    def run(x: Tensor, ids: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        return x * 2, x.detach() * 3, ids + 1, torch.ones_like(x)

    tape = Tape(Around(), repeats=repeats)
    x, unused = Value(rows()), Value(rows(1))
    ids = Value(torch.arange(ROWS))
    outs = tape.compute(run, x, ids, unused)
    for out in (outs[0], outs[1], outs[3]):
        upstream(out)
    drain(tape.backward())
    grad = x.slot.take()
    upstream(x)
    equal(grad, x.slot.take() * 2)
    assert unused.slot.take() is None
    assert ids.slot.take() is None


def test_nobody_asks_for_a_gradient() -> None:
    tape, x, weight = Tape(Around()), Value(rows()), linear()
    tape.compute(lambda x: (weight(x),), x)
    drain(tape.backward())
    assert x.slot.take() is None
    assert weight.weight.grad is None


@pytest.mark.parametrize("hop", [TURN, DOUBLE])
def test_an_exchange_that_nobody_uses_sends_zeros_back(hop: Hop) -> None:
    """Its peers wait for them, and what integers it carries have none."""
    comm, tape = OneProcess(), Tape(Around())
    x, ids, y = Value(rows()), Value(torch.arange(ROWS)), Value(rows(1))
    drain(tape.exchange(hop, comm, x, ids, y))
    kind, back = hop.kind, hop.transposed.kind
    assert comm.log == [kind] * 3 + ["wait"] * 3
    drain(tape.backward())
    assert comm.log[6:] == [back] * 2 + ["wait"] * 2
    for value in (x, y):
        equal(value.slot.take(), torch.zeros_like(value.data))
    assert ids.slot.take() is None


def test_no_rows_travel_too() -> None:
    nobody = Hop("exchange", "ep", (0, 0), (0, 0))
    comm, tape, weight = OneProcess(), Tape(Around()), linear()
    x = Value(rows()[:0])
    (h,) = drain(tape.exchange(nobody, comm, x))
    (end,) = tape.compute(lambda h: (weight(h),), h)
    upstream(end)
    drain(tape.backward())
    assert comm.log == ["exchange", "wait"] * 2
    grad = x.slot.take()
    assert grad is not None
    assert grad.shape == (0, WIDTH)
    assert not weight.weight.grad.any()


def test_a_gradient_of_an_exchange_keeps_its_dtype() -> None:
    comm, tape = OneProcess(), Tape(Around())
    x = Value(rows().bfloat16())
    (h,) = drain(tape.exchange(TURN, comm, x))
    (end,) = tape.compute(lambda h: (h.double().sin(),), h)
    upstream(end)
    drain(tape.backward())
    grad = x.slot.take()
    assert grad is not None
    assert grad.dtype == torch.bfloat16


# ------------------------------------------------------------ repetition


class Noisy:
    """Chooses from numbers that are others in each run, by more than what parts them."""

    def __init__(self) -> None:
        self.chosen: list[Tensor] = []
        self.runs = 0

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        self.runs += 1
        near = torch.ones_like(x) + 1e-9 * torch.randn(x.shape, generator=self.generator)
        _, index = near.topk(2)
        self.chosen.append(index)
        return (x.gather(1, index).sin(), index)

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.runs)


def test_a_repetition_chooses_as_before() -> None:
    tape, run, x = Tape(Around(), repeats=True), Noisy(), Value(rows())
    end, index = tape.compute(run, x)
    upstream(end)
    weight = end.slot.grad
    assert weight is not None
    drain(tape.backward())
    first, again = run.chosen
    assert torch.equal(first, again)
    assert torch.equal(index.data, first)
    own = x.data.clone().requires_grad_()
    (own.gather(1, first).sin() * weight).sum().backward()
    equal(x.slot.take(), own.grad)


def test_noise_alone_would_have_chosen_otherwise() -> None:
    run = Noisy()
    run(rows())
    run(rows())
    assert not torch.equal(*run.chosen)


def test_a_repetition_draws_what_was_drawn() -> None:
    gradients = []
    for repeats in (False, True):
        tape, start = Tape(Around(), repeats=repeats), Value(rows())
        drop = nn.Dropout(0.5)
        value = start
        for _ in range(3):
            (value,) = tape.compute(lambda x, drop=drop: (drop(x).sin(),), value)
            # Others draw in between.
            torch.rand(5)
        upstream(value)
        drain(tape.backward())
        gradients.append((value.data, start.slot.take()))
    for one, two in zip(*gradients, strict=True):
        equal(one, two)


def test_each_computation_runs_within_its_surroundings() -> None:
    around, runs = Around(), []
    tape = Tape(around, repeats=True)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        runs.append(torch.is_grad_enabled())
        return (x * 2,)

    (middle,) = tape.compute(run, Value(rows()))
    (end,) = tape.compute(run, middle, once=True)
    assert around.entered == [False, False]
    upstream(end)
    drain(tape.backward())
    # The second one never runs again.
    assert around.entered == [False, False, True]
    assert runs == [False, True, True]


@pytest.mark.parametrize("repeats", [False, True])
def test_what_runs_once_runs_once(repeats: bool) -> None:
    runs = []
    tape = Tape(Around(), repeats=repeats)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        runs.append(None)
        return (x.sin(),)

    (end,) = tape.compute(run, Value(rows()), once=True)
    upstream(end)
    drain(tape.backward())
    assert len(runs) == 1


# ------------------------------------------------------------ taking turns


def chain(
    comm: Any, weight: nn.Linear, length: int, log: list[str] | None = None
) -> tuple[Tape, Value, Steps[Value]]:
    tape, start = Tape(Around()), Value(rows())

    def run(x: Tensor) -> tuple[Tensor, ...]:
        if log is not None:
            log.append(f"{comm.name}compute")
        return (weight(x).sin(),)

    def steps() -> Steps[Value]:
        value = start
        for _ in range(length):
            (value,) = tape.compute(run, value)
            (value,) = yield from tape.exchange(TURN, comm, value)
        return value

    return tape, start, steps()


def backward_of(comm: Any, weight: nn.Linear, length: int) -> tuple[Tape, Steps[None]]:
    tape, _, steps = chain(comm, weight, length)
    upstream(drain(steps))
    comm.log.clear()
    return tape, tape.backward()


@pytest.mark.parametrize(("one", "two"), [(3, 3), (4, 1), (1, 4), (0, 2), (2, 0)])
def test_launches_take_turns_and_the_first_pass_launches_first(one: int, two: int) -> None:
    seen = []
    for _ in range(2):
        log: list[str] = []
        b, f = OneProcess(log, "B "), OneProcess(log, "F ")
        _, backward = backward_of(b, linear(), one)
        _, _, forward = chain(f, linear(), two)
        weave(backward, forward)
        seen.append(list(log))
        assert b.most_in_flight <= 1
        assert f.most_in_flight <= 1
        assert b.in_flight == f.in_flight == 0
    assert seen[0] == seen[1]
    launches = [entry for entry in seen[0] if "exchange" in entry]
    turns = min(one, two)
    assert launches[: 2 * turns] == ["B exchange", "F exchange"] * turns
    assert len(launches) == one + two
    if turns:
        # Each waits only after the other one has launched.
        assert seen[0][:3] == ["B exchange", "F exchange", "B wait"]


def test_one_computes_while_the_others_exchange_is_in_flight() -> None:
    log: list[str] = []
    one, two = OneProcess(log, "1 "), OneProcess(log, "2 ")
    weave(chain(one, linear(), 2, log)[2], chain(two, linear(), 2, log)[2])
    assert log == [
        "1 compute",
        "1 exchange",
        "2 compute",
        "2 exchange",
        "1 wait",
        "1 compute",
        "1 exchange",
        "2 wait",
        "2 compute",
        "2 exchange",
        "1 wait",
        "2 wait",
    ]


def test_woven_passes_have_the_gradients_of_single_ones() -> None:
    weight = linear()
    tape, start, steps = chain(OneProcess(), weight, 3)
    upstream(drain(steps))
    drain(tape.backward())
    wanted = start.slot.take(), weight.weight.grad
    weight.zero_grad()
    first, start, steps = chain(OneProcess(), weight, 3)
    upstream(drain(steps))
    weave(first.backward(), chain(OneProcess(), weight, 3)[2])
    equal(start.slot.take(), wanted[0])
    equal(weight.weight.grad, wanted[1])


def test_the_gap_is_filled_between_launch_and_wait() -> None:
    comm = OneProcess()
    tape, backward = backward_of(comm, linear(), 2)
    tape.in_the_gap = lambda: comm.log.append("gap")
    drain(backward)
    assert comm.log == ["exchange", "gap", "wait"] * 2


def test_a_repetition_runs_while_the_gradient_travels() -> None:
    comm, weight = OneProcess(), linear()
    tape = Tape(Around(), repeats=True)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        comm.log.append("compute")
        return (weight(x).sin(),)

    (value,) = tape.compute(run, Value(rows()))
    (value,) = drain(tape.exchange(TURN, comm, value))
    comm.log.clear()
    upstream(value)
    drain(tape.backward())
    assert comm.log == ["exchange", "compute", "wait"]


def test_the_clock_runs_around_what_is_computed_and_not_around_waits() -> None:
    comm, weight = OneProcess(), linear()
    tape, _, steps = chain(comm, weight, 1, comm.log)

    @contextmanager
    def clock() -> Iterator[None]:
        comm.log.append("on")
        yield
        comm.log.append("off")

    tape.clock = clock
    upstream(drain(steps))
    drain(tape.backward())
    assert comm.log == [
        *("on", "compute", "off", "exchange", "wait"),
        *("exchange", "on", "off", "wait", "on", "off"),
    ]


class OddError(RuntimeError):
    """Nobody else raises it."""


def failing(after: int) -> Steps[None]:
    for _ in range(after):
        yield
    raise OddError("in one half")


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_error_of_one_half_leaves_with_its_type(after: int, is_first: bool) -> None:
    other = chain(OneProcess(), linear(), 3)[2]
    halves = (failing(after), other) if is_first else (other, failing(after))
    with pytest.raises(OddError, match="in one half"):
        weave(*halves)


def test_an_error_of_a_repetition_leaves_with_its_type() -> None:
    tape, runs = Tape(Around(), repeats=True), []

    def run(x: Tensor) -> tuple[Tensor, ...]:
        runs.append(None)
        if len(runs) > 1:
            raise OddError("again")
        return (x * 2,)

    (end,) = tape.compute(run, Value(rows()))
    upstream(end)
    with pytest.raises(OddError, match="again"):
        drain(tape.backward())


# ------------------------------------------------------------ what is kept


class Watched:
    """Tensors by weak references: one whose graph or tape holds it is alive."""

    def __init__(self) -> None:
        self.refs: dict[str, Any] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        self.refs[name] = weakref.ref(x)
        return x

    def alive(self) -> set[str]:
        gc.collect()
        return {name for name, ref in self.refs.items() if ref() is not None}


def test_a_finished_forward_keeps_what_the_graph_needs() -> None:
    watched = Watched()
    comm, tape = OneProcess(), Tape(Around())

    def doubled(x: Tensor) -> tuple[Tensor, ...]:
        return (watched("doubled", x * 2),)

    def steps() -> Steps[Value]:
        start = Value(watched("input", rows()))
        watched("start", start.data)
        (value,) = tape.compute(doubled, start)
        watched("sent", value.data)
        del start
        (value,) = yield from tape.exchange(TURN, comm, value)
        watched("arrived", value.data)
        (value,) = tape.compute(lambda x: (x * 3,), value)
        return value

    end = drain(steps())
    # A product with a number needs neither of its ends.
    assert watched.alive() == set()
    upstream(end)
    drain(tape.backward())


@pytest.mark.parametrize("repeats", [False, True])
def test_after_backward_the_tape_holds_nothing(repeats: bool) -> None:
    watched, weight = Watched(), linear()
    comm, tape = OneProcess(), Tape(Around(), repeats=repeats)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        # Saved for backward.
        h = watched(f"hidden {len(watched.refs)}", weight(x).exp())
        return (watched(f"out {len(watched.refs)}", h * h),)

    def steps() -> Steps[Value]:
        start = Value(watched("input", rows()))
        watched("start", start.data)
        (value,) = tape.compute(run, start)
        (value,) = yield from tape.exchange(TURN, comm, value)
        watched("arrived", value.data)
        (value,) = tape.compute(run, value)
        watched("end", value.data)
        return value

    end = drain(steps())
    held = watched.alive()
    assert {"start", "arrived"} <= held if repeats else any("hidden" in name for name in held)
    upstream(end)
    assert end.slot.grad is not None
    watched("upstream", end.slot.grad)
    del end
    drain(tape.backward())
    assert watched.alive() == set()


def test_a_parameter_and_a_slot_share_no_gradient() -> None:
    """Autograd may keep the gradient that it gives a parameter; a slot must not hold the same."""
    place = nn.Parameter(rows(3))
    tape, start = Tape(Around()), Value(rows())
    (middle,) = tape.compute(lambda x: (x + place,), start)
    (end,) = tape.compute(lambda x: (x + place,), middle)
    upstream(end)
    assert end.slot.grad is not None
    wanted = end.slot.grad.clone()
    drain(tape.backward())
    equal(place.grad, 2 * wanted)
    equal(start.slot.take(), wanted)
