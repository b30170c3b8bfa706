"""Ranks as threads over one store: who is told to have failed first. Stacks, signals, children."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType, FunctionType, SimpleNamespace

import pytest
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_fold.cli_errors import render
from lightning_fold.config import FoldedConfig
from lightning_fold.faults import RankFailedError, marked, watch
from lightning_fold.faults.board import Board
from lightning_fold.faults.failure import is_symptom, is_timeout, raised
from lightning_fold.faults.hang import Seats, wait_of
from lightning_fold.faults.interrupt import Interrupt
from lightning_fold.faults.launcher import PARENT_VARIABLE, RanksLauncher, _leave_with_parent
from lightning_fold.faults.watch import Host, Watch
from lightning_fold.topology.doctor import resolve_folding
from lightning_fold.topology.meshes import build_meshes

GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1734"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation"


def thrown(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


# What is a cause, and how it is told.


def test_a_failure_names_the_users_function_the_step_and_the_error() -> None:
    failure = raised(thrown(ValueError("two\nlines")), 3, when="at step 7")
    assert failure.line().startswith("rank 3 failed first, in thrown (test_faults.py:")
    assert failure.line().endswith(") at step 7: ValueError: two lines")


@pytest.mark.parametrize("text", [GLOO, LATE, "NCCL error: remote process exited", "Broken pipe"])
def test_words_of_a_lost_peer_are_a_symptom_also_below_another_error(text: str) -> None:
    error = ValueError("the checkpoint cannot be read")
    error.__cause__ = RuntimeError(text)
    assert is_symptom(RuntimeError(text))
    assert is_symptom(error)
    assert is_timeout(error) == (text == LATE)


def test_an_ordinary_error_is_a_cause() -> None:
    assert not is_symptom(TimeoutError("the data server timed out"))


# Who failed first. Every rank is a thread.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "PERIOD_S": 0.05,
        "CAUSE_S": 0.6,
        "ALIKE_S": 0.4,
        "_STEP_S": 0.01,
    }.items():
        monkeypatch.setattr(watch, name, seconds)
    monkeypatch.setattr(watch, "GRACE_S", 0.3)


class Ranks:
    def __init__(self, world: int) -> None:
        store = dist.HashStore()
        self.said: list[tuple[int, str]] = []
        self.taken: list[int] = []
        self.signals: dict[int, int] = {}
        self.boards = [Board(store, run="a", rank=r, world=world) for r in range(world)]
        self.watches = [Watch(b, self._host(b.rank), timeout_s=5.0) for b in self.boards]

    def _host(self, rank: int) -> Host:
        def last_words(line: str) -> None:
            self.said.append((rank, line))
            self.watches[rank].stop()

        return Host(
            when=lambda: "at step 2",
            where=lambda: "",
            signal=lambda: self.signals.get(rank),
            take_signal=self.taken.append,
            last_words=last_words,  # type: ignore[arg-type]
        )

    def explain(self, errors: dict[int, BaseException]) -> dict[int, BaseException]:
        seen: dict[int, BaseException] = {}

        def run(rank: int, error: BaseException) -> None:
            seen[rank] = self.watches[rank].explain(error)

        threads = [threading.Thread(target=run, args=item) for item in errors.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen


@pytest.fixture
def ranks(quick: None) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(world: int, *, alive: tuple[int, ...] = ()) -> Ranks:
        made.append(Ranks(world))
        for rank in alive:
            made[-1].watches[rank].start()
        return made[-1]

    yield make
    for each in made:
        for one in each.watches:
            one._stopped.set()


def test_ranks_that_refuse_alike_keep_their_error_as_it_was(ranks: Callable[..., Ranks]) -> None:
    errors = {rank: thrown(ValueError("dp does not divide")) for rank in range(3)}
    seen = ranks(3).explain(errors)
    assert all(seen[rank] is errors[rank] and marked(seen[rank]) is None for rank in seen)


def test_peers_tell_the_cause_and_not_what_they_saw(ranks: Callable[..., Ranks]) -> None:
    errors = {
        0: thrown(RuntimeError(GLOO)),
        1: thrown(KeyError("label")),
        2: thrown(RuntimeError(GLOO)),
    }
    seen = ranks(3).explain(errors)
    line = "KeyError: 'label'"
    assert seen[1] is errors[1]
    assert str(marked(seen[1])).startswith("rank 1 failed first")
    for rank in (0, 2):
        assert isinstance(seen[rank], RankFailedError)
        assert str(seen[rank]) == marked(seen[1])
    assert render(seen[1]).splitlines()[-1].endswith(line)
    assert render(seen[0]).splitlines()[-1] == f"lightning-fold: error: {seen[0]}"


def test_of_two_causes_the_earlier_is_told(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2)
    group.explain({1: thrown(KeyError("label"))})
    seen = group.explain({0: thrown(ValueError("too late"))})
    assert str(seen[0]).endswith("KeyError: 'label'")


def test_a_rank_that_leaves_no_word_is_found_by_its_silence(ranks: Callable[..., Ranks]) -> None:
    # Rank 0 knows nothing yet, and answers; rank 2 is gone.
    seen = ranks(3, alive=(0, 1)).explain({1: thrown(RuntimeError(GLOO))})
    assert str(seen[1]) == "rank 2 ended without a word (killed?) at step 2"


def test_a_death_that_the_launcher_saw_is_the_cause(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2, alive=(0,))
    group.watches[0].child_died(1, "was killed by signal 9 (SIGKILL)")
    seen = group.explain({0: thrown(RuntimeError(GLOO))})
    assert str(seen[0]) == "rank 1 was killed by signal 9 (SIGKILL) at step 2"


def test_a_rank_that_no_exception_reaches_is_ended_with_the_cause(
    ranks: Callable[..., Ranks],
) -> None:
    group = ranks(2, alive=(0,))
    group.explain({1: thrown(KeyError("label"))})
    deadline = time.monotonic() + 5
    while not group.said and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [rank for rank, _ in group.said] == [0]
    assert group.said[0][1].startswith("rank 1 failed first")


def test_a_lost_store_is_told_and_nobody_waits(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2)
    group.boards[1]._store = None  # type: ignore[assignment]
    gone = SimpleNamespace(set=_lost, check=_lost, compare_set=_lost, add=_lost)
    group.boards[1]._store = gone  # type: ignore[assignment]
    seen = group.explain({1: thrown(RuntimeError(GLOO))})
    assert str(seen[1]).startswith("rank 0 ended without a word")


def _lost(*args: object) -> None:
    raise dist.DistNetworkError("failed to send")


def test_another_ranks_signal_reaches_rank_0(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2, alive=(0, 1))
    group.signals[1] = signal.SIGTERM
    deadline = time.monotonic() + 5
    while not group.taken and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(group.taken) == {signal.SIGTERM}


# Collectives that do not end.


def _block(event: threading.Event, axis: str = "ep") -> None:
    event.acquire()  # type: ignore[attr-defined]


class Sitting:
    """A thread in a function of c10d, whose innermost frame waits in C."""

    def __init__(self, module: str = "torch.distributed.distributed_c10d") -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.rounds = 0
        blocks = FunctionType(_block.__code__, {"__name__": module}, "all_reduce", ("ep",))

        def run() -> None:
            while True:
                blocks(self.lock)
                self.rounds += 1
                if self.rounds == 2:
                    return

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        time.sleep(0.05)

    def stacks(self) -> dict[int, FrameType]:
        ident = self.thread.ident or 0
        return {ident: sys._current_frames()[ident]}

    def go_on(self) -> None:
        rounds = self.rounds
        self.lock.release()
        while self.rounds == rounds:
            time.sleep(0.01)
        time.sleep(0.05)


def test_one_call_that_lasts_is_found_and_a_next_one_starts_anew() -> None:
    sitting, seats = Sitting(), Seats(10.0)
    assert seats.sample(sitting.stacks(), elapsed_s=9.0) is None
    assert seats.sample(sitting.stacks(), elapsed_s=9.0) is None
    sitting.go_on()
    assert seats.sample(sitting.stacks(), elapsed_s=9.0) is None
    assert seats.sample(sitting.stacks(), elapsed_s=9.0) is None
    late = seats.sample(sitting.stacks(), elapsed_s=9.0)
    assert late is not None
    assert late.f_code.co_name == "_block"
    sitting.go_on()


def test_a_thread_that_waits_elsewhere_may_do_so_for_ever() -> None:
    sitting, seats = Sitting("torch.utils.data.dataloader"), Seats(1.0)
    assert [seats.sample(sitting.stacks(), elapsed_s=9.0) for _ in range(3)] == [None] * 3
    for _ in range(2):
        sitting.go_on()


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def test_groups_carry_the_names_of_their_axes(fake_world: None) -> None:
    folding = resolve_folding(4, tp=2, cp=1, pp=1, etp=1, ep=2)
    meshes = build_meshes(folding, "cpu", timeout=timedelta(seconds=5))
    assert meshes.group("tp").group_desc == "tp/ep"
    assert meshes.group("dp").group_desc == "dp/edp/dp_cp"
    frames: list[FrameType] = []

    def look(group: dist.ProcessGroup) -> None:
        frames.append(sys._getframe())

    collective = FunctionType(
        look.__code__,
        {"__name__": "torch.distributed.distributed_c10d", "sys": sys},
        "all_reduce",
        None,
        look.__closure__,
    )
    collective(meshes.group("dp"))
    told = str(wait_of(frames[0]))
    assert told.startswith("look over dp/edp/dp_cp (ranks 1 3), called from test_groups_carry")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
def test_a_time_that_nobody_can_wait_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"Legal .*above 0.*Change `collective_timeout_s`"):
        FoldedConfig(collective_timeout_s=seconds).check()


# Signals.


class Session:
    """An Interrupt as one rank's training has it."""

    def __init__(self, *, world: int = 1) -> None:
        self.left: list[int] = []
        self.connector = SimpleNamespace(received_sigterm=False)
        self.loop = SimpleNamespace()
        trainer = SimpleNamespace(
            training=True,
            world_size=world,
            _signal_connector=self.connector,
            fit_loop=SimpleNamespace(epoch_loop=self.loop),
        )
        self.interrupt = Interrupt()
        self.interrupt.install(trainer, device=None, leave_at_once=self.left.append)  # type: ignore[arg-type]


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    made.interrupt.listen()
    yield made
    made.interrupt.close()


