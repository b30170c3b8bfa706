"""The model under verification, so named that every process can build it with equal weights.

Owns the way from a name (built-in decoder, recipe, Python object) to a LightningModule of a
verifiable size, with its batches. Invariant: the same `Subject` gives the same weights and batches
in every process. Knows no mapping.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn

from lightning_fold.cli_config import read_config
from lightning_fold.model import decoder
from lightning_fold.model.on_meta import parameters_on_meta
from lightning_fold.verify import cases
from lightning_fold.verify.product.shrink import (
    Changes,
    is_hugging_face,
    shrink_cores,
    shrunk_model,
    silence,
)

SEED = 6
DEFAULT_MODEL = "decoder-shared-bias"


@dataclass(frozen=True)
class Subject:
    """How to build the model.

    Attributes:
        decoder: Key of `cases.MODELS`, for the built-in decoder; empty for the others.
        recipe: Path of a LightningCLI file.
        function: `module:callable` or `file.py:callable`.
        full: Whether it is taken at the size it has.
    """

    decoder: str = ""
    recipe: str = ""
    function: str = ""
    full: bool = False

    def __str__(self) -> str:
        return f"built-in {self.decoder}" if self.decoder else self.recipe or self.function


DEFAULT = Subject(decoder=DEFAULT_MODEL)


@dataclass(frozen=True)
class Built:
    """A model that can be verified.

    Attributes:
        module: What is trained; a plain module sits in a `PlainModule`.
        changes: What was shrunk or turned off: old and new value by name.
        data: The recipe's, where it has any.
    """

    module: pl.LightningModule
    changes: Changes
    data: Any = None


class PlainModule(pl.LightningModule):
    """A module that is no LightningModule, trained by the loss that it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """The loss of `model(**batch)`: its `loss`, or the output itself if that is a scalar."""
        out = self.model(**batch)
        loss = out["loss"] if isinstance(out, dict) else getattr(out, "loss", out)
        if not isinstance(loss, Tensor) or loss.dim():
            raise ValueError(
                f"{type(self.model).__name__} returned {type(out).__name__}, which holds no scalar "
                "`loss`. Return one, or verify a LightningModule whose training_step does."
            )
        return loss


def subject_of(
    model: str | Callable[..., nn.Module] | None, recipe: str | Path | None, *, full: bool
) -> Subject:
    """Name the model that a caller means; neither is the built-in decoder.

    Raises:
        ValueError: Both are given, or `model` cannot be imported by another process.
    """
    if model is not None and recipe is not None:
        raise ValueError("a model and a recipe are two models. Leave out `--model` or `--config`.")
    if recipe is not None:
        return Subject(recipe=str(Path(recipe).absolute()), full=full)
    if model is None:
        return DEFAULT
    return Subject(function=model if isinstance(model, str) else _name_of(model), full=full)


def build(subject: Subject) -> Built:
    """Build the model in fp32, with weights that depend on the subject alone.

    Raises:
        ValueError: It is not there, or is not known how to be made small.
    """
    random.seed(SEED)
    torch.manual_seed(SEED)
    if subject.decoder:
        model = cases.build_model(subject.decoder, decoder=decoder)
        return Built(PlainModule(model), {})
    make, kind, data = _maker(subject)
    module, changes = _sized(make, kind, subject)
    if isinstance(module, pl.LightningModule):
        module.configure_model()
    else:
        module = PlainModule(module)
    _check_trainable(module)
    _make_telling(module)
    return Built(module, changes | silence(module), data)


def strategy_options(recipe: str) -> dict[str, Any]:
    """Arguments that a recipe gives the strategy; empty where it names none."""
    strategy = (read_config(recipe).get("trainer") or {}).get("strategy")
    return dict(strategy.get("init_args") or {}) if isinstance(strategy, dict) else {}


