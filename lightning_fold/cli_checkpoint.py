"""The commands on checkpoints: `lightning-fold inspect` and `lightning-fold convert`.

They start no ranks and no process group, and hold one tensor at a time at most.
"""

from __future__ import annotations

import json
from pathlib import Path

from lightning_fold.checkpoint.convert import convert
from lightning_fold.checkpoint.summary import summarise, summary_text
from lightning_fold.cli_config import CommandParser
from lightning_fold.cli_errors import UsageError


def run_inspect(words: list[str]) -> None:
    """Print what a checkpoint holds."""
    parser = CommandParser(
        "inspect",
        "List names, shapes and dtypes of a checkpoint, its step and the mapping that wrote it.",
    )
    parser.add_argument("path", help="sharded folder, .ckpt file, or safetensors")
    parser.add_argument("--json", action="store_true", help="as JSON, one object")
    options = parser.parse_args(words[1:])
    summary = summarise(_existing("inspect", options.path))
    print(json.dumps(summary) if options.json else summary_text(summary))


def run_convert(words: list[str]) -> None:
    """Write the other form of a checkpoint."""
    parser = CommandParser(
        "convert", "Turn a sharded folder into one file as plain Lightning reads it, or back."
    )
    parser.add_argument("source", help="sharded folder, or .ckpt file")
    parser.add_argument("target", help="what to write; must not exist")
    parser.add_argument("--weights-only", action="store_true", help="leave optimizers out")
    options = parser.parse_args(words[1:])
    target = Path(options.target)
    convert(_existing("convert", options.source), target, weights_only=options.weights_only)
    print(f"wrote {target}")


def _existing(command: str, name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise UsageError(f"{command}: {name!r} does not exist. Change the path.")
    return path
