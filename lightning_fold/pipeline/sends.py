"""Messages on their way: each keeps its tensors until they have left, and no longer.

torch's own runtime keeps all of a step's to its end. On a GPU a message tells when it is done; a
message of Gloo does so only to who waits for it, which a thread for each receiving rank does here.
Such a wait on a GPU would make the stream wait instead, so there is no thread there.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Message:
    work: Any
    tensors: tuple[Tensor, ...]
    error: BaseException | None = None
    left: threading.Event = field(default_factory=threading.Event)

    def let_go(self) -> None:
        self.tensors = ()
        self.left.set()


class Sends:
    """What one rank has sent in a step and others have not yet received.

    Args:
        device: Of the tensors.

    Attributes:
        peak: Most messages that were kept at once since `start`.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak = 0
        self._waits_in_threads = device.type == "cpu"
        self._kept: list[_Message] = []
        self._queues: dict[int, queue.SimpleQueue[_Message]] = {}

    def start(self) -> None:
        """Begin a step."""
        self.peak, self._kept = 0, []

    def keep(self, work: Any, tensors: tuple[Tensor, ...], *, to: int) -> None:
        """Keep `tensors` until `work`, their message to rank `to`, is done."""
        self.reap()
        message = _Message(work, tensors)
        self._kept.append(message)
        self.peak = max(self.peak, len(self._kept))
        if self._waits_in_threads:
            self._queue(to).put(message)

    def reap(self) -> None:
        """Let go what has left."""
        for message in self._kept:
            if not self._waits_in_threads and message.work.is_completed():
                message.let_go()
        self._kept = [m for m in self._kept if not m.left.is_set() or m.error is not None]

    def finish(self) -> None:
        """Wait for all messages.

        Raises:
            RuntimeError: One could not be sent.
        """
        for message in self._kept:
            if self._waits_in_threads:
                # A second wait for a message of Gloo would never end.
                message.left.wait()
            else:
                message.work.wait()
            if message.error is not None:
                raise message.error
        self._kept = []

    def _queue(self, to: int) -> queue.SimpleQueue[_Message]:
        if to not in self._queues:
            self._queues[to] = queue.SimpleQueue()
            name = f"fold-sends-{to}"
            threading.Thread(target=_wait, args=(self._queues[to],), name=name, daemon=True).start()
        return self._queues[to]


def _wait(messages: queue.SimpleQueue[_Message]) -> None:
    while True:
        message = messages.get()
        try:
            message.work.wait()
        except RuntimeError as error:
            # The main thread raises it, if it has not failed for the same reason before.
            message.error = error
        message.let_go()
        # Not kept by this frame until the next one comes.
        del message
