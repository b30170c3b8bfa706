"""Tokens, windows and the split of `TextDataModule`, on small folders and on the default corpus."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fold.data import (
    BOS,
    EOS,
    PAD,
    VOCAB_SIZE,
    TextDataModule,
    TextFile,
    WindowDataset,
    collate,
    read_paths,
    read_stdlib,
    split_files,
    tokenize,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(20):
        file = tmp_path / f"part{number % 3}" / f"{number:02}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"text {number} " * (number + 3), encoding="utf-8")
    return tmp_path


def loaded(folder: Path, **options: object) -> TextDataModule:
    options = {"seq_len": 16, "batch_size": 2, "validation_fraction": 0.3} | options
    module = TextDataModule(paths=[str(folder)], **options)
    module.setup("fit")
    return module


# ---------------------------------------------------------------- tokens and windows


def test_tokens_mark_both_ends_of_each_file() -> None:
    corpus = tokenize([TextFile("a", b"\xc3\xa9!"), TextFile("b", b""), TextFile("c", b"z")])
    assert corpus.tokens.tolist() == [BOS, 0xC3, 0xA9, 0x21, EOS, BOS, EOS, BOS, ord("z"), EOS]
    assert (corpus.num_files, corpus.num_bytes) == (3, 4)
    assert corpus.tokens.max() < VOCAB_SIZE


@pytest.mark.parametrize("length", [2, 9, 10, 11, 17, 18])
def test_windows_make_each_token_a_target_once(length: int) -> None:
    stream = np.arange(length, dtype=np.uint16)
    targets = []
    for item in (windows := WindowDataset(stream, seq_len=8)):
        assert item["input_ids"].shape == item["labels"].shape == (9,)
        labels = item["labels"][1:]
        targets += labels[labels != -100].tolist()
    assert targets == list(range(1, length))
    assert len(windows) == -(-(length - 1) // 8)


def test_only_the_last_window_is_padded() -> None:
    first, last = WindowDataset(np.arange(12, dtype=np.uint16), seq_len=8)
    assert set(first) == {"input_ids", "labels"}
    assert last["input_ids"].tolist() == [8, 9, 10, 11, *[PAD] * 5]
    assert last["labels"].tolist() == [8, 9, 10, 11, *[-100] * 5]
    assert last["attention_mask"].tolist() == [1] * 4 + [0] * 5


def test_a_batch_has_a_mask_only_with_padding() -> None:
    first, last = WindowDataset(np.arange(12, dtype=np.uint16), seq_len=8)
    assert "attention_mask" not in collate([first, first])
    mask = collate([first, last])["attention_mask"]
    assert mask.sum(dim=1).tolist() == [9, 4]


# ---------------------------------------------------------------- files and sides


def test_default_corpus_is_real_disjoint_and_large_enough() -> None:
    files = read_stdlib()
    names = [file.name for file in files]
    assert len(set(names)) == len(names) > 300
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    assert any(name.startswith("pydoc_data/") for name in names)
    train, validation = split_files(files, 0.1)
    assert not {file.name for file in train} & {file.name for file in validation}
    assert {*train, *validation} == set(files)
    assert sum(len(file.content) for file in validation) >= 200_000
    assert sum(len(file.content) for file in train) >= 5_000_000


def test_side_depends_on_the_relative_path_alone(folder: Path, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("elsewhere")
    for file in read_paths([str(folder)])[::2]:
        (other / file.name).parent.mkdir(exist_ok=True)
        (other / file.name).write_bytes(b"changed")
    here = [{file.name for file in side} for side in split_files(read_paths([str(folder)]), 0.3)]
    there = [{file.name for file in side} for side in split_files(read_paths([str(other)]), 0.3)]
    assert all(there)
    assert there[0] < here[0]
    assert there[1] < here[1]


def test_hash_of_the_path_decides() -> None:
    files = [TextFile(f"f{i}", b"") for i in range(2000)]
    _, validation = split_files(files, 0.25)
    digests = {f.name: hashlib.sha256(f.name.encode()).digest()[0] for f in files}
    assert {f.name for f in validation} == {name for name, byte in digests.items() if byte < 64}


def test_files_folders_and_globs_name_the_same_texts(folder: Path) -> None:
    whole = read_paths([str(folder)])
    assert [file.name for file in whole] == sorted(file.name for file in whole)
    assert read_paths([f"{folder}/**/*.txt"]) == whole
    assert read_paths([str(folder), f"{folder}/part1/*.txt"]) == whole
    assert [f.name for f in read_paths([f"{folder}/part0/00.txt"])] == ["00.txt"]
    assert {f.name for f in read_paths([f"{folder}/part[01]/*"])} == {
        file.name for file in whole if file.name[:5] in ("part0", "part1")
    }


def test_hidden_files_are_left_out(folder: Path) -> None:
    whole = read_paths([str(folder)])
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_bytes(b"\0")
    (folder / "part0" / ".state").write_bytes(b"\0")
    assert read_paths([str(folder)]) == whole


# ---------------------------------------------------------------- the datamodule


def test_batches_and_description(folder: Path) -> None:
    module = loaded(folder)
    train, validation = module.train_dataloader(), module.val_dataloader()
    assert all(batch["input_ids"].shape == (2, 17) for batch in train)
    described = module.describe()
    assert described["train"]["files"] + described["validation"]["files"] == 20
    assert len(described["train"]["sha256"]) == 64
    assert described["train"]["sha256"] != described["validation"]["sha256"]
    assert described["python"].startswith("3.")
    seen = torch.cat([batch["labels"][:, 1:].flatten() for batch in validation])
    expected = described["validation"]["bytes"] + 2 * described["validation"]["files"] - 1
    assert int((seen != -100).sum()) == expected


def test_validation_order_is_fixed_and_mixed_and_prediction_in_order(folder: Path) -> None:
    module = loaded(folder)
    first, second, plain = (
        torch.cat([batch["input_ids"] for batch in loader])
        for loader in (
            module.val_dataloader(),
            loaded(folder).test_dataloader(),
            module.predict_dataloader(),
        )
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, plain)
    assert sorted(first.tolist()) == sorted(plain.tolist())


def test_setup_is_idempotent_and_logged_once(folder: Path, caplog) -> None:
    with caplog.at_level("INFO"):
        module = loaded(folder)
        before = module._train
        module.setup("validate")
    assert module._train is before
    lines = [r.message for r in caplog.records if r.message.startswith("text data")]
    assert len(lines) == 1
    assert module.describe()["validation"]["sha256"] in lines[0]


def test_worker_processes_give_the_same_windows(folder: Path) -> None:
    inline, workers = loaded(folder), loaded(folder, num_workers=1)
    pairs = zip(inline.val_dataloader(), workers.val_dataloader(), strict=True)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in pairs)


def test_loaders_before_setup_are_an_order_error() -> None:
    with pytest.raises(RuntimeError, match="call setup"):
        TextDataModule().train_dataloader()


# ---------------------------------------------------------------- refusals


def test_missing_path_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Path 'nowhere/at_all\.txt' does not exist"):
        read_paths(["nowhere/at_all.txt"])


def test_empty_file_set_is_refused(tmp_path: Path) -> None:
    for pattern in (str(tmp_path), f"{tmp_path}/*.txt"):
        with pytest.raises(ValueError, match="No files under paths="):
            read_paths([pattern])


@pytest.mark.parametrize(
    ("content", "reason"), [(b"ab\0cd", "NUL bytes"), (b"abc\xff", "no UTF-8 at byte 3")]
)
def test_binary_file_is_named(folder: Path, content: bytes, reason: str) -> None:
    (folder / "part0" / "image.bin").write_bytes(content)
    with pytest.raises(ValueError, match=rf"image\.bin is not text: {reason}"):
        read_paths([str(folder)])


def test_fewer_windows_than_a_batch_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"\d+ windows of seq_len=16 < batch_size=5000"):
        loaded(folder, batch_size=5000)


def test_one_file_cannot_serve_both_sides(folder: Path) -> None:
    for name, side in {name: _side(name) for name in ("00.txt", "aa.txt", "b.txt")}.items():
        (folder / name).write_text("some text " * 50)
        with pytest.raises(ValueError, match=f"The {side} side is empty: 1 files"):
            loaded(folder / name)


def _side(name: str) -> str:
    in_validation = bool(split_files([TextFile(name, b"")], 0.3)[1])
    return "training" if in_validation else "validation"


def test_small_default_validation_side_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The validation side is too small: \d+ < 200000"):
        TextDataModule(validation_fraction=0.005).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"validation_fraction": 0.0}, r"validation_fraction=0\.0"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1\.0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextDataModule(**options)


def test_one_line_of_50_megabytes_is_a_text_as_any_other(folder: Path) -> None:
    (folder / "line.json").write_bytes(b"[" + b"0," * 25_000_000 + b"0]")
    module = loaded(folder, seq_len=1024, batch_size=8)
    assert module.describe()["train"]["bytes"] + module.describe()["validation"]["bytes"] > 5e7


def test_empty_files_are_refused_only_where_nothing_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"1 files under paths=.*all empty.*Change `paths`"):
        read_paths([str(tmp_path)])
    (tmp_path / "b.txt").write_text("b")
    assert [file.content for file in read_paths([str(tmp_path)])] == [b"", b"b"]


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("a")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"a\.txt cannot be read: Permission denied\..*`paths`"):
        read_paths([str(tmp_path)])
