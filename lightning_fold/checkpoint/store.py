"""Saves and restores one folded model with its optimizers, in either form, under any mapping.

Owns the choice between the sharded folder and the consolidated file, and the saves that run behind
training. The forms themselves are `folder`'s and `consolidated`'s; names and shapes `canonical`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.optim import Optimizer

from lightning_fold.checkpoint import consolidated, files, folder, optimizer_state
from lightning_fold.checkpoint.background import Background
from lightning_fold.checkpoint.canonical import Canonical
from lightning_fold.checkpoint.folder import WEIGHTS, flat, split
from lightning_fold.checkpoint.loading import Loading
from lightning_fold.checkpoint.meta import OWN, primitive
from lightning_fold.checkpoint.peers import Peers
from lightning_fold.checkpoint.survey import merged_meta


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
        self._loading = Loading(canonical, peers)

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
            ValueError: The stages' optimizers cannot be one; on every rank.
        """
        rest = dict(checkpoint)
        names = list(rest["state_dict"])
        weights, extra = split(rest.pop("state_dict"))
        tensors = {f"{WEIGHTS}.{name}": t for name, t in weights.items() if self._writes(name)}
        states: Sequence[optimizer_state.NamedState] = rest.pop("optimizer_states", [])
        for i, state in enumerate(states):
            tensors |= flat(i, {n: v for n, v in state.tensors.items() if self._writes(n)})
        replaced: list[str] = []
        own = {
            **rest.pop(OWN, {}),
            **self._own(self.canonical.halved),
            "optimizers": [state.rest for state in states],
            "extra_state": extra,
        }
        if (stages := self.canonical.stages) is not None:
            own = merged_meta(stages, own, names)
        meta = primitive({**rest, OWN: own}, "", replaced)
        self._write(path, tensors, meta)
        return replaced

    def _write(self, path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        if self._background_peers is not None:
            self._background.wait()
            # What can be told at once is: the thread's errors come with the next save.
            self.peers.on_writer(lambda: files.make_folder(path.parent), what=f"saving {path}")
            tensors = BlockingAsyncStager().stage(tensors)
        stages = self.canonical.stages
        self._run(
            lambda peers: folder.write_folder(
                path,
                tensors=tensors,
                meta=meta,
                peers=peers,
                counts_plain=peers.is_writer if stages is None else stages.reaches_writer,
            )
        )

    def _writes(self, name: str) -> bool:
        """Whether a name is this stage's to write; one that several hold is written once."""
        stages = self.canonical.stages
        return stages is None or stages.writes(name)

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
        """What a consolidated file says beside what a single-device run would write.

        Collective over pp where the model is cut.

        Raises:
            ValueError: An optimizer has parameters without a name, or other groups on every stage.
        """
        known = self.canonical.survey(optimizers)
        names = [groups.names for groups in known.groups]
        return {**self._own(known.halved), "optimizer_names": names}

    def _own(self, halved: Collection[str]) -> dict[str, Any]:
        return {"mapping": self.mapping, "halved": sorted(halved)}

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
            return self._loading.from_folder(path, optimizers, strict=strict)
        if not path.is_file():
            raise ValueError(f"{path} {_kind(path)}. Change `ckpt_path`.")
        consolidated.verify_file(path, self.peers)
        return self.load_whole(str(path), consolidated.read_file(path), optimizers, strict=strict)

    def load_whole(
        self,
        path: str,
        checkpoint: dict[str, Any],
        optimizers: Sequence[Optimizer],
        *,
        strict: bool,
    ) -> dict[str, Any]:
        """Fill model and optimizers from whole tensors, of which each rank takes its part.

        Collective over all ranks where the model is cut, else local.

        Args:
            path: Named in messages.
            checkpoint: Lightning's dictionary, its tensors in memory or `TensorEntry`s.
            optimizers: As `load`.
            strict: As `load`.

        Raises:
            ValueError: As `load`.
        """
        return self._loading.from_whole(path, checkpoint, optimizers, strict=strict)


def _kind(path: Path) -> str:
    if path.is_dir():
        return "is a folder without the files of a sharded checkpoint"
    return "does not exist"