def test_ctrl_c_waits_for_the_batch_boundary_and_the_second_does_not(session: Session) -> None:
    signal.raise_signal(signal.SIGINT)
    assert session.interrupt.poll() == signal.SIGINT
    assert session.left == []
    with pytest.raises(SIGTERMException) as leaving:
        session.loop._broadcast_sigterm_tensor()
    assert leaving.value.code == 130
    signal.raise_signal(signal.SIGINT)
    session.interrupt.poll()
    assert session.left == [signal.SIGINT]


def test_the_first_signal_decides_the_exit_status(session: Session) -> None:
    session.connector._sigterm_notifier_fn(signal.SIGTERM, None)
    signal.raise_signal(signal.SIGINT)
    assert session.interrupt.poll() == signal.SIGTERM
    assert session.left == []
    # One rank has no broadcast before its batches: Lightning asks this flag after them.
    assert session.connector.received_sigterm


def test_ctrl_c_is_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    session = Session()
    session.interrupt.listen()
    assert signal.getsignal(signal.SIGINT) != before
    session.interrupt.close()
    assert signal.getsignal(signal.SIGINT) == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_workers_heed_their_rank_and_nobody_else(session: Session, listens: bool) -> None:
    if not listens:
        # As during the sanity check, whose workers may serve later.
        session.interrupt.close()
        session = Session()
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    time.sleep(0.3)
    for name in ("-TERM", "-INT"):
        subprocess.run(["kill", name, str(worker.pid)], check=True)
    time.sleep(0.3)
    assert worker.is_alive()
    assert session.interrupt.poll() is None
    worker.terminate()
    worker.join(5)
    assert worker.exitcode == 0


