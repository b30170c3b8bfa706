"""Files appear complete or not at all: renames, recovery, space, manifests."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from lightning_fold.checkpoint import files
from lightning_fold.checkpoint.manifest import (
    MANIFEST,
    entries_of,
    read_manifest,
    verify_files,
    write_manifest,
)

KINDS = ("file", "folder")


def put(path: Path, kind: str, content: str) -> None:
    if kind == "file":
        path.write_text(content)
    else:
        path.mkdir()
        (path / "inside").write_text(content)


def content_of(path: Path) -> str:
    return (path / "inside" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("old", [*KINDS, "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_publish_puts_the_complete_one_in_place_and_leaves_nothing_else(
    kind: str, old: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    if old != "none":
        put(path, old, "old")
    put(files.partial_of(path), kind, "complete")
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    files.publish(files.partial_of(path), path)
    assert content_of(path) == "complete"
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_names_are_swapped_at_once_where_the_system_can(tmp_path: Path) -> None:
    put(tmp_path / "a", "folder", "A")
    put(tmp_path / "b", "folder", "B")
    if not files._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system does not exchange names")
    assert (content_of(tmp_path / "a"), content_of(tmp_path / "b")) == ("B", "A")


def test_a_checkpoint_moved_aside_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    put(path, "folder", "old")
    put(files.partial_of(path), "folder", "complete")
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    renames = []

    def killed_at_second(self: Path, target: Path) -> Path:
        renames.append(target)
        if len(renames) == 2:
            raise KeyboardInterrupt
        os.rename(self, target)
        return Path(target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed_at_second)
        with pytest.raises(KeyboardInterrupt):
            files.publish(files.partial_of(path), path)
    assert not path.exists()
    files.recover(path)
    assert content_of(path) == "old"


def test_recover_does_nothing_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    put(path, "folder", "good")
    put(tmp_path / ".last.ckpt.replaced", "folder", "older")
    files.recover(path)
    assert content_of(path) == "good"


@pytest.mark.parametrize("kind", KINDS)
def test_remove_leaves_nothing(kind: str, tmp_path: Path) -> None:
    put(tmp_path / "x", kind, "gone")
    files.remove(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    files.remove(tmp_path / "x")


def test_remove_of_a_link_keeps_what_it_points_to(tmp_path: Path) -> None:
    put(tmp_path / "x", "folder", "kept")
    (tmp_path / "last").symlink_to("x")
    files.remove(tmp_path / "last")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_is_being_removed_never_bears_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "x", "folder", "gone")
    seen = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: seen.append(path))
    files.remove(tmp_path / "x")
    assert seen == [tmp_path / ".x.removed"]
    assert not (tmp_path / "x").exists()


def test_too_little_space_is_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 10 * 2**20))
    files.check_space(tmp_path / "not" / "there" / "yet", 8 * 2**20)
    with pytest.raises(OSError, match=r"needs 21\.0 MiB, 10\.0 MiB are free.*`dirpath`"):
        files.check_space(tmp_path / "x", 20 * 2**20)


# ------------------------------------------------------------ manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name * 100)
    write_manifest(tmp_path, entries_of(tmp_path, ["a", "b", "c"]))
    return tmp_path


def verify(folder: Path) -> None:
    entries = read_manifest(folder)
    for part in range(2):
        verify_files(folder, entries, part=part, parts=2)


def test_whole_folder_passes(folder: Path) -> None:
    verify(folder)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_every_file_is_checked(name: str, folder: Path) -> None:
    content = bytearray((folder / name).read_bytes())
    content[50] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged: its checksum"):
        verify(folder)
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"{name} is damaged: it has 99 bytes, 100 were"):
        verify(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"lacks its file {name}"):
        verify(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2, "files": {}}', '{"format": 1, "files": {"a": 3}}']
)
def test_damaged_manifest_is_refused(text: str, folder: Path) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="is damaged"):
        read_manifest(folder)


def test_missing_manifest_is_an_unfinished_save(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match="unfinished"):
        read_manifest(folder)


def test_names_outside_the_folder_are_refused(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["../a"] = {"bytes": 100, "crc32": 0}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"lacks its file \.\./a"):
        verify(folder)
