"""Fills a model and its optimizers from either form, each rank what it holds.

Everything is checked before anything is changed. Where pipeline stages divide the model, the checks
compare with what all of them hold, and what only one of them can find is agreed upon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fold.checkpoint import folder, optimizer_state
from lightning_fold.checkpoint.canonical import Canonical
from lightning_fold.checkpoint.folder import OPTIMIZERS, WEIGHTS, flat, split
from lightning_fold.checkpoint.meta import OWN
from lightning_fold.checkpoint.peers import Peers
from lightning_fold.checkpoint.safe_reader import read_index, tensors_of
from lightning_fold.checkpoint.stage_groups import MergedGroups
from lightning_fold.checkpoint.survey import Survey

Names = list[list[str]] | None
"""Parameters of an optimizer's groups by name, where they are known."""


class Loading:
    """One model that is filled.

    Args:
        canonical: The model.
        peers: All ranks.
    """

    def __init__(self, canonical: Canonical, peers: Peers) -> None:
        self.canonical = canonical
        self.module = canonical.module
        self.peers = peers

    def from_folder(
        self, path: Path, optimizers: Sequence[Optimizer], *, strict: bool
    ) -> dict[str, Any]:
        """Fill from a sharded folder; return its meta. Collective over all ranks.

        Arguments and errors are those of `CheckpointStore.load`.
        """
        meta = folder.verify_folder(path, self.peers)
        own = meta.pop(OWN, {})
        index = read_index(path)
        saved = _by_prefix(tensors_of(index))
        known = self.canonical.survey(optimizers)
        live, _ = split(self.module.state_dict())
        stored = saved.get(WEIGHTS, {})
        shapes = {name: (tuple(m.size), m.properties.dtype) for name, m in stored.items()}
        extra, rests = own.get("extra_state", {}), own.get("optimizers", [])

        def check() -> list[dict[str, dict[str, Tensor]]]:
            self.canonical.check(path, shapes, live=known.tensors, strict=strict)
            _check_extra(path, extra, known, strict=strict)
            return self._empty_states(path, optimizers, rests, saved=saved, known=known)

        states = self._agreed(check, what=f"reading {path}")
        tensors = {f"{WEIGHTS}.{name}": t for name, t in live.items() if name in stored}
        for i, state in enumerate(states):
            tensors |= flat(i, state)
        folder.read_tensors(path, tensors, self.peers, index=index)

        def fill() -> None:
            self.canonical.set_extra_state(extra)
            for optimizer, state, rest in zip(optimizers, states, rests, strict=False):
                optimizer_state.fill(self.module, optimizer, tensors=state, rest=rest)

        self._agreed(fill, what=f"reading {path}")
        return meta

    def from_whole(
        self,
        path: str,
        checkpoint: dict[str, Any],
        optimizers: Sequence[Optimizer],
        *,
        strict: bool,
    ) -> dict[str, Any]:
        """Fill from whole tensors; see `CheckpointStore.load_whole`."""
        own = checkpoint.pop(OWN, {})
        state, extra = split(checkpoint["state_dict"])
        states = checkpoint.get("optimizer_states", [])
        known = self.canonical.survey(optimizers)
        live_shape = self.canonical.live_shape
        shapes = {n: (live_shape(n, t, halved=known.halved), t.dtype) for n, t in state.items()}

        def check() -> list[Names]:
            self.canonical.check(path, shapes, live=known.tensors, strict=strict)
            _check_extra(path, extra, known, strict=strict)
            check_count(path, saved=len(states), wanted=len(optimizers))
            return self._names(path, states, own.get("optimizer_names"), known)

        names = self._agreed(check, what=f"reading {path}")

        def fill() -> None:
            live, _ = split(self.module.state_dict())
            self.canonical.load_model(state, live=live)
            self.canonical.set_extra_state(extra)
            for optimizer, saved, saved_names in zip(optimizers, states, names, strict=False):
                self.canonical.load_optimizer(optimizer, saved, names=saved_names)

        self._agreed(fill, what=f"reading {path}")
        return checkpoint

    def _agreed(self, action: Callable[[], Any], *, what: str) -> Any:
        """The result of what every rank does alike, unless stages hold different things."""
        if self.canonical.stages is None:
            return action()
        results = []

        def run() -> None:
            results.append(action())

        self.peers.all_or_none(run, what=what)
        return results[0]

    def _empty_states(
        self,
        path: Path,
        optimizers: Sequence[Optimizer],
        rests: Sequence[Mapping[str, Any]],
        *,
        saved: Mapping[str, Mapping[str, Any]],
        known: Survey,
    ) -> list[dict[str, dict[str, Tensor]]]:
        """Tensors to read the states of `optimizers` into, after all checks."""
        check_count(path, saved=len(rests), wanted=len(optimizers))
        states = []
        for i, optimizer in enumerate(optimizers):
            groups = [group["params"] for group in rests[i]["param_groups"]]
            optimizer_state.check_groups(known.groups[i].names, groups)
            by_param: dict[str, dict[str, Any]] = {}
            for name, stored in saved.get(f"{OPTIMIZERS}.{i}", {}).items():
                param, _, key = name.rpartition(".")
                by_param.setdefault(param, {})[key] = stored
            states.append(optimizer_state.empty_state(self.module, optimizer, by_param))
        return states

    def _names(
        self,
        path: str,
        states: Sequence[Mapping[str, Any]],
        saved: Sequence[list[list[str]]] | None,
        known: Survey,
    ) -> list[Names]:
        """Names of the saved groups' parameters, after all checks."""
        if saved is not None:
            for groups, names in zip(known.groups, saved, strict=False):
                optimizer_state.check_groups(groups.names, names)
            return list(saved)
        if self.canonical.stages is None:
            return [None] * len(states)
        pairs = zip(known.groups, states, strict=False)
        return [_numbered(path, groups, state) for groups, state in pairs]


