"""Nodes of an emulated cluster: one network namespace each, and one for the switch between them.

    node 0   lo  <- ranks of the node, the inside rate
             wire 10.77.0.1 -- egress at the link's rate --+
                                                           +-- bridge, in the switch's namespace
             wire 10.77.0.2 -- egress at the link's rate --+
    node 1   lo

Invariant: nothing is left in the machine's own namespace, so removing the namespaces removes all
of it. Their names carry the pid and the start time of the owner: what a killed owner has left is
found and removed by the next one. What goes to a node's own address takes its loopback.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

WIRE = "wire"
"""The interface of a node to the switch."""

_PREFIX = "fold-cluster"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-\w+")
# A token bucket has to hold the largest packet: 1500 bytes on the wire, 64 KB on loopback.
_WIRE_BUCKET, _LOOPBACK_BUCKET = "32kb", "256kb"
# Longest queue in front of a link. Drops would measure TCP's recovery from them.
_QUEUE = "400ms"


class NamespacesError(RuntimeError):
    """This process may not make network namespaces; says why."""


@dataclass(frozen=True)
class Rates:
    """Megabits per second of one node.

    Attributes:
        link: To the other nodes, shared by the node's ranks.
        inside: Between the node's ranks, shared by them; None is whatever loopback gives.
    """

    link: float
    inside: float | None = None


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        namespace: Its name for `ip netns`.
        address: Of `WIRE`, reachable from all nodes.
    """

    namespace: str
    address: str


@contextmanager
def cluster(nodes: int, rates: Rates) -> Iterator[list[Node]]:
    """Make nodes with a switch between them; remove them however the block ends.

    Whatever runs in a node then is killed.

    Raises:
        NamespacesError: This process may not make them.
    """
    check_permitted()
    remove_leftovers()
    owner = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
    switch = f"{owner}-switch"
    made = [Node(f"{owner}-{n}", f"10.77.0.{n + 1}") for n in range(nodes)]
    try:
        _add(switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, node in enumerate(made):
            _add(node.namespace)
            _plug_in(node, switch, f"port{number}")
            _limit(node, rates)
        yield made
    finally:
        with uninterrupted():
            for name in (*(node.namespace for node in made), switch):
                _remove(name)


def check_permitted() -> None:
    """Refuse where nodes cannot be made.

    Raises:
        NamespacesError: Says why.
    """
    if sys.platform != "linux":
        raise NamespacesError(f"network namespaces are Linux's, and this is {sys.platform}")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NamespacesError(f"{' and '.join(missing)} not found (package iproute2)")
    if os.geteuid() != 0:
        raise NamespacesError("network namespaces need root")


def remove_leftovers() -> list[str]:
    """Remove the namespaces of owners that are gone, and return their names."""
    listed = _run("ip", "netns", "list").split()
    gone = [name for name in listed if is_left_over(name)]
    for name in gone:
        _remove(name)
    return gone


def is_left_over(namespace: str) -> bool:
    """Whether a namespace is one of these, and its owner is gone."""
    named = _NAME.fullmatch(namespace)
    # A pid is given again, but not with the same start time.
    return named is not None and _start_time(int(named[1])) != int(named[2])


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let signals that ask a process to end wait until the block is done."""
    asked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to a process's start; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name, which may hold spaces and brackets.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _add(name: str) -> None:
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        raise NamespacesError(f"`ip netns add` fails: {error.stderr.strip()}") from None
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _plug_in(node: Node, switch: str, port: str) -> None:
    peer = ("peer", "name", WIRE, "netns", node.namespace)
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", WIRE)
    _run("ip", "-n", node.namespace, "link", "set", WIRE, "up")


def _limit(node: Node, rates: Rates) -> None:
    limits = [(WIRE, rates.link, _WIRE_BUCKET)]
    if rates.inside is not None:
        limits.append(("lo", rates.inside, _LOOPBACK_BUCKET))
    for device, rate, bucket in limits:
        shape = ("rate", f"{rate * 1000:.0f}kbit", "burst", bucket, "latency", _QUEUE)
        try:
            _run("tc", "-n", node.namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)
        except subprocess.CalledProcessError as error:
            reason = f"this kernel limits no rates, `tc ... tbf` fails: {error.stderr.strip()}"
            raise NamespacesError(reason) from None


def _remove(name: str) -> None:
    """Kill what runs in a namespace, and take it away; nothing where it is not there."""
    with suppress(subprocess.CalledProcessError):
        _kill_all(name)
        _run("ip", "netns", "delete", name)


def _kill_all(name: str) -> None:
    # What starts while the list is read shows up in the next one.
    for _ in range(100):
        pids = _run("ip", "netns", "pids", name).split()
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
