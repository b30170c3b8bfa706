"""Run all comparisons on two emulated nodes of four ranks; print one table, write RESULTS.md.

python -m benchmarks.cluster [--only PREFIX ...] [--links FACTOR] [--out FOLDER]

Needs root on Linux, and says in one line why it does nothing elsewhere (exit status 0).
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.cluster import launch, network

OUT = Path(__file__).parent


def main() -> None:
    """Check that there can be nodes, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="run cases that begin so")
    parser.add_argument("--links", type=float, default=1.0, help="times faster links")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of pictures and RESULTS.md")
    arguments = parser.parse_args()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _leave)
    try:
        network.check_permitted()
        # Late, for its imports: where there can be no nodes, nobody should wait for them.
        from benchmarks.cluster.bench import measure

        with tempfile.TemporaryDirectory() as folder:
            measure(tuple(arguments.only), arguments.links, arguments.out, Path(folder))
    except network.NamespacesError as reason:
        print(f"cluster-bench: skipped: {reason}")
    except launch.RankError as failure:
        sys.exit(f"cluster-bench: {failure}")


def _leave(signum: int, _: Any) -> NoReturn:
    """End by an exception, so that nodes are removed and ranks killed on the way."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
