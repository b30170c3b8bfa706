"""The nodes of the emulated cluster and the placement of ranks on them."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cluster import __main__ as program
from benchmarks.cluster import network
from benchmarks.cluster.cases import ACROSS, NEIGHBOURS, cases_of
from benchmarks.cluster.launch import Placement

ROOT = Path(__file__).parents[2]


def refusal() -> str | None:
    try:
        network.check_permitted()
        subprocess.run(["ip", "netns", "add", "fold-cluster-probe"], check=True)
        subprocess.run(["ip", "netns", "delete", "fold-cluster-probe"], check=True)
    except (network.NamespacesError, subprocess.CalledProcessError) as error:
        return str(error)
    return None


needs_namespaces = pytest.mark.skipif(refusal() is not None, reason="may not make namespaces")


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split() if name.startswith("fold-cluster")}


# In a process of its own: what is loaded into a forkserver stays, and other tests have one too.
RANKS = """
import json, os, subprocess, sys
from pathlib import Path
from benchmarks.cluster import launch, network

def where(folder, word):
    if word == "fail" and os.environ["RANK"] == "1":
        raise ValueError("no luck today")
    found = subprocess.run(["ip", "-br", "addr"], capture_output=True, text=True, check=True)
    return word, int(os.environ["RANK"]), found.stdout

if __name__ == "__main__":
    folder, word = sys.argv[1:]
    with network.cluster(2, network.Rates(100.0, 900.0)) as nodes:
        placement = launch.Placement((0, 1))
        options = {"folder": Path(folder), "limit_s": 60.0}
        print(json.dumps(launch.run_ranks(nodes, placement, where, word, **options)))
"""


def run_ranks(folder: Path, word: str) -> subprocess.CompletedProcess[str]:
    script = folder / "ranks.py"
    script.write_text(RANKS)
    return subprocess.run(
        [sys.executable, str(script), str(folder), word],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_node_has_its_ranks_in_order() -> None:
    assert [ACROSS.local_rank(rank) for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert (ACROSS.nodes, ACROSS.per_node) == (2, 4)


def test_uneven_placement_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(0, 0, 1\).*Legal"):
        Placement((0, 0, 1))


def test_environment_is_torchruns() -> None:
    made = [network.Node("a", "10.77.0.1"), network.Node("b", "10.77.0.2")]
    told = ACROSS.environment(6, made)
    assert (told["RANK"], told["LOCAL_RANK"]) == ("6", "2")
    assert (told["GROUP_RANK"], told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"]) == ("1", "8", "4")
    assert (told["MASTER_ADDR"], told["GLOO_SOCKET_IFNAME"]) == ("10.77.0.1", network.WIRE)


def test_only_namespaces_of_dead_owners_are_left_over() -> None:
    own = f"fold-cluster-{os.getpid()}-{network._start_time(os.getpid())}"
    assert not network.is_left_over(f"{own}-0")
    assert not network.is_left_over("somebody-elses")
    assert network.is_left_over(f"fold-cluster-{os.getpid()}-1-switch")
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert network.is_left_over(f"fold-cluster-{gone.pid}-1-0")


def test_without_permission_the_reason_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cluster"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    program.main()
    assert capsys.readouterr().out.startswith("cluster-bench: skipped: ")


def test_folding_keeps_ep_inside_a_node_and_its_absence_does_not() -> None:
    unfolded, folded = cases_of("neighbours")[:2]
    for case, inside in ((unfolded, False), (folded, True)):
        groups = case.folding.groups("ep")
        assert all((len({NEIGHBOURS.table[r] for r in group}) == 1) == inside for group in groups)
        tp = case.folding.groups("tp")
        assert all(len({NEIGHBOURS.table[r] for r in group}) == 1 for group in tp)


def test_overlap_has_ep_across_nodes_and_the_pipeline_inside() -> None:
    for case in cases_of("across"):
        ep, pp = (case.folding.groups(axis) for axis in ("ep", "pp"))
        assert all(len({ACROSS.table[r] for r in group}) == 2 for group in ep)
        assert all(len({ACROSS.table[r] for r in group}) == 1 for group in pp)


@needs_namespaces
def test_ranks_run_on_their_nodes(tmp_path: Path) -> None:
    told = json.loads(run_ranks(tmp_path, "hello").stdout)
    assert [(word, rank) for word, rank, _ in told] == [("hello", 0), ("hello", 1)]
    assert "10.77.0.1/24" in told[0][2]
    assert "10.77.0.2/24" in told[1][2]


@needs_namespaces
def test_failure_of_a_rank_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    before = namespaces()
    failed = run_ranks(tmp_path, "fail")
    assert failed.returncode
    assert re.search(r"(?s)rank 1 ended with status 1.*no luck today", failed.stderr)
    assert namespaces() == before


@needs_namespaces
def test_nothing_is_left() -> None:
    before = namespaces()
    with suppress(KeyError), network.cluster(2, network.Rates(10.0)):
        assert len(namespaces() - before) == 3
        raise KeyError
    assert namespaces() == before


@needs_namespaces
def test_leftovers_of_a_dead_owner_are_removed() -> None:
    name = f"fold-cluster-{os.getpid()}-1-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    sleeper = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "60"])
    while str(sleeper.pid) not in network._run("ip", "netns", "pids", name).split():
        pass
    assert name in network.remove_leftovers()
    assert sleeper.wait(10) == -9
    assert name not in namespaces()
