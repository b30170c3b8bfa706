"""What ranks read together: peers of one dp rank the same batches, all ranks as many.

Owns the comparison of every loader's first batch over the ranks that compute one sample together
(tp, cp and pp peers), one gather a loader and none without such peers; and, for iterable datasets,
the notes in the job's store by which a rank whose data ends learns that another goes on. No batch
waits for another rank. Not here: the order of samples (`sampling`).
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_fold.faults.board import Store, connect
from lightning_fold.topology.meshes import Meshes

if TYPE_CHECKING:
    from lightning_fold.ranks import MeshStrategy

SHOWN_DIGITS = 8
# How long a rank at its end waits to hear of the others; after that it goes on unknowing.
PATIENCE_S = 30.0
POLL_S = 0.02


class FirstBatches:
    """Compares the first batch of each loader, once."""

    def __init__(self) -> None:
        self._compared: set[tuple[str, int]] = set()

    def expect(self, trainer: Trainer) -> None:
        """Await new loaders of the Trainer's present stage."""
        self._compared = {key for key in self._compared if key[0] != str(trainer.state.stage)}

    def compare(self, batch: object, *, trainer: Trainer, index: int, meshes: Meshes) -> None:
        """Refuse a loader whose first batch differs between peers. Collective over all ranks, once.

        Args:
            batch: As the loader gave it.
            trainer: Says which stage it is of.
            index: Of the loader within the stage.
            meshes: Say which ranks are peers.

        Raises:
            ValueError: On all ranks; names the ranks that differ and what each of them read.
        """
        key = (str(trainer.state.stage), index)
        if key in self._compared or meshes.size("dp") == dist.get_world_size():
            return
        self._compared.add(key)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (meshes.rank("dp"), digest(batch)))
        stage = trainer.state.stage
        name = f"{stage.dataloader_prefix if stage else 'the'}_dataloader"
        if message := explain_difference(found, loader=f"{name}, loader {index}"):
            raise ValueError(message)


class Ends:
    """Lets the ranks tell each other how far they have read a loader that has no length."""

    def __init__(self) -> None:
        self._notes: _Notes | None = None
        self._loaders = 0

    def watch(self, loader: object, strategy: MeshStrategy) -> None:
        """Refuse, at its end, an iterable dataset that ends sooner than on other ranks.

        Every rank takes part in every step, so the others would wait for ever. Collective over all
        ranks when the first such loader comes.
        """
        environment = strategy.cluster_environment
        if strategy.world_size == 1 or environment is None or not _is_endless(loader):
            return
        if self._notes is None:
            run = strategy.broadcast(uuid.uuid4().hex)
            store = connect(environment.main_address, environment.main_port)
            self._notes = _Notes(store, run, rank=strategy.global_rank, world=strategy.world_size)
        self._loaders += 1
        _note_batches(loader, self._notes, f"loader{self._loaders}")


def digest(batch: object) -> str:
    """Return a hash of a batch's tensors: their shapes, types and values, in order."""
    state = hashlib.sha256()

    def add(tensor: Tensor) -> Tensor:
        state.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.layout == torch.strided:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            state.update(flat.view(torch.uint8).numpy().tobytes())
        return tensor

    apply_to_collection(batch, Tensor, add)
    return state.hexdigest()


def explain_difference(found: Sequence[tuple[int, str]], *, loader: str) -> str:
    """Return what is wrong with the first batches of all ranks, "" if nothing is.

    Args:
        found: (dp rank, digest) of each rank.
        loader: What the batches are from.
    """
    for dp_rank in sorted({dp_rank for dp_rank, _ in found}):
        ranks = {rank: text for rank, (of, text) in enumerate(found) if of == dp_rank}
        if len(set(ranks.values())) > 1:
            return _difference(ranks, dp_rank, loader, dp=len({of for of, _ in found}))
    return ""


def _difference(ranks: Mapping[int, str], dp_rank: int, loader: str, *, dp: int) -> str:
    read = ", ".join(f"rank {rank}: {text[:SHOWN_DIGITS]}" for rank, text in ranks.items())
    numbers = ", ".join(map(str, ranks))
    return (
        f"Ranks {numbers} are one data-parallel rank ({dp_rank} of dp={dp}) and must read the same "
        f"samples, but the first batch of {loader} differs between them (hashes: {read}), and "
        "what they compute together would be wrong without an error. Divide the data by "
        "trainer.strategy.distributed_sampler_kwargs, {num_replicas: dp, rank: dp rank}, not by "
        "rank and world size, and draw random numbers from a seed of the dp rank. "
        f"Change `{loader.partition(',')[0]}`."
    )


class _Notes:
    """How many batches each rank has begun, and whether it has come to its end."""

    def __init__(self, store: Store, run: str, *, rank: int, world: int) -> None:
        self._store, self._run, self.rank, self.world = store, run, rank, world

    def write(self, name: str, batches: int, *, ended: bool = False) -> None:
        self._store.set(f"{self._run}/{name}/{self.rank}", f"{batches} {int(ended)}")

    def read(self, name: str, rank: int) -> tuple[int, bool]:
        key = f"{self._run}/{name}/{rank}"
        if not self._store.check([key]):
            return 0, False
        batches, ended = self._store.get(key).split()
        return int(batches), ended == b"1"

    def check_end(self, name: str, batches: int) -> None:
        """Wait until no other rank can go on; raise when one does."""
        deadline = time.monotonic() + PATIENCE_S
        others = [rank for rank in range(self.world) if rank != self.rank]
        while others and time.monotonic() < deadline:
            for rank in others:
                begun, _ = self.read(name, rank)
                if begun > batches:
                    raise ValueError(_explain_end(self.rank, batches, rank, begun))
            others = [rank for rank in others if not self.read(name, rank)[1]]
            time.sleep(POLL_S if others else 0.0)


def _note_batches(loader: object, notes: _Notes, name: str) -> None:
    """Have a loader note its batches as they are read; it stays of its class."""
    kind: Any = type(loader)
    rounds = count(1)

    def noted(self: object) -> Iterator[Any]:
        return _noted(kind.__iter__(self), notes, f"{name}.{next(rounds)}")

    # iter() asks the class and not the object; Lightning asks whether it is a DataLoader.
    loader.__class__ = type(kind.__name__, (kind,), {"__iter__": noted})


def _noted(batches: Iterable[Any], notes: _Notes, name: str) -> Iterator[Any]:
    begun = 0
    for begun, batch in enumerate(batches, 1):
        notes.write(name, begun)
        yield batch
    notes.write(name, begun, ended=True)
    notes.check_end(name, begun)


def _is_endless(loader: object) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _explain_end(rank: int, batches: int, other: int, begun: int) -> str:
    return (
        f"The data ends unevenly: rank {rank} has no batch after {batches}, and rank {other} has "
        f"begun batch {begun}. Every rank takes part in every step, so it would wait for ever. Let "
        "the IterableDataset yield equally many batches on each data-parallel rank, or stop all of "
        f"them at {batches}. Change `limit_train_batches` (`limit_val_batches`, ...)."
    )
