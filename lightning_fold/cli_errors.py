"""How a command ends: with one message, the last line on stderr, and an exit status.

Invariant: nothing is written after that line. A rank that the command itself has launched hands
its message to the process that launched it, which stops all ranks first and then speaks, once.
Not here: what the messages say.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_fold.faults import marked

PROGRAM = "lightning-fold"
TRACEBACK_VARIABLE = "LIGHTNING_FOLD_TRACEBACK"
# "PID:FOLDER" of the launching process; set in its environment, so its children inherit it.
RELAY_VARIABLE = "LIGHTNING_FOLD_RELAY"
RELAY_SECONDS = 0.2
PARENT_SECONDS = 60.0

# Errors that speak to the user. Any other is a defect, whose traceback has to be seen.
_REFUSALS = (ValueError, TypeError, OSError, ImportError, RuntimeError)
_REFUSING_PACKAGES = ("lightning", "jsonargparse", "argparse")


class UsageError(ValueError):
    """A command line or a config file that cannot be understood; ends with exit status 2."""


def end_with(error: BaseException) -> int:
    """Write the error's message, or hand it to the launching process, and return the status."""
    status = 2 if isinstance(error, UsageError) else 1
    text = render(error)
    if not _hand_over(text):
        _write(text)
    return status


def render(error: BaseException) -> str:
    """Return what stderr shows of an error; the last line says what is wrong and what to change.

    A message of several lines keeps its first and, where it names the remedy, its last line for
    the end; the numbers between them come before.
    """
    told = marked(error)
    first, *rest = (told or str(error)).strip().splitlines() or [""]
    remedy = rest.pop() if rest and "Change `" in rest[-1] else ""
    if first.endswith(":") and rest:
        # Such a line ends in the heading of the lines below it.
        first, _, heading = first.rpartition(". ")
        first, rest = first or heading, [heading, *rest] if first else rest
    name = "" if told or _speaks_for_itself(error) else f"{type(error).__name__}: "
    end = " ".join(part.strip() for part in (f"{name}{first}", remedy) if part.strip())
    shown = traceback.format_exception(error) if _needs_traceback(error) else []
    return "\n".join([*(part.rstrip() for part in shown), *rest, f"{PROGRAM}: error: {end}"])


@contextmanager
def relayed(launcher: Any) -> Iterator[None]:
    """Listen to the ranks that a launcher starts, and let none of them outlive a failure.

    Args:
        launcher: Lightning's launcher of subprocesses, whose `procs` it fills later.
    """
    done = threading.Event()
    with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-", ignore_cleanup_errors=True) as folder:
        os.environ[RELAY_VARIABLE] = f"{os.getpid()}:{folder}"
        listener = threading.Thread(
            target=_listen, args=(launcher, Path(folder), done), name="fold-relay", daemon=True
        )
        listener.start()
        try:
            yield
        except BaseException:
            _stop_listening(listener, done)
            stop_ranks(launcher)
            raise
        finally:
            _stop_listening(listener, done)
            os.environ.pop(RELAY_VARIABLE, None)


def stop_ranks(launcher: Any) -> None:
    """Kill the processes of a launcher and wait for them."""
    # Lightning's observer thread shares this list, and kills this process when one of them dies.
    stopped, launcher.procs[:] = list(launcher.procs), []
    for process in stopped:
        process.kill()
    for process in stopped:
        process.wait(timeout=10)


def _speaks_for_itself(error: BaseException) -> bool:
    if isinstance(error, ValueError | RuntimeError):
        return True
    return _package(type(error).__module__) in _REFUSING_PACKAGES


def _needs_traceback(error: BaseException) -> bool:
    if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        return True
    if not isinstance(error, _REFUSALS) and not _speaks_for_itself(error):
        return True
    modules = [
        str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    # Once batches run, what the user's step or torch raises is no refusal of a configuration.
    in_loop = any(module.startswith("lightning.pytorch.loops.") for module in modules)
    return in_loop and _package(modules[-1]) != "lightning_fold"


def _package(module: str) -> str:
    return module.partition(".")[0]


def _listen(launcher: Any, folder: Path, done: threading.Event) -> None:
    while not done.wait(RELAY_SECONDS):
        for message in sorted(folder.glob("*.message")):
            text = message.read_text()
            stop_ranks(launcher)
            _write(text)
            # The main thread may wait for ranks that are gone, in a call no signal interrupts.
            os._exit(1)


def _stop_listening(listener: threading.Thread, done: threading.Event) -> None:
    done.set()
    listener.join()


def _hand_over(text: str) -> bool:
    """Leave a message for the launching process and wait for it to end this one."""
    pid, _, folder = os.environ.get(RELAY_VARIABLE, "").partition(":")
    if not folder or pid != str(os.getppid()):
        return False
    partial = Path(folder) / f"{os.getpid()}.partial"
    try:
        partial.write_text(text)
        partial.rename(partial.with_suffix(".message"))
    except OSError:
        return False
    # Exiting at once would make Lightning's observer kill the parent before it has spoken.
    deadline = time.monotonic() + PARENT_SECONDS
    while pid == str(os.getppid()) and time.monotonic() < deadline:
        time.sleep(RELAY_SECONDS)
    return True


def _write(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
