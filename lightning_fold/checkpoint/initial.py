"""`init_from`: weights of a file into a model that is folded and sharded already.

Owns the match between names in the file and names of the LightningModule, of all pipeline stages
together. Each rank reads its own part of every tensor and no rank sends any. Optimizers are not
touched, and a resumed run reads its checkpoint elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_fold.checkpoint.owned import fill_owned
from lightning_fold.checkpoint.stages import Stages
from lightning_fold.checkpoint.tensor_entry import TensorEntry
from lightning_fold.checkpoint.tensor_file import TensorFile, open_tensors
from lightning_fold.checkpoint.whole import TensorMeta

_PER_EXPERT = re.compile(r"experts\.\d+\.(\w+)")


@dataclass(frozen=True)
class InitialWeights:
    """A file whose names and shapes fit a model.

    Attributes:
        file: The opened file.
        sources: Name in the file by name in this rank's LightningModule; one name of tied
            parameters.
        covered: Names in the LightningModule that get their values, all those of tied ones.
    """

    file: TensorFile
    sources: Mapping[str, str]
    covered: frozenset[str]


def open_initial(path: str) -> TensorFile:
    """Open the file of `init_from`. Local.

    Raises:
        ValueError: It cannot be read or is damaged.
    """
    try:
        return open_tensors(path)
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}. Change `init_from`.") from error


def find_initial(
    path: str,
    module: nn.Module,
    *,
    core: str,
    halved: Collection[str],
    added: Collection[str] = (),
    stages: Stages | None = None,
) -> InitialWeights:
    """Open `path` and match it with the folded `module`, on meta or not.

    Local; collective over pp where there are stages.

    Args:
        path: A file or folder as `open_tensors` takes it. Its names are those of
            `module.state_dict()`, or those of the core's, which leave its prefix out; then what
            lies beside the core keeps its values.
        module: The LightningModule.
        core: Attribute of the core.
        halved: Names of live [E, 2, F, D] parameters.
        added: Names that the file may lack, since the user's model does; they keep their values.
        stages: This rank's place among pipeline stages; None where the model is not cut.

    Raises:
        ValueError: Names, shapes or kinds of dtype do not fit, or the file is damaged; on every
            rank.
    """
    own = _names_of(module, halved, added)
    known = own if stages is None else _joined(stages, own)
    file = open_initial(path)
    prefix = _prefix(file.entries, known.live, core)
    wanted = {name for name in known.live if name.startswith(prefix)}
    stored = {prefix + name: name for name in file.entries}
    covered = {alias for name in stored for alias in known.tied.get(name, (name,))}
    missing = sorted(wanted - covered - known.added)
    unknown = sorted(stored.keys() - known.live.keys())
    if missing or unknown:
        raise ValueError(_explain_names(path, missing, [stored[name] for name in unknown]))
    for name, source in stored.items():
        _check(file.entries[source], source, known.live[name], halved=name in known.halved)
    sources = {name: source for name, source in stored.items() if name in own.live}
    for name in sorted(covered - stored.keys()):
        # Its other name, which the file has, may be on another stage alone.
        found = next(alias for alias in known.tied[name] if alias in stored)
        if name in own.live and found not in own.live:
            sources[name] = stored[found]
    return InitialWeights(file, sources, frozenset(covered))


def load_initial(weights: InitialWeights, module: nn.Module, *, halved: Collection[str]) -> None:
    """Read this rank's part of every tensor into `module`, cast to its dtypes. Local."""
    live = module.state_dict()
    for name, source in weights.sources.items():
        fill_owned(weights.file, source, live[name], halved=name in halved)


@dataclass(frozen=True)
class _Names:
    """What a model is known by: live tensors, and all names of a tied one by each of them."""

    live: Mapping[str, TensorMeta]
    tied: Mapping[str, Sequence[str]]
    halved: frozenset[str]
    added: frozenset[str]


def _names_of(module: nn.Module, halved: Collection[str], added: Collection[str]) -> _Names:
    live = {
        name: TensorMeta(tuple(value.shape), value.dtype)
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    return _Names(live, _tied_names(module), frozenset(halved), frozenset(added))


def _joined(stages: Stages, own: _Names) -> _Names:
    """The names of all stages, in the order of the whole model. Collective over pp."""
    each = stages.gather(lambda: own, what="asking the stages for their names")
    live = {name: meta for names in each for name, meta in names.live.items()}
    order = stages.whole.in_order([list(names.live) for names in each])
    return _Names(
        live={name: live[name] for name in order},
        tied=_joined_ties([names.tied for names in each]),
        halved=frozenset().union(*(names.halved for names in each)),
        added=frozenset().union(*(names.added for names in each)),
    )


def _joined_ties(stages: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    joined: dict[str, list[str]] = {}
    for tied in stages:
        for name, aliases in tied.items():
            group = joined.setdefault(name, [])
            group.extend(alias for alias in aliases if alias not in group)
    return joined


def _prefix(stored: Iterable[str], live: Collection[str], core: str) -> str:
    """The prefix that the file leaves out; the one that fits more names, none if in doubt."""
    stored = list(stored)
    plain = sum(name in live for name in stored)
    inside = sum(f"{core}.{name}" in live for name in stored)
    return f"{core}." if inside > plain else ""


def _tied_names(module: nn.Module) -> dict[str, list[str]]:
    by_param: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        by_param.setdefault(id(param), []).append(name)
    return {name: names for names in by_param.values() for name in names}


def _check(stored: TensorEntry, name: str, live: TensorMeta, *, halved: bool) -> None:
    shape = live.shape
    if halved and len(shape) == 4:
        shape = (shape[0], shape[1] * shape[2], shape[3])
    if stored.shape not in (shape, live.shape):
        raise ValueError(
            f"{stored.path}: {name} has shape {stored.shape}, the model has {shape}. It belongs to "
            "another model. Change `init_from`."
        )
    floats = stored.dtype.is_floating_point and live.dtype.is_floating_point
    if stored.dtype != live.dtype and not floats:
        raise ValueError(
            f"{stored.path}: {name} is {stored.dtype}, the model has {live.dtype}, and only "
            "floating-point numbers are converted. Change `init_from`."
        )


def _explain_names(path: str, missing: list[str], unknown: list[str]) -> str:
    apart = [found for name in unknown if (found := _PER_EXPERT.search(name))]
    reason = "It belongs to another model."
    if apart:
        reason = (
            f"It stores every expert by itself (`{apart[0][0]}`), as Hugging Face writes models, "
            "and the model in memory stacks them (`experts.gate_up_proj`). Load it with "
            "transformers once and save the model's `state_dict()`."
        )
    return (
        f"{path} does not fit the model: {len(missing)} names are missing{_first(missing)} and "
        f"{len(unknown)} are unknown{_first(unknown)}. {reason} Change `init_from`."
    )


def _first(names: list[str]) -> str:
    return f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
