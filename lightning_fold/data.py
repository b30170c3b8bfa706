"""Byte-token windows over text files: the datamodule of the recipes.

Owns the corpus (files -> tokens -> windows) and the split into training and validation files.
Invariants: nothing is downloaded; a file is on one side only, decided by the hash of its path
relative to its root; equal files give equal windows in equal order. Not here: shuffling and the
split over ranks, which the Trainer's sampler does.
"""

import glob
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 264
"""Rows an embedding needs: 256 bytes, three marks, padded so that tensor parallelism divides it."""

STDLIB_VALIDATION_BYTES = 200_000
_NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class TextFile(NamedTuple):
    """One text: its path relative to its root, which decides its side, and its bytes."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Corpus:
    """The tokens of one side, BOS and EOS around each file, and what they come from."""

    tokens: np.ndarray[Any, np.dtype[np.uint16]]
    num_files: int
    num_bytes: int

    def describe(self) -> dict[str, Any]:
        """Return counts and the SHA-256 of the tokens as little-endian uint16."""
        digest = hashlib.sha256(self.tokens.astype("<u2").tobytes()).hexdigest()
        return {"files": self.num_files, "bytes": self.num_bytes, "sha256": digest}


class WindowDataset(Dataset[dict[str, Tensor]]):
    """Windows of `seq_len + 1` tokens at stride `seq_len`: each token is a target once.

    The last window is padded to full length; it alone carries an `attention_mask`.
    """

    def __init__(self, tokens: np.ndarray[Any, np.dtype[np.uint16]], seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(0, -(-(len(self.tokens) - 1) // self.seq_len))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.seq_len
        window = self.tokens[start : start + self.seq_len + 1].astype(np.int64)
        input_ids = torch.from_numpy(window)
        missing = self.seq_len + 1 - len(input_ids)
        if not missing:
            return {"input_ids": input_ids, "labels": input_ids}
        return {
            "input_ids": torch.nn.functional.pad(input_ids, (0, missing), value=PAD),
            "labels": torch.nn.functional.pad(input_ids, (0, missing), value=-100),
            "attention_mask": (torch.arange(self.seq_len + 1) < len(input_ids)).long(),
        }


class TextDataModule(pl.LightningDataModule):
    """Byte tokens over the standard library's source and manual, or over any text files.

    Args:
        paths: Files, directories (all files below, hidden ones excepted) or globs; none means the
            standard library: its .py files without tests, and the texts of `pydoc_data.topics`.
        seq_len: Targets per window; a window has one token more.
        batch_size: Windows per data-parallel rank and step.
        validation_fraction: Share of the files, by hash of the relative path, held out.
        num_workers: Loader processes per rank.
    """

    def __init__(
        self,
        paths: list[str] | None = None,
        seq_len: int = 255,
        batch_size: int = 16,
        validation_fraction: float = 0.1,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if seq_len < 1 or batch_size < 1:
            raise ValueError(f"seq_len={seq_len} and batch_size={batch_size} must be at least 1.")
        if not 0.0 < validation_fraction < 1.0:
            raise ValueError(f"validation_fraction={validation_fraction} must lie in (0, 1).")
        self.paths, self.seq_len, self.batch_size = list(paths or ()), seq_len, batch_size
        self.validation_fraction, self.num_workers = validation_fraction, num_workers
        self._train: Corpus | None = None
        self._validation: Corpus | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read, split and check the files, once; logs what `describe` returns."""
        if self._train is not None:
            return
        files = read_paths(self.paths) if self.paths else read_stdlib()
        train, validation = split_files(files, self.validation_fraction)
        self._check_sides(files, validation)
        self._train, self._validation = tokenize(train), tokenize(validation)
        self._check_batches()
        rank_zero_info(f"text data: {json.dumps(self.describe())}")

    def describe(self) -> dict[str, Any]:
        """Return what the numbers of a run depend on: Python version, source and both sides."""
        train, validation = self._sides()
        return {
            "python": platform.python_version(),
            "source": self.paths or "stdlib",
            "train": train.describe(),
            "validation": validation.describe(),
        }

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return shuffled batches; an incomplete last one is left out."""
        windows = WindowDataset(self._sides()[0].tokens, self.seq_len)
        return self._loader(windows, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the validation windows in a fixed mixed order.

        Any first part of it samples all files, so `limit_val_batches` gives a fair estimate.
        """
        windows = WindowDataset(self._sides()[1].tokens, self.seq_len)
        order = np.random.default_rng(0).permutation(len(windows))
        return self._loader(Subset(windows, order.tolist()))

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the validation windows: there is no third side."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the validation windows in the order of the text."""
        return self._loader(WindowDataset(self._sides()[1].tokens, self.seq_len))

    def _loader(
        self,
        windows: Dataset[dict[str, Tensor]],
        *,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            windows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=collate,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def _sides(self) -> tuple[Corpus, Corpus]:
        if self._train is None or self._validation is None:
            raise RuntimeError("TextDataModule has no data yet: call setup() first.")
        return self._train, self._validation

    def _check_sides(self, files: Sequence[TextFile], validation: Sequence[TextFile]) -> None:
        split = f"{len(files)} files, {len(validation)} of them held out by hash"
        setting = f"validation_fraction={self.validation_fraction}"
        if not 0 < len(validation) < len(files):
            side = "training" if validation else "validation"
            raise ValueError(
                f"The {side} side is empty: {split} at {setting}. Whole files are held out, so one "
                "file cannot serve both sides. Add files to `paths`, cut the text into more files, "
                "or change `validation_fraction`."
            )
        held_out = sum(len(file.content) for file in validation)
        if not self.paths and held_out < STDLIB_VALIDATION_BYTES:
            raise ValueError(
                f"The validation side is too small: {held_out} < {STDLIB_VALIDATION_BYTES} bytes "
                f"({split} at {setting}). Raise `validation_fraction`."
            )

    def _check_batches(self) -> None:
        windows = len(WindowDataset(self._sides()[0].tokens, self.seq_len))
        if windows < self.batch_size:
            raise ValueError(
                f"Fewer training samples than one batch: {windows} windows of seq_len="
                f"{self.seq_len} < batch_size={self.batch_size}. Lower `batch_size` or `seq_len`, "
                "or add files to `paths`."
            )


def read_stdlib() -> list[TextFile]:
    """Read the standard library's sources and the manual texts that come with it."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in sorted(root.rglob("*.py")) if _is_corpus(path.relative_to(root)))
    return [*(_read(path, root) for path in paths), *_read_manual()]


def read_paths(paths: Iterable[str]) -> list[TextFile]:
    """Read files, directories and globs, each file once, in the order of their names.

    Raises:
        ValueError: A path does not exist, nothing is left to read, all files are empty, or a file
            cannot be read or is not text.
    """
    found: dict[Path, tuple[Path, Path]] = {}
    for path in paths:
        root, files = _expand(path)
        for file in files:
            found.setdefault(file.resolve(), (file, root))
    if not found:
        raise ValueError(f"No files under paths={list(paths)}: empty directories or globs.")
    texts = [_read(file, root) for file, root in found.values()]
    if not any(text.content for text in texts):
        raise ValueError(
            f"{len(texts)} files under paths={list(paths)}, all empty: there is no text to train "
            "on. Change `paths`."
        )
    return sorted(texts)


def split_files(
    files: Iterable[TextFile], validation_fraction: float
) -> tuple[list[TextFile], list[TextFile]]:
    """Return (training, validation) files; a file's side depends on its name alone."""
    sides: tuple[list[TextFile], list[TextFile]] = ([], [])
    for file in files:
        digest = hashlib.sha256(file.name.encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < validation_fraction * 2**64].append(file)
    return sides


def tokenize(files: Sequence[TextFile]) -> Corpus:
    """Turn files into one stream of byte tokens, BOS before and EOS after each."""
    num_bytes = sum(len(file.content) for file in files)
    tokens = np.empty(num_bytes + 2 * len(files), dtype=np.uint16)
    position = 0
    for _, content in files:
        end = position + len(content) + 1
        tokens[position], tokens[end] = BOS, EOS
        tokens[position + 1 : end] = np.frombuffer(content, dtype=np.uint8)
        position = end + 1
    return Corpus(tokens, num_files=len(files), num_bytes=num_bytes)


def collate(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack windows; the batch has an `attention_mask` only if one of them has padding."""
    batch = {name: torch.stack([item[name] for item in items]) for name in ("input_ids", "labels")}
    if any("attention_mask" in item for item in items):
        full = torch.ones_like(items[0]["input_ids"])
        batch["attention_mask"] = torch.stack([item.get("attention_mask", full) for item in items])
    return batch


def _is_corpus(path: Path) -> bool:
    # topics.py spells the manual as escaped literals; _read_manual reads the texts themselves.
    return not _NOT_CORPUS & set(path.parts) and path.parts[0] != "pydoc_data"


def _read_manual() -> list[TextFile]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # Some distributions strip it; the sources alone suffice.
        return []
    return [TextFile(f"pydoc_data/{name}", topics[name].encode()) for name in sorted(topics)]


def _expand(path: str) -> tuple[Path, list[Path]]:
    place = Path(path).expanduser()
    if place.is_dir():
        return place, [file for file in sorted(place.rglob("*")) if _is_visible(file, place)]
    if place.is_file():
        return place.parent, [place]
    if not glob.has_magic(path):
        raise ValueError(f"Path {path!r} does not exist. Change `paths`.")
    matches = sorted(glob.glob(str(place), recursive=True))
    return _fixed_part(place), [Path(match) for match in matches if Path(match).is_file()]


def _is_visible(file: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return file.is_file() and not hidden


def _fixed_part(pattern: Path) -> Path:
    return next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))


def _read(file: Path, root: Path) -> TextFile:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read: {error.strerror or error}. Give it to this user, or take it "
            "out of `paths`."
        ) from error
    try:
        binary = "NUL bytes" if b"\0" in content else ""
        content.decode()
    except UnicodeDecodeError as error:
        binary = f"no UTF-8 at byte {error.start}"
    if binary:
        raise ValueError(
            f"{file} is not text: {binary}. Take it out of `paths`; a glob such as "
            "'folder/**/*.txt' chooses among files."
        )
    return TextFile(file.relative_to(root).as_posix(), content)