# Children.


def launcher(**hooks: Callable[..., object]) -> RanksLauncher:
    defaults: dict[str, Callable[..., object]] = {
        "on_error": lambda error, trainer: error,
        "on_death": lambda rank, how: True,
    }
    return RanksLauncher(SimpleNamespace(), 2, 1, **(defaults | hooks))  # type: ignore[arg-type]


def test_a_childs_death_is_told_with_its_signal() -> None:
    deaths: list[tuple[int, str]] = []
    ranks = launcher(on_death=lambda rank, how: deaths.append((rank, how)) or True)
    ranks.procs = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    ranks.procs[1].kill()
    ranks._observe()
    assert deaths == [(2, "was killed by signal 9 (SIGKILL)")]
    ranks.stop_children(patience_s=0.0)


def test_children_are_waited_for_and_then_killed() -> None:
    ranks = launcher()
    patient, hung = subprocess.Popen(["sleep", "0.2"]), subprocess.Popen(["sleep", "60"])
    ranks.procs = [patient, hung]
    ranks.stop_children(patience_s=1.0)
    assert (patient.returncode, hung.returncode) == (0, -signal.SIGKILL)
    assert ranks.procs == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_rank_whose_launcher_died_before_it_connected_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of another process than the one that forks.
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getppid()))
    rank = multiprocessing.get_context("fork").Process(target=_leave_with_parent)
    rank.start()
    rank.join(5)
    assert rank.exitcode == 1
