"""Saving and loading by one process: both forms, all refusals, saves behind training."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fold.checkpoint import (
    OWN,
    Canonical,
    CheckpointError,
    CheckpointStore,
    Peers,
    named_state,
)
from lightning_fold.checkpoint import folder as folder_module
from lightning_fold.checkpoint.folder import META
from lightning_fold.checkpoint.safe_reader import INDEX, read_index

HALVED = "model.experts.gate_up_proj"
FORMS = ("folder", "file")


class Model(nn.Module):
    """A module as it is after folding, on one rank."""

    def __init__(self, *, dtype: torch.dtype = torch.float64, width: int = 4) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.norm = nn.LayerNorm(width, dtype=dtype)
        self.model.head = nn.Linear(width, 5, dtype=dtype)
        self.model.experts = nn.Module()
        shape = (3, 2, 6, width)
        self.model.experts.gate_up_proj = nn.Parameter(torch.randn(shape, dtype=dtype))
        self.model.register_buffer("seen", torch.arange(3))


def optimizer_of(module: Model, kind: str = "adamw", *, swapped: bool = False) -> Any:
    vectors = [p for p in module.parameters() if p.dim() == 1]
    others = [p for p in module.parameters() if p.dim() > 1]
    if swapped:
        others.reverse()
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": others, "lr": 0.5}]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.1)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def trained(kind: str = "adamw", **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = Model(**options)
    optimizer = optimizer_of(module, kind)
    for _ in range(2):
        for param in module.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    return module, optimizer


def store_of(module: nn.Module, **options: Any) -> CheckpointStore:
    canonical = Canonical(module, halved=[HALVED], is_writer=True)
    options = {"peers": Peers(), "background_peers": None, **options}
    return CheckpointStore(canonical, mapping="one", **options)


def save(
    path: Path, form: str, module: Model, *optimizers: Any, store: CheckpointStore | None = None
) -> None:
    store = store or store_of(module)
    rest = {"global_step": 2, "nested": {"list": [1, 2.5, "x", None]}}
    if form == "folder":
        states = [named_state(module, o) for o in optimizers]
        checkpoint = {**rest, "state_dict": module.state_dict(), "optimizer_states": states}
        assert store.save_folder(path, checkpoint) == []
    else:
        states = [store.canonical.optimizer_state(o) for o in optimizers]
        whole = store.canonical.consolidate(module.state_dict())
        own = store.own_entries(optimizers)
        checkpoint = {**rest, "state_dict": whole, "optimizer_states": states, OWN: own}
        assert store.save_file(path, checkpoint) == []


def load(path: Path, module: Model, *optimizers: Any) -> dict[str, Any]:
    return store_of(module).load(path, list(optimizers), strict=True)


def by_name(module: Model, optimizer: Any) -> dict[str, dict[str, Any]]:
    names = {param: name for name, param in module.named_parameters()}
    return {names[param]: values for param, values in optimizer.state.items()}


def assert_equal_states(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.keys() == second[name].keys()
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[name][key]))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("form", FORMS)
def test_round_trip(form: str, kind: str, swapped: bool, tmp_path: Path) -> None:
    module, optimizer = trained(kind)
    save(tmp_path / "x.ckpt", form, module, optimizer)
    other = Model()
    resumed = optimizer_of(other, kind, swapped=swapped)
    rest = load(tmp_path / "x.ckpt", other, resumed)
    assert rest["nested"] == {"list": [1, 2.5, "x", None]}
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    assert_equal_states(by_name(module, optimizer), by_name(other, resumed))
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.5]
    assert [p.name for p in tmp_path.iterdir()] == ["x.ckpt"]


@pytest.mark.parametrize("form", FORMS)
def test_optimizer_that_has_not_stepped_stays_so(form: str, tmp_path: Path) -> None:
    module = Model()
    save(tmp_path / "x", form, module, optimizer_of(module))
    other, resumed = trained()
    load(tmp_path / "x", other, resumed)
    assert not resumed.state


def test_file_is_what_a_single_device_writes(tmp_path: Path) -> None:
    module, optimizer = trained()
    save(tmp_path / "x", "file", module, optimizer)
    whole = torch.load(tmp_path / "x", weights_only=True)
    assert whole["state_dict"][HALVED].shape == (3, 12, 4)
    assert torch.equal(
        whole["state_dict"][HALVED], module.model.experts.gate_up_proj.detach().flatten(1, 2)
    )
    assert list(whole["state_dict"]) == list(module.state_dict())


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize("form", FORMS)
def test_other_models_and_optimizers_are_refused(form: str, tmp_path: Path) -> None:
    module, optimizer = trained()
    path = tmp_path / "x"
    save(path, form, module, optimizer)
    before = Model()
    kept = {name: value.clone() for name, value in before.state_dict().items()}
    with pytest.raises(ValueError, match=r"has shape \(3, 2, 6, 4\) there and \(3, 2, 6, 8\) here"):
        load(path, Model(width=8))
    with pytest.raises(ValueError, match=r"torch\.float64, the model has torch\.float32"):
        load(path, Model(dtype=torch.float32))
    with pytest.raises(ValueError, match="has 2 parameter groups, this one has 1"):
        load(path, before, torch.optim.AdamW(before.parameters()))
    with pytest.raises(ValueError, match="1 optimizers, configure_optimizers gives 2"):
        load(path, before, optimizer_of(before), optimizer_of(before))
    before.model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"2 names are missing \(model\.extra\.bias"):
        load(path, before)
    del before.model.extra
    for name, value in before.state_dict().items():
        assert torch.equal(value, kept[name]), "a refused load has changed the model"


@pytest.mark.parametrize("form", FORMS)
def test_weights_alone_load_without_optimizers_only(form: str, tmp_path: Path) -> None:
    module, _ = trained()
    save(tmp_path / "x", form, module)
    load(tmp_path / "x", Model())
    other = Model()
    with pytest.raises(ValueError, match="holds no optimizer state"):
        load(tmp_path / "x", other, optimizer_of(other))


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("place", [INDEX, META, "file"])
def test_no_pickle_is_executed(place: str, tmp_path: Path) -> None:
    module, _ = trained()
    path, trap = tmp_path / "x", tmp_path / "executed"
    if place == "file":
        torch.save({"state_dict": module.state_dict(), "callbacks": Evil(trap)}, path)
    else:
        save(path, "folder", module)
        if place == INDEX:
            (path / INDEX).write_bytes(pickle.dumps(Evil(trap)))
        else:
            torch.save({"callbacks": Evil(trap)}, path / META)
        rewrite_manifest(path)
    with pytest.raises(ValueError, match=r"executed|pickle"):
        load(path, Model())
    assert not trap.exists()


def rewrite_manifest(path: Path) -> None:
    from lightning_fold.checkpoint.manifest import entries_of, read_manifest, write_manifest

    write_manifest(path, entries_of(path, read_manifest(path)))


def test_items_that_are_no_tensors_and_places_outside_are_refused(tmp_path: Path) -> None:
    module, _ = trained()
    save(tmp_path / "x", "folder", module)
    index = read_index(tmp_path / "x")
    name = next(iter(index.state_dict_metadata))
    place = index.storage_data[next(iter(index.storage_data))]
    place.relative_path = "../elsewhere"
    (tmp_path / "x" / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="outside its folder"):
        read_index(tmp_path / "x")
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    index.state_dict_metadata[name] = BytesStorageMetadata()
    (tmp_path / "x" / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="no tensor but a pickled object"):
        read_index(tmp_path / "x")


@pytest.mark.parametrize("form", FORMS)
def test_any_flipped_byte_or_cut_is_noticed(form: str, tmp_path: Path) -> None:
    module, optimizer = trained()
    good = tmp_path / "good"
    save(good, form, module, optimizer)
    files = sorted(good.iterdir()) if form == "folder" else [good]
    for file in files:
        content = file.read_bytes()
        for at in range(7, len(content), max(1, len(content) // 40)):
            damaged = bytearray(content)
            damaged[at] ^= 0x20
            check_damage(good, file, bytes(damaged), content, module)
        check_damage(good, file, content[: len(content) // 2], content, module)
        check_damage(good, file, b"", content, module)


def check_damage(good: Path, file: Path, damaged: bytes, content: bytes, module: Model) -> None:
    """Refused, or harmless: some bytes of a zip mean nothing."""
    file.write_bytes(damaged)
    other = Model()
    try:
        load(good, other, optimizer_of(other))
    except ValueError:
        pass
    else:
        for name, value in module.state_dict().items():
            assert torch.equal(value, other.state_dict()[name])
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("what", ["missing", "empty folder", "unfinished"])
def test_what_is_no_checkpoint_is_named(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if what == "empty folder":
        path.mkdir()
    if what == "unfinished":
        save(path, "folder", trained()[0])
        (path / "manifest.json").unlink()
    told = {"missing": "does not exist", "empty folder": "without the files of", "unfinished": "un"}
    with pytest.raises(ValueError, match=told[what]):
        load(path, Model())


# ------------------------------------------------------------ saves that fail


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("form", FORMS)
def test_a_save_that_cannot_be_written_leaves_the_earlier_one(form: str, tmp_path: Path) -> None:
    module, optimizer = trained()
    path = tmp_path / "x"
    save(path, form, module, optimizer)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        module.model.head.weight.add_(1)
    with largest_file(3000), pytest.raises(CheckpointError, match="File too large"):
        save(path, form, module, optimizer)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    other = Model()
    load(path, other, optimizer_of(other))
    for name, value in before.items():
        assert torch.equal(value, other.state_dict()[name])


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_is_told_before_anything_is_written(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = trained()
    full = shutil.disk_usage(tmp_path)._replace(free=2**20 + 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(CheckpointError, match=r"needs .* MiB.* are free"):
        save(tmp_path / "x", form, module, optimizer)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------ saves behind training


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds writing back until it is set."""
    opened = threading.Event()
    write = folder_module.write_folder

    def held(*args: Any, **kwargs: Any) -> None:
        assert opened.wait(30)
        write(*args, **kwargs)

    monkeypatch.setattr(folder_module, "write_folder", held)
    return opened


