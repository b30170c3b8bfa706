"""What a strategy holds of all this: when the parts start, what they share, when they end."""

from __future__ import annotations

import os
import sys
import uuid
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_fold.faults.board import Board, connect
from lightning_fold.faults.failure import marked
from lightning_fold.faults.interrupt import Interrupt
from lightning_fold.faults.launcher import RanksLauncher
from lightning_fold.faults.watch import GRACE_S, Host, Watch

if TYPE_CHECKING:
    from lightning_fold.ranks import MeshStrategy

# Time for children to save and to close their loggers after a signal.
LEAVE_S = 60.0


class Guard:
    """Ends a run well, for one strategy."""

    def __init__(self) -> None:
        self.launcher: RanksLauncher | None = None
        self._interrupt = Interrupt()
        self._watch: Watch | None = None
        self._trainer: Trainer | None = None
        self._first_rank = 0
        self._story: str | None = None

    def launch_with(self, strategy: MeshStrategy) -> RanksLauncher:
        """The launcher to use."""
        assert strategy.cluster_environment is not None
        self.launcher = RanksLauncher(
            strategy.cluster_environment,
            strategy.num_processes,
            strategy.num_nodes,
            on_error=self._on_error,
            on_death=self._on_death,
        )
        return self.launcher

    def connect(self, strategy: MeshStrategy, *, timeout_s: float) -> None:
        """Start to watch the ranks. Collective over the world, once for each run."""
        environment = strategy.cluster_environment
        if strategy.world_size == 1 or environment is None:
            return
        self._first_rank = strategy.node_rank * strategy.num_processes
        # A store may serve several runs.
        run = strategy.broadcast(uuid.uuid4().hex)
        try:
            store = connect(environment.main_address, environment.main_port)
        except RuntimeError as error:
            rank_zero_warn(f"ranks are not watched, since the store is out of reach: {error}")
            return
        rank, world = strategy.global_rank, strategy.world_size
        self._watch = Watch(
            Board(store, run=run, rank=rank, world=world), self._host(), timeout_s=timeout_s
        )
        self._watch.start()

    def set_up(self, trainer: Trainer, strategy: MeshStrategy) -> None:
        """Take over Lightning's answer to signals, before it registers its handlers."""
        self._trainer = trainer
        self._interrupt.install(
            trainer, device=strategy.root_device, leave_at_once=self._leave_at_once
        )

    def start(self) -> None:
        """Listen to Ctrl-C: training begins."""
        self._interrupt.listen()

    def finish(self) -> None:
        """Leave if a signal came after the last batch boundary. Collective over the world."""
        self._interrupt.agree()

    def close(self) -> None:
        """End the watch; where the run failed or was told to leave, see the other ranks end too."""
        if self._watch is not None:
            self._watch.stop()
        self._interrupt.close()
        self._watch = self._trainer = None
        launcher = self.launcher
        if launcher is not None and launcher.is_ending:
            launcher.stop_children(patience_s=LEAVE_S if self._interrupt.agreed else GRACE_S)
        if self._story:
            sys.stdout.flush()
            print(f"lightning-fold: {self._story}", file=sys.stderr, flush=True)
            self._story = None

    def _on_error(self, error: BaseException, trainer: Trainer | None) -> BaseException:
        if isinstance(error, SIGTERMException) and trainer is not None:
            try:
                return self._leave(error, trainer)
            except Exception as failure:
                error = failure
        if self._watch is None or isinstance(error, KeyboardInterrupt | _TunerExitException):
            self._end_ranks(decided=isinstance(error, KeyboardInterrupt))
            return error
        shown = self._watch.explain(error)
        # Ranks that fail alike may all go on: a program that catches the error decides.
        self._end_ranks(decided=shown is not error or marked(error) is not None)
        return shown

    def _end_ranks(self, *, decided: bool) -> None:
        if self.launcher is not None and decided:
            self.launcher.is_ending = True

    def _leave(self, error: SIGTERMException, trainer: Trainer) -> SIGTERMException:
        leaving, story = self._interrupt.save(trainer, error)
        strategy: MeshStrategy = trainer.strategy  # type: ignore[assignment]
        strategy.wait_for_checkpoints()
        self._story = story if trainer.is_global_zero else None
        self._end_ranks(decided=True)
        return leaving

    def _on_death(self, local_rank: int, how: str) -> bool:
        if self._interrupt.agreed:
            return True
        # Another thread may close this.
        watch = self._watch
        if watch is not None:
            watch.child_died(self._first_rank + local_rank, how)
        return watch is not None

    def _host(self) -> Host:
        launcher = self.launcher
        assert launcher is not None
        return Host(
            when=self._when,
            where=self._where,
            signal=self._interrupt.poll,
            take_signal=self._interrupt.take,
            last_words=launcher.last_words,
        )

    def _when(self) -> str:
        trainer = self._trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return ""
        return f"at step {trainer.global_step}"

    def _where(self) -> str:
        trainer = self._trainer
        pipeline = None if trainer is None else getattr(trainer.strategy, "pipeline", None)
        return "" if pipeline is None else str(pipeline.executor.where)

    def _leave_at_once(self, signum: int) -> None:
        if self.launcher is not None:
            self.launcher.stop_children(patience_s=0.0)
        os._exit(128 + signum)
