"""Saves and restores one folded model with its optimizers, in either form, under any mapping.

Owns the choice between the sharded folder and the consolidated file, and the saves that run behind
training. The forms themselves are `folder`'s and `consolidated`'s; names and shapes `canonical`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.optim import Optimizer

from lightning_fold.checkpoint import consolidated, files, folder, optimizer_state
from lightning_fold.checkpoint.background import Background
from lightning_fold.checkpoint.canonical import Canonical
from lightning_fold.checkpoint.meta import OWN, primitive
from lightning_fold.checkpoint.peers import Peers
from lightning_fold.checkpoint.safe_reader import read_index, tensors_of
from lightning_fold.checkpoint.tensor_entry import TensorEntry

WEIGHTS, OPTIMIZERS = "state_dict", "optimizers"


class CheckpointStore:
    """Checkpoints of one model.

    Args:
        canonical: The model, and the way to the user's names and shapes.
        mapping: Mapping id, noted in what is written.
        peers: All ranks.
        background_peers: All ranks in a group of its own, for saves behind training; None saves
            while training waits.
    """

    def __init__(
        self, canonical: Canonical, *, mapping: str, peers: Peers, background_peers: Peers | None
    ) -> None:
        self.canonical = canonical
        self.mapping = mapping
        self.peers = peers
        self._background_peers = background_peers
        self._background = Background()

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.canonical.module

    # Saving.

    def save_folder(self, path: Path, checkpoint: dict[str, Any]) -> list[str]:
        """Write a sharded folder. Collective over all ranks.

        Args:
            path: Equal on all ranks.
            checkpoint: Lightning's dictionary with the live `state_dict`, and `NamedState`s under
                `optimizer_states`.

        Returns:
            Entries that were stored as text, being no primitives.

        Raises:
            CheckpointError: It, or the save behind training before it, could not be written.
        """
        rest = dict(checkpoint)
        weights, extra = _split(rest.pop("state_dict"))
        tensors = {f"{WEIGHTS}.{name}": tensor for name, tensor in weights.items()}
        states: Sequence[optimizer_state.NamedState] = rest.pop("optimizer_states", [])
        for i, state in enumerate(states):
            tensors |= _flat(i, state.tensors)
        replaced: list[str] = []
        own = {
            **rest.pop(OWN, {}),
            **self._own(),
            "optimizers": [state.rest for state in states],
            "extra_state": extra,
        }
        meta = primitive({**rest, OWN: own}, "", replaced)
        self._write(path, tensors, meta)
        return replaced

    def _write(self, path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        if self._background_peers is not None:
            self._background.wait()
            # What can be told at once is: the thread's errors come with the next save.
            self.peers.on_writer(lambda: files.make_folder(path.parent), what=f"saving {path}")
            tensors = BlockingAsyncStager().stage(tensors)
        self._run(lambda peers: folder.write_folder(path, tensors=tensors, meta=meta, peers=peers))

    def _run(self, save: Callable[[Peers], None]) -> None:
        """Save now, or behind training, with the ranks that do."""
        peers = self._background_peers
        if peers is None:
            save(self.peers)
        else:
            self._background.start(lambda: save(peers))

    def save_file(self, path: Path, checkpoint: dict[str, Any]) -> list[str]:
        """Write a consolidated file. Collective over all ranks.

        Args:
            path: Equal on all ranks.
            checkpoint: Lightning's dictionary, whole on the writing rank.

        Returns:
            As `save_folder`.

        Raises:
            CheckpointError: It could not be written.
        """
        replaced: list[str] = []
        whole = primitive(checkpoint, "", replaced)

        def save(peers: Peers) -> None:
            peers.on_writer(lambda: consolidated.write_file(path, whole), what=f"saving {path}")

        self._run(save)
        return replaced

    def own_entries(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """What a consolidated file says beside what a single-device run would write."""
        names = [optimizer_state.names_of(self.module, optimizer) for optimizer in optimizers]
        return {**self._own(), "optimizer_names": names}

    def _own(self) -> dict[str, Any]:
        return {"mapping": self.mapping, "halved": sorted(self.canonical.halved)}

    def remove(self, path: Path) -> None:
        """Delete a checkpoint once no newer one is still being written. Every rank may call it."""
        if self.peers.is_writer:
            self._background.remove_after(path)

    def finish(self) -> None:
        """Wait for a save behind training.

        Raises:
            CheckpointError: It could not be written.
        """
        self._background.wait()

    # Loading.

    def load(self, path: Path, optimizers: Sequence[Optimizer], *, strict: bool) -> dict[str, Any]:
        """Fill model and optimizers from either form; return the rest. Collective over all ranks.

        Args:
            path: Equal on all ranks.
            optimizers: To be filled; empty outside of fitting.
            strict: Whether names must match.

        Raises:
            ValueError: It is damaged, or another model or other optimizers wrote it. Where names,
                shapes or dtypes tell, nothing has been changed then.
        """
        self.finish()
        self.peers.on_writer(lambda: files.recover(path), what=f"reading {path}")
        if folder.looks_sharded(path):
            return self._load_folder(path, optimizers, strict=strict)
        if not path.is_file():
            raise ValueError(f"{path} {_kind(path)}. Change `ckpt_path`.")
        consolidated.verify_file(path, self.peers)
        return self.load_whole(str(path), consolidated.read_file(path), optimizers, strict=strict)

    def _load_folder(
        self, path: Path, optimizers: Sequence[Optimizer], *, strict: bool
    ) -> dict[str, Any]:
        meta = folder.verify_folder(path, self.peers)
        own = meta.pop(OWN, {})
        index = read_index(path)
        saved = _by_prefix(tensors_of(index))
        live, _ = _split(self.module.state_dict())
        stored = saved.get(WEIGHTS, {})
        shapes = {name: (tuple(m.size), m.properties.dtype) for name, m in stored.items()}
        self.canonical.check(path, shapes, live=live, strict=strict)
        tensors = {f"{WEIGHTS}.{name}": t for name, t in live.items() if name in stored}
        states = self._empty_states(path, optimizers, own.get("optimizers", []), saved)
        for i, state in enumerate(states):
            tensors |= _flat(i, state)
        folder.read_tensors(path, tensors, self.peers, index=index)
        self.canonical.set_extra_state(own.get("extra_state", {}))
        for optimizer, state, rest in zip(
            optimizers, states, own.get("optimizers", []), strict=False
        ):
            optimizer_state.fill(self.module, optimizer, tensors=state, rest=rest)
        return meta

    def _empty_states(
        self,
        path: Path,
        optimizers: Sequence[Optimizer],
        rests: Sequence[Mapping[str, Any]],
        saved: Mapping[str, Mapping[str, Any]],
    ) -> list[dict[str, dict[str, Tensor]]]:
        """Tensors to read the states of `optimizers` into, after all checks."""
        check_count(path, saved=len(rests), wanted=len(optimizers))
        states = []
        for i, optimizer in enumerate(optimizers):
            groups = optimizer_state.names_of(self.module, optimizer)
            optimizer_state.check_groups(groups, [g["params"] for g in rests[i]["param_groups"]])
            by_param: dict[str, dict[str, Any]] = {}
            for name, stored in saved.get(f"{OPTIMIZERS}.{i}", {}).items():
                param, _, key = name.rpartition(".")
                by_param.setdefault(param, {})[key] = stored
            states.append(optimizer_state.empty_state(self.module, optimizer, by_param))
        return states

    def load_whole(
        self,
        path: str,
        checkpoint: dict[str, Any],
        optimizers: Sequence[Optimizer],
        *,
        strict: bool,
    ) -> dict[str, Any]:
        """Fill model and optimizers from whole tensors, of which each rank takes its part. Local.

        Args:
            path: Named in messages.
            checkpoint: Lightning's dictionary, its tensors in memory or `TensorEntry`s.
            optimizers: As `load`.
            strict: As `load`.

        Raises:
            ValueError: As `load`.
        """
        own = checkpoint.pop(OWN, {})
        state, extra = _split(checkpoint["state_dict"])
        live, _ = _split(self.module.state_dict())
        shapes = {name: (self.canonical.live_shape(name, t), t.dtype) for name, t in state.items()}
        self.canonical.check(path, shapes, live=live, strict=strict)
        states = checkpoint.get("optimizer_states", [])
        check_count(path, saved=len(states), wanted=len(optimizers))
        names = own.get("optimizer_names", [None] * len(states))
        for optimizer, saved_names in zip(optimizers, names, strict=False):
            if saved_names is not None:
                groups = optimizer_state.names_of(self.module, optimizer)
                optimizer_state.check_groups(groups, saved_names)
        self.canonical.load_model(state, live=live)
        self.canonical.set_extra_state(extra)
        for optimizer, saved, saved_names in zip(optimizers, states, names, strict=False):
            self.canonical.load_optimizer(optimizer, saved, names=saved_names)
        return checkpoint


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


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors, stored ones too, and what modules add by `get_extra_state`."""
    kinds = (Tensor, TensorEntry)
    tensors = {name: value for name, value in state.items() if isinstance(value, kinds)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def _flat(optimizer: int, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{OPTIMIZERS}.{optimizer}.{name}.{key}": value
        for name, values in state.items()
        for key, value in values.items()
    }


def _by_prefix(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Index entries by what they belong to: the weights, or one optimizer."""
    sorted_out: dict[str, dict[str, Any]] = {}
    for name, entry in stored.items():
        parts = name.split(".", 2)
        depth = 2 if parts[0] == OPTIMIZERS else 1
        owner, rest = ".".join(parts[:depth]), name.split(".", depth)[-1]
        sorted_out.setdefault(owner, {})[rest] = entry
    return sorted_out


def _kind(path: Path) -> str:
    if path.is_dir():
        return "is a folder without the files of a sharded checkpoint"
    return "does not exist"