def test_training_goes_on_and_the_save_keeps_what_was_there(
    gate: threading.Event, tmp_path: Path
) -> None:
    module, optimizer = trained()
    store = store_of(module, background_peers=Peers())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    moments = {
        name: {key: torch.as_tensor(value).clone() for key, value in values.items()}
        for name, values in by_name(module, optimizer).items()
    }
    save(tmp_path / "x", "folder", module, optimizer, store=store)
    assert not (tmp_path / "x").exists()
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1)
    optimizer.step()
    gate.set()
    store.finish()
    other = Model()
    resumed = optimizer_of(other)
    load(tmp_path / "x", other, resumed)
    for name, value in before.items():
        assert torch.equal(value, other.state_dict()[name])
    assert_equal_states(moments, by_name(other, resumed))


def test_rotation_waits_for_the_save_under_way(gate: threading.Event, tmp_path: Path) -> None:
    module, _ = trained()
    store = store_of(module, background_peers=Peers())
    (tmp_path / "old").mkdir()
    save(tmp_path / "x", "folder", module, store=store)
    store.remove(tmp_path / "old")
    assert (tmp_path / "old").exists()
    gate.set()
    store.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_failed_save_is_told_by_the_next_call_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = trained()
    store = store_of(module, background_peers=Peers())
    (tmp_path / "old").mkdir()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(folder_module, "write_folder", fails)
    save(tmp_path / "x", "folder", module, store=store)
    store.remove(tmp_path / "old")
    with pytest.raises(CheckpointError, match="the disk is gone"):
        store.finish()
    assert (tmp_path / "old").exists()
    store.finish()
