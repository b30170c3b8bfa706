"""Illegal configurations, each in a process of its own: it ends soon, and says why at the end.

The table of the cases that were selected is printed once all have ended.
"""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hostile_cases import ALL, BASE, Case
from hostile_checkpoints import TRAP, prepare, write_good
from hostile_pipelines import PIPELINES

LIMIT_SECONDS = 60
AT_ONCE = 2
PREFIX = "lightning-fold: error: "


@dataclass(frozen=True)
class Ending:
    """How the process of a case ended."""

    status: int
    seconds: float
    last_line: str
    stderr: str
    left_over: bool
    executed: bool


CASES = [
    pytest.param(case, id=case.name.replace(" ", "-"), marks=case.marks)
    for case in (*ALL, *PIPELINES)
]


def write_config(case: Case, folder: Path, good: Path) -> None:
    config = deepcopy(BASE)
    for key, value in case.changes.items():
        node = config
        *groups, last = key.split(".")
        for group in groups:
            node = node[group]
        node[last] = value
    text = yaml.safe_dump(config).encode()
    (folder / "config.yaml").write_bytes(text if case.content is None else case.content)
    if case.checkpoint:
        prepare(case.checkpoint, good, folder)
    write_texts(folder, case.changes.get("data.init_args.paths", []))


def write_texts(folder: Path, wanted: list[str]) -> None:
    for name in ("hollow", "pictures", "blank", "texts"):
        (folder / name).mkdir()
    (folder / "noise.txt").write_bytes(b"\0\1\2")
    (folder / "pictures" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    for number in range(12):
        (folder / "blank" / f"{number}.txt").touch()
        (folder / "texts" / f"{number}.txt").write_text("ninety bytes of text, " * 4)
    (folder / "secret.txt").write_text("not for all")
    (folder / "secret.txt").chmod(0)
    if "line.txt" in wanted:
        (folder / "line.txt").write_bytes(b"x" * 50_000_000)


def command_of(case: Case) -> list[str]:
    command = [str(Path(sys.executable).with_name("lightning-fold")), "fit"]
    named = () if "--config" in case.options else ("--config", "config.yaml")
    return [*command, *named, *case.options]


def outlives(group: int) -> bool:
    """Tell whether a process of the group still runs, and kill it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def run_case(case: Case, folder: Path, good: Path) -> Ending:
    folder.mkdir()
    write_config(case, folder, good)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        command_of(case),
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, stderr = process.communicate()
    seconds = time.monotonic() - start
    last_line = next(iter(stderr.splitlines()[-1:]), "")
    return Ending(
        process.returncode,
        seconds,
        last_line,
        stderr,
        outlives(process.pid),
        (folder / TRAP).exists(),
    )


def table(endings: dict[str, Ending]) -> str:
    rows = [
        f"{name:<38} {ending.status:>6} {ending.seconds:>7.1f}  {ending.last_line}"
        for name, ending in endings.items()
    ]
    return "\n".join(["", f"{'case':<38} {'status':>6} {'seconds':>7}  last line", *rows])


@pytest.fixture(scope="module")
def endings(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Ending]:
    callspecs = (getattr(item, "callspec", None) for item in request.session.items)
    params = [callspec.params.get("case") for callspec in callspecs if callspec is not None]
    cases = [case for case in params if isinstance(case, Case) and not case.skipped]
    root = tmp_path_factory.mktemp("hostile")
    folders = [root / str(number) for number in range(len(cases))]
    good = root / "good"
    if any(case.checkpoint for case in cases):
        write_good(BASE, good)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = pool.map(lambda case, folder: run_case(case, folder, good), cases, folders)
        ended = dict(zip((case.name for case in cases), ended, strict=True))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(table(ended))
    return ended


@pytest.mark.parametrize("case", CASES)
def test_refused_at_once_with_the_reason_on_the_last_line(
    case: Case, endings: dict[str, Ending]
) -> None:
    ending = endings[case.name]
    assert ending.last_line.startswith(PREFIX), ending.stderr
    assert re.search(case.says, ending.last_line), ending.stderr
    assert ending.status in (1, 2)
    assert ending.seconds < LIMIT_SECONDS
    assert ending.stderr.count(PREFIX) == 1
    assert "Traceback" not in ending.stderr
    assert not ending.left_over
    assert not ending.executed
