"""Print the summary of a run as one line: `python -m lightning_fold.callbacks RUN_DIR`.

RUN_DIR is the folder of a run, or a CSVLogger's folder of versions, of which the newest counts.
"""

import json
import sys
from pathlib import Path

from lightning_fold.callbacks.report import RANK_MAP, summarise


def main(arguments: list[str]) -> int:
    """Print `result: {json}`; errors are one line on stderr."""
    if len(arguments) != 1:
        print("usage: python -m lightning_fold.callbacks RUN_DIR", file=sys.stderr)
        return 2
    try:
        run = newest_run(Path(arguments[0]))
        mapping = json.loads((run / RANK_MAP).read_text())["mapping_id"]
        print(f"run folder: {run}")
        print("result:", json.dumps(summarise(run, mapping)))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def newest_run(folder: Path) -> Path:
    """Return `folder` if it holds metrics, else its newest version that does.

    Raises:
        ValueError: Nothing below `folder` holds metrics.csv.
    """
    if (folder / "metrics.csv").is_file():
        return folder
    runs = sorted(folder.glob("*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ValueError(f"{folder}: no metrics.csv here or one folder below. Name a run's folder.")
    return runs[-1].parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
