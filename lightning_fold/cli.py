"""The command line: `lightning-fold fit | validate | test | predict | show | verify | ...`.

Owns the commands and what LightningCLI needs to serve this package; `cli_config` checks what a
user wrote and `cli_errors` how a command ends. `python -m lightning_fold.cli` and
`torchrun -m lightning_fold.cli` are the same program.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch.distributed as dist
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    _get_module_type,
    _InstantiatorFn,
)
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fold import __version__
from lightning_fold.cli_checkpoint import run_convert, run_inspect
from lightning_fold.cli_config import (
    CommandParser,
    check_arguments,
    explain_parse_error,
    in_options,
    writable,
)
from lightning_fold.cli_errors import PROGRAM, UsageError, end_with, relayed
from lightning_fold.cli_schedule import run_schedule
from lightning_fold.cli_tune import run_tune
from lightning_fold.cli_verify import run_verify
from lightning_fold.model.fold import check_model
from lightning_fold.model.on_meta import parameters_on_meta
from lightning_fold.strategy import FoldedMoEStrategy
from lightning_fold.topology.doctor import (
    DEGREE_FIELDS,
    check_degree,
    nearest,
    resolve_folding,
)
from lightning_fold.topology.folding import Folding
from lightning_fold.topology.rank_map import draw_rank_map, rank_map_json, rank_map_text

MAX_SHOWN_WORLD = 1 << 16

_HELP = f"""usage: {PROGRAM} COMMAND [options]

  fit, validate, test, predict   run the Trainer, for example
                                 {PROGRAM} fit --config FILE --trainer.max_steps 50
  show                           which GPU is in which group, for example
                                 {PROGRAM} show --world 16 --tp 2 --ep 8
  verify                         whether every mapping trains as one process does:
                                 {PROGRAM} verify --ranks 4 --config FILE
  schedule                       idle time and memory of a pipeline schedule:
                                 {PROGRAM} schedule --pp 4 --microbatches 8 --schedule all
  tune                           quickest tiles of the kernels on this machine's GPU:
                                 {PROGRAM} tune --config FILE --out tiles.json
  inspect                        what a checkpoint holds, without loading it
  convert                        a sharded folder into one file, and back:
                                 {PROGRAM} convert last.ckpt whole.ckpt

  {PROGRAM} COMMAND --help       the command's options
  {PROGRAM} --version            this version"""


class FoldedCLI(LightningCLI):
    """LightningCLI whose refusals are one line, and whose optimizers see folded parameters.

    Takes LightningCLI's arguments; model and data are any classes, named by the config.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        quiet: dict[str, Any] = {name: {"exit_on_error": False} for name in self.subcommands()}
        kwargs.setdefault("parser_kwargs", quiet | {"exit_on_error": False})
        # A run that is started again in the same folder replaces the config beside its results.
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})
        self._failures: list[Exception] = []
        super().__init__(*args, **kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Check keys at every depth, then parse.

        Raises:
            UsageError: The command line or a config file is refused.
        """
        words = sys.argv[1:] if args is None else args
        if not isinstance(words, list):
            super().parse_arguments(parser, args)
            return
        commands: dict[str, Any] = getattr(self, "_subcommand_parsers", {})
        if words and words[0] in commands:
            known = commands[words[0]].get_defaults(skip_validation=True)
            check_arguments(words[1:], known)
        try:
            self.config = parser.parse_args(words)
        except ArgumentError as error:
            raise UsageError(explain_parse_error(str(error))) from error

    def _parse_ckpt_path(self) -> None:
        """Nothing: the config alone says what the model is, for both forms of a checkpoint.

        LightningCLI would load the whole file on every rank to put its hyperparameters above the
        config, which they do not fit where the model is named by its class.
        """

    def instantiate_classes(self) -> None:
        """Construct everything; a constructor's error arrives as it was raised."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            # The parser lists the errors of every type of a union, as text of many lines.
            causes = [cause for cause in self._failures if _first_line(cause) in str(error)]
            raise (causes or [error])[-1] from None
        for logger in self.trainer.loggers:
            # Asked before any of them creates a folder, loggers that share one take one version.
            _ = logger.version

    def _add_instantiators(self) -> None:
        constructors: dict[type, Callable[..., Any]] = {
            _get_module_type(self._model_class): self._construct_model,
            _get_module_type(self._datamodule_class): _InstantiatorFn(cli=self, key="data"),
            object: _construct,
        }
        for kind, construct in constructors.items():
            self.parser.add_instantiator(
                _Recorded(construct, failures=self._failures), kind, subclasses=True
            )

    def _construct_model(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        """Build the model as any class, but without values where the strategy gives them later."""
        strategy = self._get(self.config, "trainer.strategy")
        options = strategy.get("init_args", {}) if isinstance(strategy, Namespace) else {}
        later = options.get("meta_init") or options.get("init_from")
        with parameters_on_meta() if later else nullcontext():
            return _InstantiatorFn(cli=self, key="model")(kind, *args, **kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        self._check_model()
        _check_checkpoint(self._get(self.config_init, "ckpt_path"))
        launcher = self.trainer.strategy.launcher
        listens = (
            isinstance(launcher, _SubprocessScriptLauncher)
            and not launcher.cluster_environment.creates_processes_externally
        )
        with relayed(launcher) if listens else nullcontext():
            super()._run_subcommand(subcommand)

    def _check_model(self) -> None:
        """Refuse here, in seconds, what set-up would refuse in every rank once all have started."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, FoldedMoEStrategy) or is_overridden(
            "configure_model", self.model
        ):
            return
        check_model(
            self.model,
            strategy.folding,
            context_method=strategy.config.context_parallel_method,
            expert_precision=strategy.config.expert_precision,
        )

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Build the configured optimizer when the strategy asks for it, not before.

        LightningCLI builds it from the parameters that exist before `configure_model` and before
        folding: none at all, or ones that set-up replaces.
        """
        if not self._has_optimizer(subcommand):
            return
        build: Callable[[str | None], None] = super()._add_configure_optimizers_method_to_model

        def configure_optimizers(module: LightningModule) -> Any:
            # Lightning's own method stands aside, so that `build` sees the class's one.
            del module.configure_optimizers
            build(subcommand)
            built = module.configure_optimizers()
            module.configure_optimizers = method  # type: ignore[method-assign]
            return built

        method = MethodType(configure_optimizers, self.model)
        self.model.configure_optimizers = method

    def _has_optimizer(self, subcommand: str | None) -> bool:
        optimizers = self._parser(subcommand)._optimizers if self.auto_configure_optimizers else {}
        return any(
            link == "AUTOMATIC" and self._get(self.config_init, key)
            for key, (_, link) in optimizers.items()
        )


def _check_checkpoint(path: str | None) -> None:
    """Refuse a checkpoint that is not there before ranks start; Lightning's own words pass."""
    if path is None or path in ("best", "last", "hpc", "registry") or "://" in str(path):
        return
    if not Path(path).exists():
        raise UsageError(f"checkpoint {str(path)!r} does not exist. Change `ckpt_path`.")


@dataclass(frozen=True)
class _Recorded:
    """A constructor that notes what it raises."""

    construct: Callable[..., Any]
    failures: list[Exception]

    def __call__(
        self,
        kind: type,
        *args: Any,
        applied_instantiation_links: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        links = {"applied_instantiation_links": applied_instantiation_links}
        try:
            return self.construct(kind, *args, **links, **kwargs)
        except Exception as error:
            self.failures.append(error)
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 means that the request was not understood."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _command(words)(words)
    except Exception as error:
        status = end_with(error)
        if dist.is_available() and dist.is_initialized():
            # Destructors of process groups write after the last line, or wait for lost ranks.
            os._exit(status)
        return status
    return 0


def _construct(
    kind: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any
) -> Any:
    return kind(*args, **kwargs)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _command(words: list[str]) -> Callable[[list[str]], None]:
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "--version"):
        return _print_about
    own: dict[str, Callable[[list[str]], None]] = {
        "show": _show,
        "verify": run_verify,
        "schedule": run_schedule,
        "tune": run_tune,
        "inspect": run_inspect,
        "convert": run_convert,
    }
    if name in own:
        return own[name]
    if name in FoldedCLI.subcommands():
        return _run_trainer
    commands = [*FoldedCLI.subcommands(), *own]
    likely = nearest(name, commands)
    hint = f"Change it to `{likely}`." if likely else "Put the command first."
    raise UsageError(f"{name!r} is not a command. Legal: {', '.join(commands)}. {hint}")


def _print_about(words: list[str]) -> None:
    print(f"{PROGRAM} {__version__}" if words[:1] == ["--version"] else _HELP)


def _run_trainer(words: list[str]) -> None:
    FoldedCLI(args=words)


def _show(words: list[str]) -> None:
    options = _show_parser().parse_args(words[1:])
    folding = _shown_folding(options)
    if options.json == "-":
        print(json.dumps(rank_map_json(folding)))
    else:
        print(rank_map_text(folding, gpus_per_node=options.gpus_per_node))
    json_file = None if options.json == "-" else writable("show", options.json, "--json")
    if json_file is not None:
        json_file.write_text(json.dumps(rank_map_json(folding)) + "\n")
    png = writable("show", options.png, "--png")
    if png is not None:
        draw_rank_map(folding, png, gpus_per_node=options.gpus_per_node)


def _show_parser() -> CommandParser:
    parser = CommandParser(
        "show", "Show which GPU is in which group, for attention and for MoE layers."
    )
    parser.add_argument("--world", type=int, required=True, help="all ranks")
    for axis, name in DEGREE_FIELDS.items():
        parser.add_argument(f"--{axis}", type=int, default=1, help=name.replace("_", " "))
    parser.add_argument("--gpus-per-node", type=int, default=8, help="ranks of one node")
    parser.add_argument("--png", metavar="FILE", help="draw both views")
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="groups as rank lists; stdout alone"
    )
    return parser


def _shown_folding(options: argparse.Namespace) -> Folding:
    degrees = {axis: getattr(options, axis) for axis in DEGREE_FIELDS}
    if options.world > MAX_SHOWN_WORLD:
        raise UsageError(
            f"show: world={options.world} is more than a picture can show. Legal world: 1 to "
            f"{MAX_SHOWN_WORLD}.  Change `--world`."
        )
    try:
        check_degree("gpus_per_node", options.gpus_per_node, field="gpus_per_node")
        return resolve_folding(options.world, **degrees)
    except ValueError as error:
        names = {name: axis for axis, name in DEGREE_FIELDS.items()}
        names |= {"devices * num_nodes": "world", "gpus_per_node": "gpus-per-node"}
        raise ValueError(in_options(str(error), names)) from None


if __name__ == "__main__":
    sys.exit(main())