def without_values(recipe: str) -> nn.Module:
    """A recipe's model at its full size, on meta.

    Raises:
        ValueError: The recipe names no class for it.
    """
    return _on_meta(_maker(Subject(recipe=recipe))[0])


def load_object(name: str) -> Any:
    """The object named `module:attribute` or `file.py:attribute`.

    Raises:
        ValueError: There is none.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(
            f"{name!r} names no Python object. Legal: module:callable, file.py:callable. "
            "Change `--model`."
        )
    try:
        found: Any = _load_file(Path(place)) if place.endswith(".py") else _import(place)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(f"{name!r} cannot be loaded: {error}. Change `--model`.") from error
    return found


def _maker(subject: Subject) -> tuple[Callable[[], nn.Module], type | None, Any]:
    """What builds the model, its class where that is known beforehand, and its data."""
    if subject.function:
        made = load_object(subject.function)
        return made, made if isinstance(made, type) else None, None
    config = read_config(subject.recipe)
    if "class_path" not in (config.get("model") or {}):
        raise ValueError(
            f"{subject.recipe}: `model` names no class, so other processes cannot build it. Give "
            "it a `class_path`, or name a function by `--model`."
        )
    kind = load_object(":".join(config["model"]["class_path"].rsplit(".", 1)))
    data = config.get("data")

    def make() -> nn.Module:
        module: nn.Module = _instance(pl.LightningModule, config["model"])
        return module

    return make, kind, (lambda: _instance(pl.LightningDataModule, data)) if data else None


def _instance(base: type, config: Any) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "it")
    return parser.instantiate_classes(parser.parse_object({"it": config})).it


def _sized(make: Callable[[], nn.Module], kind: Any, subject: Subject) -> tuple[nn.Module, Changes]:
    if subject.full:
        return make(), {}
    if hasattr(kind, "tiny"):
        return kind.tiny(), {}
    module = _on_meta(make)
    own: Any = type(module)
    if hasattr(own, "tiny"):
        return own.tiny(), {}
    small = shrunk_model(module)
    module, changes = small if small is not None else (module, shrink_cores(module))
    left = [name for name, param in module.named_parameters() if param.is_meta]
    if left:
        raise ValueError(
            f"{type(module).__name__} cannot be made small: {left[0]} belongs to no model with a "
            "known config (built-in decoder, transformers), and the class has no classmethod "
            "`tiny()` that builds a small one. Add it, or verify at the full size by `--full`."
        )
    return module, changes


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Without values: a model at its full size may not fit into memory."""
    with parameters_on_meta():
        module = make()
        if isinstance(module, pl.LightningModule):
            module.configure_model()
    return module


def _check_trainable(module: pl.LightningModule) -> None:
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} optimises manually, so its steps cannot be repeated by a "
            "plain loop. Verify the model itself by `--model module:callable`."
        )


@torch.no_grad()
def _make_telling(module: nn.Module) -> None:
    """Move vectors off ones and zeros: a bias added twice would not show at zero."""
    for param in module.parameters():
        if param.dim() == 1:
            param.add_(torch.randn(param.shape), alpha=0.1)
    for child in module.modules():
        if is_hugging_face(child):
            config: Any = child.config
            # grouped_mm has no fp64; a folded model computes its experts by itself.
            config._experts_implementation = "eager"


def _name_of(function: Callable[..., nn.Module]) -> str:
    module, name = function.__module__, getattr(function, "__qualname__", "<lambda>")
    if "<" in name:
        raise ValueError(
            f"{name} exists in this process only, and each rank builds the model by itself. Move "
            "it to the top of a module."
        )
    path = getattr(sys.modules.get(module), "__file__", None)
    return f"{path}:{name}" if module == "__main__" and path else f"{module}:{name}"


def _import(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _load_file(path: Path) -> Any:
    """A file as a module of its own name, loaded once a process."""
    path = path.absolute()
    known = sys.modules.get(path.stem)
    if getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise OSError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look their module up by name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name, or takes any."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