def check_count(path: Path | str, *, saved: int, wanted: int) -> None:
    """Refuse to resume optimizers from a checkpoint that does not hold their states.

    Raises:
        ValueError: The counts differ.
    """
    if wanted and saved == 0:
        raise ValueError(
            f"{path} holds no optimizer state, as ModelCheckpoint(save_weights_only=True) writes "
            "it, so training cannot resume from it. Read the weights by `init_from` instead."
        )
    if wanted and saved != wanted:
        raise ValueError(
            f"{path} holds the states of {saved} optimizers, configure_optimizers gives {wanted}. "
            "Build the same optimizers."
        )


def _check_extra(
    path: Path | str, extra: Mapping[str, Any], known: Survey, *, strict: bool
) -> None:
    unknown = sorted(extra.keys() - known.extra)
    if strict and unknown:
        raise ValueError(
            f"{path} does not fit the model: no module has the extra state {unknown[0]}. Another "
            "model wrote it. Change `ckpt_path`."
        )


def _numbered(path: str, groups: MergedGroups, state: Mapping[str, Any]) -> list[list[str]]:
    """Names of the parameters that a file only numbers: those of one process with these groups."""
    saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(names) for names in groups.names]
    if saved != own:
        raise ValueError(
            f"{path} has an optimizer with {saved} parameters in its groups, this one has {own} on "
            "all stages together. Build the same groups in configure_optimizers."
        )
    if not groups.in_order:
        raise ValueError(
            f"{path} numbers the parameters of an optimizer and does not name them, and on "
            "pipeline stages their numbers are known only where every group lists them in the "
            "order of self.parameters(). Build the groups in that order in configure_optimizers, "
            "or resume with `pipeline_parallel_size=1` once and save."
        )
    return groups.names


def _by_prefix(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Index entries by what they belong to: the weights, or one optimizer."""
    sorted_out: dict[str, dict[str, Any]] = {}
    for name, entry in stored.items():
        parts = name.split(".", 2)
        depth = 2 if parts[0] == OPTIMIZERS else 1
        owner, rest = ".".join(parts[:depth]), name.split(".", depth)[-1]
        sorted_out.setdefault(owner, {})[rest] = entry
    return sorted_out
