"""The command `lightning-fold tune`: which tiles are quickest on this GPU, and whether kernels pay.

Owns the way from options or a recipe to the layers of one rank. The sweep is `fold_kernels.tune`,
in a process of its own, which a kernel that fails may end. A tool to run once: it knows no ranks,
and all ranks of a run have to be given the same file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from fold_kernels.backend import FORCE_VARIABLE, TILES_VARIABLE, Request, why_not_triton
from fold_kernels.tune.layers import Layer
from lightning_fold.cli_config import CommandParser, writable
from lightning_fold.cli_errors import UsageError
from lightning_fold.model.inspect import find_parts
from lightning_fold.verify.product.subject import strategy_options, without_values

_SIZES = ("hidden_size", "expert_width", "experts", "top_k")
_DEGREES = {"ep": "expert_parallel_size", "etp": "expert_tensor_parallel_size"}


@dataclass(frozen=True)
class _Sizes:
    """A MoE layer of a whole model."""

    hidden_size: int
    expert_width: int
    experts: int
    top_k: int


def run_tune(words: list[str]) -> None:
    """Measure on this machine's GPU and write the table.

    Raises:
        UsageError: An option is wrong, or options name no layer.
        RuntimeError: There is no GPU that the kernels serve, or the sweep failed.
    """
    options = _parser().parse_args(words[1:])
    path = writable("tune", options.out, "--out")
    assert path is not None, "--out has a default"
    if not 0 < options.budget < math.inf:
        raise UsageError(f"tune: budget={options.budget:g} must be positive. Change `--budget`.")
    layers = list(_layers(options))
    if not options.dry:
        _check_gpu()
    request = {
        "out": str(path),
        "budget": options.budget,
        "dry": options.dry,
        "layers": [asdict(layer) for layer in layers],
    }
    _sweep(request)
    if options.dry:
        print(f"{path}: of no GPU, which every GPU refuses; it shows that the sweep runs.")
    else:
        print(f"{TILES_VARIABLE}={path.absolute()} makes use of it; give all ranks the same file.")


def _parser() -> CommandParser:
    parser = CommandParser(
        "tune",
        "Time the kernels of the experts on this machine's GPU, tile by tile and beside what they "
        "replace, and write a table that training takes. Sizes are those of a recipe, of options, "
        "or of some public models.",
    )
    parser.add_argument("--out", metavar="FILE", default="tiles.json", help="the table")
    parser.add_argument(
        "--budget", type=float, default=240.0, metavar="SECONDS", help="of all of it"
    )
    parser.add_argument("--config", metavar="FILE", help="recipe whose MoE layers are measured")
    parser.add_argument("--hidden-size", type=int, help="width of a token")
    parser.add_argument("--expert-width", type=int, help="inner width of an expert")
    parser.add_argument("--experts", type=int, help="experts of a layer, over all ranks")
    parser.add_argument("--top-k", type=int, help="experts of a token")
    parser.add_argument("--ep", type=int, help="expert parallel size; the recipe's, or 1")
    parser.add_argument("--etp", type=int, help="expert tensor parallel size; likewise")
    parser.add_argument(
        "--tokens", type=int, default=16384, help="tokens of a rank in a microbatch"
    )
    parser.add_argument(
        "--dry", action="store_true", help="run it in Triton's interpreter; times nothing"
    )
    return parser


def _layers(options: argparse.Namespace) -> Iterator[Layer]:
    """Layers as one rank meets them; none stand for those of public models."""
    given = {name: getattr(options, name) for name in _SIZES}
    missing = [f"`--{name.replace('_', '-')}`" for name in _SIZES if given[name] is None]
    if options.config is None and len(missing) == len(_SIZES):
        return
    if options.config is None and missing:
        raise UsageError(f"tune: {', '.join(missing)} missing: a layer has all four sizes.")
    if options.config is not None and len(missing) < len(_SIZES):
        raise UsageError("tune: a recipe has sizes of its own. Leave out `--config` or the sizes.")
    try:
        if options.config is None:
            yield _local(_Sizes(**given), options, {})
        else:
            degrees = strategy_options(options.config)
            module = without_values(options.config)
            for sizes in dict.fromkeys(_sizes_of(module)):
                yield _local(sizes, options, degrees)
    except ValueError as error:
        raise UsageError(f"tune: {error}") from error


def _sizes_of(module: nn.Module) -> Iterator[_Sizes]:
    """Sizes of all MoE layers."""
    parts = find_parts(module)
    top_k = next(filter(None, map(_top_k, parts.core.modules())), None)
    if top_k is None:
        raise ValueError(
            f"{type(parts.core).__name__} has no config with `num_experts_per_tok`. Give the sizes "
            "as options."
        )
    for spec in parts.experts:
        down: Any = getattr(spec.module, "down_proj", None)
        if spec.refusal is None and down is not None:
            yield _Sizes(down.shape[1], spec.width, spec.num_experts, top_k)


def _top_k(module: nn.Module) -> int | None:
    return getattr(getattr(module, "config", None), "num_experts_per_tok", None)


def _local(sizes: _Sizes, options: argparse.Namespace, recipe: dict[str, Any]) -> Layer:
    """One rank's part of a layer under balanced routing."""
    ep, etp = (
        next(d for d in (getattr(options, name), recipe.get(key), 1) if d is not None)
        for name, key in _DEGREES.items()
    )
    for degree, name, whole in ((ep, "ep", sizes.experts), (etp, "etp", sizes.expert_width)):
        if degree < 1 or whole % degree:
            raise ValueError(f"{name}={degree} does not divide {whole}. Change `--{name}`.")
    model, width, experts = sizes.hidden_size, sizes.expert_width // etp, sizes.experts // ep
    if ep * etp == 1:
        layer = Layer("layer", model, width, experts, sizes.top_k, options.tokens)
    else:
        # A row arrives once for each of its experts, and etp peers see each other's rows.
        rows = options.tokens * sizes.top_k * etp
        layer = Layer("layer", model, width, experts, 1, rows)
    return layer


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "tune: there is no GPU here, and nothing else can be measured. Run it on a node that "
            "trains, or prove the way to it by `--dry`."
        )
    capability = torch.cuda.get_device_capability()
    obstacle = why_not_triton(
        Request("gemm", "cuda", torch.bfloat16, capability=capability), interpreted=False
    )
    if obstacle is not None:
        raise RuntimeError(f"tune: the kernels do not serve this GPU: {obstacle}.")


def _sweep(request: dict[str, Any]) -> None:
    # What a user forces in training is no part of what is compared here.
    told = (FORCE_VARIABLE, TILES_VARIABLE, "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in told}
    if request["dry"]:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "fold_kernels.tune", json.dumps(request)]
    sys.stdout.flush()
    status = subprocess.run(command, env=environment, check=False).returncode
    if status != 0:
        raise RuntimeError(f"tune: the sweep ended with status {status}; its own words are above")
