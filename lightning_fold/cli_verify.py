"""The command `lightning-fold verify`: equality over all mappings on the user's own model.

Starts Gloo processes on this machine, whatever the recipe's accelerator is. Not here: what is
compared (`verify.product`).
"""

from __future__ import annotations

import json
import sys

from rich.console import Console

from lightning_fold.cli_config import CommandParser, writable
from lightning_fold.cli_errors import UsageError
from lightning_fold.verify.mutations import MUTATIONS
from lightning_fold.verify.product import VerifyResult, verify
from lightning_fold.verify.product.picture import draw_result

_WIDTH = 210


def run_verify(words: list[str]) -> None:
    """Compare every mapping with one process and print the table.

    Raises:
        UsageError: An option is wrong, or the model cannot be verified as it is.
        RuntimeError: A mapping differs, crashes, or none ran.
    """
    options = _parser().parse_args(words[1:])
    files = {
        option: writable("verify", getattr(options, option), f"--{option}")
        for option in ("json", "png")
    }
    try:
        result = verify(
            options.model,
            ranks=options.ranks,
            config=options.config,
            full=options.full,
            mappings=options.mapping,
            pp=options.pp,
            inject=options.inject,
            tolerance=options.tolerance,
        )
    except ValueError as error:
        raise UsageError(f"verify: {error}") from error
    print_result(result)
    if files["json"] is not None:
        files["json"].write_text(json.dumps(result.to_json(), indent=1) + "\n")
    if files["png"] is not None:
        draw_result(result, files["png"])
    if options.inject and result.passed:
        shows = MUTATIONS[options.inject].case.mapping
        raise RuntimeError(
            f"verify: the injected fault {options.inject} shows under none of these mappings; it "
            f"shows under {shows}. Change `--ranks` or `--mapping`."
        )
    if not result.passed:
        raise RuntimeError(explain(result))


def print_result(result: VerifyResult) -> None:
    """Print what was verified, the headline, the table and what was refused or is off."""
    print(f"verify: {result.subject}, relative errors up to {result.tolerance:.0e}")
    for line in (result.shrunk, *result.notes):
        if line:
            print(line)
    print(result.headline())
    if result.run:
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH)
        console.print(result.table())
    for line in (*result.refusals(), *result.failures(), *map(str, result.findings)):
        print(line)


def explain(result: VerifyResult) -> str:
    """The last line of a verification that did not pass."""
    if not result.run:
        return f"verify: no mapping ran: all {len(result.mappings)} were refused"
    crashed = [row for row in result.run if row.failure is not None]
    if not result.findings:
        return f"verify: {len(crashed)} of {len(result.run)} mappings ended without a result"
    # A mapping whose checkpoint an unequal one resumed is no culprit: findings leave it out.
    culprits = {mapping for finding in result.findings for mapping in finding.failed}
    off = len(culprits) + len(crashed)
    return f"verify: {off} of {len(result.run)} mappings differ. {result.findings[0]}"


def _parser() -> CommandParser:
    parser = CommandParser(
        "verify",
        "Run every legal mapping of some ranks in fp64 against one process: routing, outputs, "
        "gradients, clip norm, weights, and the step after save, reshard and resume.",
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes to start, 1 to 8")
    parser.add_argument("--config", metavar="FILE", help="recipe whose model is verified")
    parser.add_argument(
        "--model", metavar="NAME", help="module:callable or file.py:callable that builds the model"
    )
    parser.add_argument("--full", action="store_true", help="do not make the model small")
    parser.add_argument(
        "--mapping", metavar="ID", action="append", help="run this mapping alone; may be repeated"
    )
    parser.add_argument(
        "--pp",
        metavar="DEGREE",
        type=int,
        action="append",
        help="only mappings of this pipeline degree; may be repeated",
    )
    parser.add_argument(
        "--inject", metavar="FAULT", default="", help="inject a fault of `make mutate`"
    )
    parser.add_argument("--tolerance", type=float, help="largest relative error that passes")
    parser.add_argument("--json", metavar="FILE", help="every figure")
    parser.add_argument("--png", metavar="FILE", help="mappings by checks as a picture")
    return parser
