"""SIGTERM and Ctrl-C while training: one checkpoint, saved by all ranks at the same batch.

A signal only sets a flag. Rank 0's flag is what counts, and the broadcast that Lightning makes
before every batch carries it; another rank's flag reaches rank 0 over the watch's board. Forked
workers of loaders leave signals to their rank. Handlers of SLURM's requeueing stay Lightning's.
Not here: validation, which ends before the flag is seen, and workers that are not forked.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

FILE_NAME = "interrupted.ckpt"


class Interrupt:
    """The signals of one rank.

    Attributes:
        signum: The signal that waits for the next batch boundary.
        agreed: The signal that all ranks leave by.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.agreed: int | None = None
        self._device = torch.device("cpu")
        self._world = 1
        self._tell_lightning: Callable[[], None] | None = None
        self._leave_at_once: Callable[[int], None] = _die
        self._presses = 0
        self._previous: Any = None
        self._wakeup: tuple[int, int] | None = None
        self._is_fitting = self._is_registered = False

    def install(
        self, trainer: Trainer, *, device: torch.device, leave_at_once: Callable[[int], None]
    ) -> None:
        """Take Lightning's part in SIGTERM, before it registers its handlers.

        Its own handler broadcasts, whatever collective the signal has interrupted.
        """
        self.signum = self.agreed = None
        self._presses = 0
        self._device = device
        self._world = trainer.world_size
        self._leave_at_once = leave_at_once
        connector: Any = trainer._signal_connector
        if not trainer.training:
            connector._sigterm_notifier_fn = lambda signum, frame: leave_at_once(signum)
            return
        self._protect_workers()
        connector._sigterm_notifier_fn = self._on_signal
        if self._world == 1:
            self._tell_lightning = lambda: setattr(connector, "received_sigterm", True)
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = self.agree

    def listen(self) -> None:
        """Take Ctrl-C as well, from the start of training until `close`."""
        if threading.current_thread() is not threading.main_thread() or self._previous is not None:
            return
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._wakeup = reader, writer
        if taken != -1:
            # Somebody's event loop; a second Ctrl-C then waits for Python to run.
            signal.set_wakeup_fd(taken)
            self._close_wakeup()

    def close(self) -> None:
        """Give Ctrl-C back."""
        self._is_fitting = False
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        self._previous = None
        if self._wakeup:
            signal.set_wakeup_fd(-1)
            self._close_wakeup()

    def agree(self) -> None:
        """Let all ranks leave if rank 0 has a signal. Collective over the world.

        Raises:
            SIGTERMException: Rank 0 has one.
        """
        signum = self.signum or 0
        if self._world > 1:
            flag = torch.tensor([signum], device=self._device)
            dist.broadcast(flag, src=0)
            signum = int(flag)
        if signum:
            self.agreed = signum
            raise SIGTERMException(128 + signum)

    def take(self, signum: int) -> None:
        """Accept a signal, of this process or of another rank."""
        if self.signum is None:
            self.signum = signum
        if self._tell_lightning is not None:
            self._tell_lightning()

    def poll(self) -> int | None:
        """Read signals whose handler has not run, and return the one that waits.

        Python runs handlers in the main thread, which may sit in a collective for long.
        """
        if self._wakeup is not None:
            try:
                received = os.read(self._wakeup[0], 1 << 10)
            except OSError:
                received = b""
            self._presses += received.count(signal.SIGINT)
            for signum in received:
                if signum in (signal.SIGTERM, signal.SIGINT):
                    self.take(signum)
            if self._presses > 1:
                self._leave_at_once(signal.SIGINT)
        return self.signum

    def save(self, trainer: Trainer, error: BaseException) -> tuple[SIGTERMException, str]:
        """Save a checkpoint. Collective.

        Returns:
            What to raise, with the exit status that shells expect, and where the checkpoint is.
        """
        signum = self.agreed or self.signum or signal.SIGTERM
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = Path(folder) / FILE_NAME
        step = trainer.global_step
        trainer.save_checkpoint(path)
        name = signal.Signals(signum).name
        story = f"{name}: saved {path} at step {step}; resume with ckpt_path={str(path)!r}"
        leaving = error if isinstance(error, SIGTERMException) else SIGTERMException()
        leaving.code = 128 + signum
        return leaving, story

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self._wakeup is None:
            self._presses += 1
            if self._presses > 1:
                self._leave_at_once(signum)
        self.take(signum)

    def _protect_workers(self) -> None:
        """Let workers that are forked from here to `close` leave signals to their rank.

        Terminals, torchrun and SLURM signal whole process groups, and a rank whose loader has
        lost a worker reaches no batch boundary.
        """
        self._is_fitting = True
        if not self._is_registered:
            self._is_registered = True
            in_child = weakref.WeakMethod(self._in_child)
            os.register_at_fork(after_in_child=lambda: (in_child() or _nothing)())

    def _in_child(self) -> None:
        if not self._is_fitting:
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Not by a handler: a loader's worker installs its own afterwards.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_heed_parent, name="fold-signals", daemon=True).start()

    def _close_wakeup(self) -> None:
        for end in self._wakeup or ():
            os.close(end)
        self._wakeup = None


def _die(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _heed_parent() -> None:
    """End by SIGTERM only where the parent sends it, as loaders do to their workers."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _nothing() -> None:
    """For a call whose object is gone."""
