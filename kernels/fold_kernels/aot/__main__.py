"""Command line: compile what is shipped, print a table, exit with 1 if something is wrong."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile


def main(arguments: list[str] | None = None) -> int:
    """Run the gate with the Triton that is importable; returns the exit status."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        # Kernels of the interpreter do not compile; Triton reads this when it is imported.
        os.environ.pop("TRITON_INTERPRET", None)
        from fold_kernels.aot.report import run

        return run(capability=options.capability, write=options.write, jobs=options.jobs)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fold_kernels.aot")
    parser.add_argument(
        "--capability", type=int, default=90, choices=(90, 100), help="100 is a smoke test"
    )
    parser.add_argument("--write", action="store_true", help="make what is found the budget")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
