"""Weights that are never whole: drawn or read shard by shard, equal under every mapping."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from meta_init_project import build
from safetensors.torch import save_file

PROJECT = Path(__file__).with_name("meta_init_project.py")
HF = ("mixtral", "qwen3_moe")
TRAINED = {"steps": 1}
FILES = ("lightning.ckpt", "bare.pt", "core.safetensors", "folder")
State = dict[str, torch.Tensor]


def run_jobs(world: int, jobs: list[dict[str, Any]], folder: Path) -> None:
    """Start `world` ranks once for all jobs; the first that fails ends the others."""
    listing = folder / f"jobs{world}.json"
    listing.write_text(json.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {"TORCHELASTIC_RUN_ID": "meta"}
    logs = [folder / f"rank{rank}of{world}.log" for rank in range(world)]
    ranks = [_start(rank, log, shared, [folder, listing]) for rank, log in enumerate(logs)]
    try:
        deadline = time.monotonic() + 240
        while any(rank.poll() is None for rank in ranks) and not any(r.poll() for r in ranks):
            assert time.monotonic() < deadline, "the ranks hang"
            time.sleep(0.1)
        for rank, log in zip(ranks, logs, strict=True):
            assert not rank.poll(), log.read_text()[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _start(rank: int, log: Path, shared: dict[str, str], arguments: list[Path]) -> Any:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    command = [sys.executable, str(PROJECT), *map(str, arguments)]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=shared | own, stdout=out, stderr=out)


def drawn(kind: str, mapping: str, **options: Any) -> dict[str, Any]:
    job = {"kind": kind, "mapping": mapping, "meta_init": True, "out": f"{kind}.{mapping}"}
    return job | options


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meta")


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    """One rank draws every model, and leaves the decoder in all kinds of files."""
    jobs = [drawn(kind, "one") for kind in ("decoder", "tied", *HF)]
    start = {
        "kind": "decoder",
        "mapping": "plain",
        "init_from": "decoder.one.pt",
        "out": "trained.plain",
    }
    run_jobs(
        1, [*jobs, drawn("decoder", "one", seed=12, out="other seed"), TRAINED | start], folder
    )
    write_files(torch.load(folder / "decoder.one.pt"), folder)
    return folder


@pytest.fixture(scope="module")
def two(one: Path) -> Path:
    jobs = [drawn("decoder", mapping) for mapping in ("etp2", "tp2ep2")]
    jobs += [drawn("tied", "tp2ep2"), drawn("decoder", "tp2ep2", **TRAINED, out="trained.drawn")]
    loaded = {"kind": "decoder", "mapping": "tp2ep2", "init_from": "decoder.one.pt", "seed": 99}
    jobs += [TRAINED | loaded | {"out": "trained.loaded"}]
    run_jobs(2, jobs, one)
    return one


@pytest.fixture(scope="module")
def read(one: Path) -> Path:
    """Two ranks read every kind of file, with values of their own before and without."""
    jobs = []
    for i, name in enumerate(FILES):
        for mapping in ("tp2ep2", "etp2"):
            source = {"init_from": name, "seed": 99, "meta_init": (i + len(mapping)) % 2 == 0}
            jobs.append(drawn("decoder", mapping, **source, out=f"{name}.{mapping}"))
    run_jobs(2, jobs, one)
    return one


@pytest.fixture(scope="module")
def four(one: Path) -> Path:
    mappings = ("dp4", "tp2ep2", "tp2ep2etp2")
    jobs = [drawn(kind, m, out=f"{kind}.{m}.4") for kind in ("decoder", *HF) for m in mappings]
    run_jobs(4, [*jobs, drawn("decoder", "dp4", precision="bf16-true", out="bf16")], one)
    return one


def write_files(state: State, folder: Path) -> None:
    core = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    narrow = {name: tensor.float() for name, tensor in state.items()}
    torch.save({"state_dict": state, "epoch": 1, "optimizer_states": []}, folder / FILES[0])
    torch.save(narrow, folder / FILES[1])
    save_file(core, folder / FILES[2])
    (folder / FILES[3]).mkdir()
    places = {}
    for i, names in enumerate((sorted(state)[::2], sorted(state)[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: state[name] for name in names}, folder / FILES[3] / file)
        places |= dict.fromkeys(names, file)
    index = folder / FILES[3] / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))


def differing(folder: Path, first: str, second: str) -> list[str]:
    a, b = (torch.load(folder / f"{name}.pt") for name in (first, second))
    assert a.keys() == b.keys()
    return [
        name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])
    ]


@pytest.mark.parametrize("mapping", ["etp2", "tp2ep2"])
def test_values_are_those_of_one_rank(two: Path, mapping: str) -> None:
    assert differing(two, "decoder.one", f"decoder.{mapping}") == []
    changed = differing(two, "decoder.one", "other seed")
    assert any("experts" in name for name in changed)
    assert any("q_proj.weight" in name for name in changed)


def test_experts_differ_from_each_other(one: Path) -> None:
    state = torch.load(one / "decoder.one.pt")
    experts = state["model.model.layers.0.mlp.experts.gate_up_proj"]
    flat = experts.flatten(1)
    assert torch.corrcoef(flat).triu(1).abs().max() < 0.3
    assert not torch.equal(
        *(state[f"model.model.layers.{i}.self_attn.q_proj.weight"] for i in "01")
    )


def test_tied_weights_stay_tied(two: Path) -> None:
    assert differing(two, "tied.one", "tied.tp2ep2") == []
    state = torch.load(two / "tied.tp2ep2.pt")
    assert torch.equal(state["model.lm_head.weight"], state["model.model.embed_tokens.weight"])


def test_a_step_equals_that_of_a_run_with_the_same_weights(two: Path) -> None:
    assert differing(two, "trained.drawn", "trained.loaded") == []
    drawn_state, plain = (torch.load(two / f"trained.{n}.pt") for n in ("drawn", "plain"))
    start = torch.load(two / "decoder.one.pt")
    moved = 0.0
    for name, tensor in plain.items():
        torch.testing.assert_close(drawn_state[name], tensor, rtol=1e-9, atol=1e-11)
        moved = max(moved, float((tensor - start[name]).abs().max()))
    assert moved > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mapping", ["tp2ep2", "etp2"])
@pytest.mark.parametrize("name", FILES)
def test_init_from_reads_every_kind_of_file(read: Path, name: str, mapping: str) -> None:
    found, written = (torch.load(read / f"{n}.pt") for n in (f"{name}.{mapping}", "decoder.one"))
    for key, tensor in written.items():
        expected = tensor.float().double() if name == "bare.pt" else tensor
        assert torch.equal(found[key], expected), key


@pytest.mark.parametrize("kind", ["decoder", "tied", *HF])
def test_distribution_is_that_of_ordinary_construction(one: Path, kind: str) -> None:
    """Standard deviations within four standard errors, pooled over parameters that share one."""
    state = torch.load(one / f"{kind}.one.pt")
    torch.manual_seed(5)
    ordinary = {f"model.{name}": value for name, value in build(kind).state_dict().items()}
    assert state.keys() == ordinary.keys()
    for name, tensor in ordinary.items():
        value = state[name]
        if tensor.unique().numel() <= 2:
            assert torch.equal(value.float(), tensor), name
            continue
        # Of normal values, the error of each standard deviation is sigma / sqrt(2 n).
        error = (1 / tensor.numel()) ** 0.5
        assert value.std().item() == pytest.approx(tensor.std().item(), rel=4 * error), name
        assert abs(value.mean().item()) < 4 * tensor.std().item() * tensor.numel() ** -0.5, name


@pytest.mark.slow
@pytest.mark.parametrize("mapping", ["dp4", "tp2ep2", "tp2ep2etp2"])
@pytest.mark.parametrize("kind", ["decoder", *HF])
def test_values_on_four_ranks_are_those_of_one(four: Path, kind: str, mapping: str) -> None:
    assert differing(four, f"{kind}.one", f"{kind}.{mapping}.4") == []


@pytest.mark.slow
def test_true_precision_is_that_of_an_ordinary_run(four: Path) -> None:
    dtypes = {tensor.dtype for tensor in torch.load(four / "bf16.pt").values()}
    assert dtypes == {torch.bfloat16}
