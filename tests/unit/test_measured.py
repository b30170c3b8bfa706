"""Tables of tiles: what is written is read, and what is no table is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fold_kernels import measured
from fold_kernels.measured import Table, read_table, table_of
from fold_kernels.tables import BUILT_IN, CANDIDATES, OPS, Tile, kind_of

TILE = Tile(64, 32, 16, stages=5, warps=2, group=4, split=4)
TABLE = Table(
    {**BUILT_IN, "gemm/few": TILE},
    {"gemm/few": 1.25, "experts/many": 0.5},
    (9, 0),
    {"device": "NVIDIA H200", "date": "2026-11-29"},
)


def plain() -> dict[str, Any]:
    """The content of a small file that is right."""
    return {
        "capability": [9, 0],
        "origin": {"device": "NVIDIA H200"},
        "tiles": {"gemm/few": {"m": 64, "n": 32, "k": 16, "stages": 5, "warps": 2}},
        "gains": {"gemm/few": 1.25},
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiles.json"


def test_what_is_written_is_read(path: Path) -> None:
    TABLE.write(path)
    assert read_table(path) == TABLE
    assert TABLE.gain_of("gemm", "few") == 1.25
    assert TABLE.gain_of("gemm", "many") is None


def test_built_in_tiles_stand_in_for_those_that_a_file_does_not_name(path: Path) -> None:
    path.write_text(json.dumps(plain()))
    table = read_table(path)
    assert table.tiles == {**BUILT_IN, "gemm/few": Tile(64, 32, 16, stages=5, warps=2)}
    assert table.gains == {"gemm/few": 1.25}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(path: Path, monkeypatch) -> None:
    TABLE.write(path)
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(measured.json, "dump", fail)
    with pytest.raises(OSError, match="no space left"):
        Table(capability=(9, 0)).write(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_succeeds_leaves_one_file(path: Path) -> None:
    TABLE.write(path)
    Table(capability=(9, 0)).write(path)
    assert read_table(path).gains == {}
    assert list(path.parent.iterdir()) == [path]


def changed(**changes: Any) -> str:
    return json.dumps(plain() | changes)


def tile(**changes: Any) -> str:
    fields = {"m": 64, "n": 32, "k": 16, "stages": 5, "warps": 2} | changes
    return changed(tiles={"gemm/few": fields})


HOSTILE = {
    "empty": ("", "cannot be read"),
    "cut off": (changed()[:-9], "cannot be read"),
    "binary": (b"\xff\xfe\x00", "cannot be read"),
    "deep": ("[" * 100_000, "cannot be read"),
    "list": ("[]", "TypeError"),
    "number": ("7", "TypeError"),
    "no capability": (json.dumps({"tiles": {}, "gains": {}, "origin": {}}), "'capability'"),
    "no tiles": (json.dumps({"capability": [9, 0]}), "'tiles'"),
    "capability of one number": (changed(capability=[9]), "ValueError"),
    "capability of three": (changed(capability=[9, 0, 0]), "ValueError"),
    "capability of words": (changed(capability=["nine", "zero"]), "ValueError"),
    "no number": (changed(capability=[None, 0]), "TypeError"),
    "infinite capability": (changed(capability=[math.inf, 0]), "OverflowError"),
    "tiles in a list": (changed(tiles=[1]), "AttributeError"),
    "tile as a number": (changed(tiles={"gemm/few": 3}), "TypeError"),
    "tile without a field": (changed(tiles={"gemm/few": {"m": 64}}), "TypeError"),
    "tile with another field": (tile(depth=3), "'depth'"),
    "odd tile": (tile(m=48), "m=48 of a tile must be a power of two"),
    "small tile": (tile(k=8), "must be 16 at least"),
    "no warps": (tile(warps=0), "warps=0 of a tile"),
    "fraction": (tile(stages=2.5), "stages=2.5 of a tile must be positive"),
    "no stages": (tile(stages=0), "stages=0 of a tile must be positive"),
    "text": (tile(n="64"), "n='64' of a tile"),
    "truth": (tile(warps=True), "warps=True of a tile"),
    "parts": (tile(split=8), "split=8 of a tile must be 2 or 4"),
    "unknown key": (changed(tiles={"gemm/wide": plain()["tiles"]["gemm/few"]}), "'gemm/wide'"),
    "gain of nothing": (changed(gains={"gemm/few": None}), "TypeError"),
    "gain of text": (changed(gains={"gemm/few": "quick"}), "ValueError"),
    "gain that is no number": (changed(gains={"gemm/few": math.nan}), "positive and finite"),
    "endless gain": (changed(gains={"gemm/few": math.inf}), "positive and finite"),
    "negative gain": (changed(gains={"gemm/few": -1}), "positive and finite"),
    "huge gain": (changed(gains={"gemm/few": 10**400}), "OverflowError"),
    "origin in a list": (changed(origin=["H200"]), "AttributeError"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_table_is_refused(name: str, path: Path) -> None:
    content, message = HOSTILE[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"^Table of tiles .*tiles\.json: ") as refused:
        read_table(path)
    assert message in str(refused.value)
    assert str(refused.value).endswith("or unset LIGHTNING_FOLD_TILES.")


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_opened_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        table_of((9, 0), str(tmp_path / name))


def test_a_table_of_another_kind_of_gpu_is_refused(path: Path) -> None:
    TABLE.write(path)
    with pytest.raises(ValueError, match=r"made for capability \(9, 0\), not \(10, 0\)"):
        table_of((10, 0), str(path))
    assert table_of((9, 0), str(path)) == TABLE
    # Without a GPU nothing is launched.
    assert table_of(None, str(path)) == TABLE


def test_a_table_of_the_package_serves_its_capability_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    TABLE.write(tmp_path / "sm_90.json")
    assert table_of((9, 0), None) == TABLE
    for capability in ((8, 0), (10, 0), None):
        assert table_of(capability, None) == Table()


def test_a_file_of_the_user_comes_before_the_package_s(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    TABLE.write(tmp_path / "sm_90.json")
    mine = Table(BUILT_IN, {"gemm/few": 3.0}, (9, 0), {})
    mine.write(tmp_path / "mine.json")
    assert table_of((9, 0), str(tmp_path / "mine.json")) == mine


def test_nothing_is_known_without_a_table() -> None:
    assert Table().gains == {}
    assert Table().tiles == BUILT_IN


def test_every_op_has_a_tile_of_every_kind() -> None:
    kinds = {
        kind_of(rows=rows, experts=8, width=width) for rows in (0, 10**6) for width in (1, 10**4)
    }
    assert set(BUILT_IN) == {f"{op}/{kind}" for op in OPS for kind in kinds}
    assert set(CANDIDATES) == set(OPS)
