"""Folder to file and back by one process; what a checkpoint says about itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fold.checkpoint import OWN, Canonical, CheckpointStore, Peers, named_state
from lightning_fold.checkpoint.convert import convert, halved_names
from lightning_fold.checkpoint.summary import summarise
from lightning_fold.cli import main

HALVED = "model.experts.gate_up_proj"


class User(nn.Module):
    """A module as its author wrote it: a buffer, a first projection of experts, a norm."""

    def __init__(self, *, live: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = nn.Module()
        self.model.norm = nn.LayerNorm(4)
        self.model.experts = nn.Module()
        gate_up = torch.randn(3, 12, 4)
        if live:
            gate_up = gate_up.unflatten(1, (2, -1))
        self.model.experts.gate_up_proj = nn.Parameter(gate_up)
        self.model.experts.down_proj = nn.Parameter(torch.randn(3, 4, 6))


def trained(module: User, *, groups: int = 1) -> torch.optim.Optimizer:
    params = list(module.parameters())
    sets = [{"params": params}] if groups == 1 else [{"params": params[2:]}, {"params": params[:2]}]
    optimizer = torch.optim.AdamW(sets, lr=0.1)
    for param in params:
        param.grad = param.detach().clone()
    optimizer.step()
    return optimizer


def write_folder(path: Path, *, groups: int = 1) -> None:
    module = User(live=True)
    optimizer = trained(module, groups=groups)
    store(module).save_folder(
        path,
        {
            "epoch": 1,
            "global_step": 7,
            "state_dict": module.state_dict(),
            "optimizer_states": [named_state(module, optimizer)],
        },
    )


def store(module: User) -> CheckpointStore:
    canonical = Canonical(module, halved=[HALVED], is_writer=True)
    return CheckpointStore(
        canonical, mapping="tp2cp1dp1pp1-etp1ep2edp1", peers=Peers(), background_peers=None
    )


def plain_checkpoint(*, groups: int = 1) -> dict[str, Any]:
    module = User()
    optimizer = trained(module, groups=groups)
    return {
        "epoch": 1,
        "global_step": 7,
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
    }


def assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second) or isinstance(first, dict)
    if isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    elif isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    else:
        assert first == second


@pytest.mark.parametrize("groups", [1, 2])
def test_folder_becomes_the_file_that_plain_training_writes(groups: int, tmp_path: Path) -> None:
    write_folder(tmp_path / "folder", groups=groups)
    convert(tmp_path / "folder", tmp_path / "x.ckpt")
    got = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert got.pop(OWN)["mapping"] == "tp2cp1dp1pp1-etp1ep2edp1"
    assert_same(plain_checkpoint(groups=groups), {key: got[key] for key in plain_checkpoint()})
    # Each tensor has a storage of its own: a slice of another's would be saved with all of it.
    for tensor in got["state_dict"].values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "x.ckpt"]


@pytest.mark.parametrize("groups", [1, 2])
def test_there_and_back(groups: int, tmp_path: Path) -> None:
    write_folder(tmp_path / "folder", groups=groups)
    convert(tmp_path / "folder", tmp_path / "x.ckpt")
    convert(tmp_path / "x.ckpt", tmp_path / "back")
    convert(tmp_path / "back", tmp_path / "again.ckpt")
    first, again = (
        torch.load(tmp_path / name, weights_only=True) for name in ("x.ckpt", "again.ckpt")
    )
    assert_same(first, again)
    module = User(live=True)
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    optimizer = trained(module, groups=groups)
    store(module).load(tmp_path / "back", [optimizer], strict=True)
    wanted = User(live=True)
    other = trained(wanted, groups=groups)
    for param, twin in zip(module.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(param, twin)
        assert torch.equal(optimizer.state[param]["exp_avg"], other.state[twin]["exp_avg"])


def test_file_of_plain_lightning_becomes_a_folder(tmp_path: Path) -> None:
    torch.save(plain_checkpoint(), tmp_path / "ddp.ckpt")
    convert(tmp_path / "ddp.ckpt", tmp_path / "folder")
    module = User(live=True)
    optimizer = trained(module)
    rest = store(module).load(tmp_path / "folder", [optimizer], strict=True)
    assert rest["global_step"] == 7


def test_groups_without_names_need_a_run(tmp_path: Path) -> None:
    torch.save(plain_checkpoint(groups=2), tmp_path / "ddp.ckpt")
    with pytest.raises(ValueError, match="--weights-only"):
        convert(tmp_path / "ddp.ckpt", tmp_path / "folder")
    convert(tmp_path / "ddp.ckpt", tmp_path / "folder", weights_only=True)
    store(User(live=True)).load(tmp_path / "folder", [], strict=True)


def test_first_projections_are_known_by_their_structure() -> None:
    shapes = {
        "a.gate_up_proj": (3, 12, 4),
        "a.down_proj": (3, 4, 6),
        "transposed.gate_up_proj": (3, 4, 12),
        "transposed.down_proj": (3, 6, 4),
        "dense.gate_up_proj": (12, 4),
        "alone.gate_up_proj": (3, 12, 4),
    }
    assert halved_names(shapes) == ["a.gate_up_proj"]


def test_what_exists_is_not_replaced(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder")
    with pytest.raises(ValueError, match="exists already"):
        convert(tmp_path / "folder", tmp_path)


@pytest.mark.parametrize("damage", ["manifest", "data"])
def test_damaged_folder_leaves_nothing(damage: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "folder")
    if damage == "manifest":
        (tmp_path / "folder" / "manifest.json").unlink()
    else:
        data = tmp_path / "folder" / "__0_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ValueError, match="folder"):
        convert(tmp_path / "folder", tmp_path / "x.ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


_LIMITED = """
import resource, sys, torch
from pathlib import Path
from lightning_fold.checkpoint.convert import convert
# What the first conversion imports is not what the second one holds.
folder = Path(sys.argv[2]).parent
small = [folder / f"{Path(sys.argv[2]).name}.small{i}" for i in range(3)]
torch.save({"state_dict": {"w": torch.zeros(3)}}, small[0])
convert(small[0], small[1])
convert(small[1], small[2])
used = int(next(line for line in open("/proc/self/status") if "VmData" in line).split()[1]) * 1024
limit = used + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
convert(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_conversion_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    size = 2**20  # fp32 elements: 4 MiB each, 160 MiB in all
    state = {f"w{i}": torch.full((size,), float(i)) for i in range(40)}
    torch.save({"state_dict": state, "global_step": 1}, tmp_path / "a.ckpt")
    room = str(60 * 2**20)
    for source, target in (("a.ckpt", "folder"), ("folder", "b.ckpt")):
        command = [sys.executable, "-c", _LIMITED, str(tmp_path / source), str(tmp_path / target)]
        done = subprocess.run([*command, room], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    back = torch.load(tmp_path / "b.ckpt", weights_only=True, mmap=True)["state_dict"]
    assert all(torch.equal(back[name], value) for name, value in state.items())


# ------------------------------------------------------------ inspect


@pytest.mark.parametrize("form", ["folder", "file"])
def test_summary(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "folder")
    path = tmp_path / "folder"
    if form == "file":
        path = tmp_path / "x.ckpt"
        convert(tmp_path / "folder", path)
    summary = summarise(path)
    assert (summary["step"], summary["epoch"]) == (7, 1)
    assert summary["mapping"] == "tp2cp1dp1pp1-etp1ep2edp1"
    weights = {row["name"]: row for row in summary["weights"]}
    assert weights[HALVED]["shape"] == ([3, 2, 6, 4] if form == "folder" else [3, 12, 4])
    assert weights[HALVED]["dtype"] == "float32"
    assert len(summary["optimizer"]) == 12
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "step 7" in text
    assert HALVED in text


def test_commands_refuse_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "x").write_text("nonsense")
    assert main(["inspect", str(tmp_path / "x")]) == 1
    assert capsys.readouterr().err.startswith("lightning-fold: error: ")
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "y")]) == 1
    assert "x" in capsys.readouterr().err.splitlines()[-1]
