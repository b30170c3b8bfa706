"""Watch training for what a normal-looking loss hides: copies that differ, sums that miss a part.

In a step that is checked four things must hold, each over the ranks that it concerns:

    copies      a parameter that ranks compute with together is the same on them, bit for bit
    sums        what the ranks have computed of a gradient adds up to what the optimizer sees, and
                shards that several ranks hold got the same gradient, bit for bit
    experts     every expert parameter has a gradient, also where no token came
    tokens      each MoE layer has seen every token of the batch once

The check reads each parameter and each gradient once, sends a few numbers a parameter, and makes
one copy to the host. It changes nothing. Lightning is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_fold.params.families import Family
from lightning_fold.params.shard import mesh_axis
from lightning_fold.params.storage import local_tensor
from lightning_fold.topology.comm import Comm

# Shapes.  P parameters   n ranks of an axis

TOLERANCE = 1e-3
"""Largest missing part of a sum over its norm: rounding leaves 1e-6, a lost rank about 1."""

_VIEW_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Watched:
    """One parameter.

    Attributes:
        name: Its qualified name.
        family: Its family.
        owner: Module that holds it.
        attribute: Its name there.
        axis: The axis over whose ranks it is gathered for a forward.
        comm: Collectives over the axes of its layer.
    """

    name: str
    family: Family
    owner: nn.Module
    attribute: str
    axis: str
    comm: Comm

    @property
    def current(self) -> nn.Parameter:
        """The parameter as the owner has it: gathered inside a forward, else a shard."""
        param: nn.Parameter = getattr(self.owner, self.attribute)
        return param


@dataclass
class _Window:
    """What has been seen since the check of one step began."""

    step: int
    prints: dict[str, Tensor] = field(default_factory=dict)
    computed: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    expected: int = 0
    hooks: list[RemovableHandle] = field(default_factory=list)


class Sentinel:
    """Checks the first step of a run and then one step in `every`.

    Attributes:
        seconds: Host time spent in checks so far.
        checked: Number of checks so far.

    Args:
        watched: All parameters that have a gradient, in the same order on every rank.
        comm: Collectives.
        every: Steps from one check to the next.
    """

    def __init__(self, watched: Sequence[Watched], *, comm: Comm, every: int) -> None:
        self.watched = tuple(watched)
        self.comm = comm
        self.every = every
        self.seconds = 0.0
        self.checked = 0
        self._last: int | None = None
        self._window: _Window | None = None

    @property
    def watching(self) -> bool:
        """Whether this step is being checked."""
        return self._window is not None

    def begin(self, step: int) -> None:
        """Start a check if one is due; ranks agree, since they count the same steps.

        Args:
            step: Optimizer steps made so far.
        """
        due = self._last is None or step - self._last >= self.every
        if self._window is not None or not due:
            return
        start = time.perf_counter()
        self._last, self._window = step, _Window(step)
        self._spent(start)

    def before_backward(self) -> None:
        """Note gradients that are there already; those of the step before are gone by now."""
        if self._window is not None and not self._window.before:
            start = time.perf_counter()
            self._window.before = {w.name: _sums(_gradient(w)) for w in self.watched}
            self._spent(start)

    def saw_batch(self, num_tokens: int) -> None:
        """Note the tokens of a batch; the same call on every rank that reads the batch."""
        owner = self.comm.rank("tp") == 0 and self.comm.rank("cp") == 0
        if self._window is not None and owner:
            self._window.expected += num_tokens

    def saw_layer(self, name: str, num_tokens: int) -> None:
        """Note the tokens that a MoE layer has got on this rank."""
        if self._window is not None:
            self._window.tokens[name] = self._window.tokens.get(name, 0) + num_tokens

    def saw_parameters(self, used: Iterable[Watched]) -> None:
        """Note the gathered parameters of a forward, and listen for their gradients."""
        if self._window is None:
            return
        start = time.perf_counter()
        for w in used:
            self._window.prints[w.name] = fingerprint(w.current)
            if w.current.requires_grad and w.name not in self._window.computed:
                self._listen(self._window, w)
        self._spent(start)

    def finish(self) -> None:
        """Compare, once the gradients of the step are reduced. Collective over the stage.

        Raises:
            RuntimeError: Something does not hold; names parameter, family, ranks and step.
        """
        window, self._window = self._window, None
        if window is None:
            return
        start = time.perf_counter()
        for hook in window.hooks:
            hook.remove()
        checks = (
            self._missing(window),
            self._copies(window),
            self._shards(),
            self._sums(window),
            self._tokens(window),
        )
        # What comes first explains what comes after it.
        first = self._first([(i, text) for i, check in enumerate(checks) for text in check])
        self.checked += 1
        self._spent(start)
        if first:
            raise RuntimeError(f"sentinel, step {window.step}: {first}")

    def _first(self, faults: Sequence[tuple[int, str]]) -> str:
        """The first fault of all ranks: all of them raise alike."""
        group = self.comm.meshes.group("stage")
        count = self.comm.all_reduce(torch.tensor([len(faults)]).to(self._device), axis="stage")
        everyone: list[Sequence[tuple[int, str]]] = [faults]
        if int(count) and self.comm.size("stage") > 1:
            everyone = [[]] * self.comm.size("stage")
            torch.distributed.all_gather_object(everyone, list(faults), group=group)
        found = [fault for ranks in everyone for fault in ranks]
        return min(found, key=lambda fault: fault[0])[1] if found else ""

    def _listen(self, window: _Window, w: Watched) -> None:
        window.computed[w.name] = torch.zeros(2, dtype=torch.float64)

        def add(grad: Tensor) -> None:
            start = time.perf_counter()
            window.computed[w.name] = window.computed[w.name].to(grad.device) + _sums(grad)
            self._spent(start)

        window.hooks.append(w.current.register_hook(add))

    def _spent(self, start: float) -> None:
        self.seconds += time.perf_counter() - start

    # The four checks.

    def _missing(self, window: _Window) -> Iterator[str]:
        for w in self.watched:
            is_used = w.name in window.prints and w.current.requires_grad
            if w.family is Family.EXPERT and is_used and _gradient(w) is None:
                yield (
                    f"{w.name} ({w.family.value}) has no gradient on rank "
                    f"{torch.distributed.get_rank()} of {_ranks(self.comm, 'stage')} (stage). Its "
                    "optimizer state would part from its peers'. Something leaves the experts "
                    "out of the graph where no token came"
                )

    def _copies(self, window: _Window) -> Iterator[str]:
        seen = [w for w in self.watched if w.name in window.prints]
        for axis, comm in dict.fromkeys((w.axis, w.comm) for w in seen):
            group = [w for w in seen if (w.axis, w.comm) == (axis, comm)]
            prints = torch.stack([window.prints[w.name] for w in group])
            for w, odd in _differing(group, prints, axis):
                yield (
                    f"the copies of {w.name} ({w.family.value}) that ranks compute with differ: "
                    f"{odd}. Something has written to one copy, or gathered another one"
                )

    def _shards(self) -> Iterator[str]:
        """Values and gradients of what several ranks hold although the table shards it."""
        copies = [(axis, w.comm) for w in self.watched for axis in copied_over(w)]
        for axis, comm in dict.fromkeys(copies):
            group = [w for w in self.watched if w.comm is comm and axis in copied_over(w)]
            for what, tensors in (
                ("gradient", [_gradient(w) for w in group]),
                ("value", [w.current for w in group]),
            ):
                prints = torch.stack([fingerprint(t) for t in tensors])
                for w, odd in _differing(group, prints, axis):
                    yield (
                        f"the {what} of {w.name} ({w.family.value}) should be equal on all ranks "
                        f"of {axis} after the reduction: {odd}. It is not summed over {axis}"
                    )

    def _sums(self, window: _Window) -> Iterator[str]:
        seen = [w for w in self.watched if w.name in window.computed]
        if not seen:
            return
        reduced = torch.stack([_sums(_gradient(w))[0] - window.before[w.name][0] for w in seen])
        computed = torch.stack([window.computed[w.name].to(reduced.device) for w in seen])
        total = torch.cat([reduced[:, None], computed], dim=1)
        rows = self.comm.all_reduce(total, axis="stage").cpu().tolist()
        for w, (actual, wanted, square) in zip(seen, rows, strict=True):
            # NaN compares false: a gradient that is not finite is no matter of sums.
            if abs(actual - wanted) > TOLERANCE * square**0.5:
                yield (
                    f"the gradient of {w.name} ({w.family.value}) is not the sum of what the ranks "
                    f"computed: its elements add up to {actual:.6g} instead of {wanted:.6g}, ratio "
                    f"{actual / wanted if wanted else float('inf'):.4g}, on the ranks "
                    f"{_ranks(self.comm, 'stage')} (stage). A reduction over {w.axis} is "
                    "missing, doubled or divided"
                )

    def _tokens(self, window: _Window) -> Iterator[str]:
        names = list(window.tokens)
        own = torch.tensor([window.expected, *(window.tokens[name] for name in names)])
        expected, *counts = self.comm.all_reduce(own.to(self._device), axis="stage").tolist()
        for name, count in zip(names, counts, strict=True):
            if expected and count != expected:
                yield (
                    f"the MoE layer {name} (expert) has got {count} tokens of the ranks "
                    f"{_ranks(self.comm, 'stage')}, and their batches hold {expected}: tokens are "
                    "lost or counted twice between the batch and the layer"
                )

    @property
    def _device(self) -> str:
        return self.comm.meshes.stage.device_type


def fingerprint(tensor: Tensor | None) -> Tensor:
    """An int64 scalar that changes with any bit of the local part and with the order of its rows.

    Zero for an empty part, and for None.
    """
    if tensor is None:
        return torch.zeros((), dtype=torch.int64)
    local = local_tensor(tensor.detach()).contiguous()
    if local.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=local.device)
    bits = local.view(_VIEW_OF_SIZE[local.element_size()]) if local.dim() else local[None]
    rows = bits.reshape(bits.shape[0], -1).sum(1, dtype=torch.int64)
    places = torch.arange(1, rows.shape[0] + 1, device=rows.device)
    return (rows * places).sum()


def copied_over(w: Watched) -> list[str]:
    """Axes of more than one rank whose ranks hold the same shard of a parameter.

    There are none as long as the table of `params.families` and the storage agree.
    """
    # By group, not by name: axes with equal ranks share one, and a mesh bears one of their names.
    comm, covered = w.comm, _groups_of_shards(w.current)
    if comm.meshes.group("stage") in covered:
        return []
    axes = ("etp", "ep", "edp") if w.family is Family.EXPERT else ("tp", "dp_cp")
    return [a for a in axes if comm.size(a) > 1 and comm.meshes.group(a) not in covered]


def watch_list(
    module: nn.Module,
    *,
    families: Mapping[str, Family],
    comm: Comm,
    layer_comms: Mapping[str, Comm],
) -> list[Watched]:
    """All parameters of a module that is folded and not yet sharded over data.

    Args:
        module: The LightningModule.
        families: Family of every name.
        comm: Collectives.
        layer_comms: Those of experts containers with their own folding, by the container's name.
    """
    found = []
    for name, param in module.named_parameters():
        prefix, _, attribute = name.rpartition(".")
        own = next((c for n, c in layer_comms.items() if name.startswith(f"{n}.")), comm)
        owner, axis = module.get_submodule(prefix), mesh_axis(param, families[name])
        found.append(Watched(name, families[name], owner, attribute, axis, own))
    return found


def _differing(
    group: Sequence[Watched], prints_P: Tensor, axis: str
) -> Iterator[tuple[Watched, str]]:
    """Parameters of one layer's comm whose prints are not the first rank's, and on which ranks."""
    comm = group[0].comm
    size = comm.size(axis)
    if size == 1:
        return
    rows_nP = comm.all_gather_rows(prints_P[None], [1] * size, axis=axis)
    differs_nP = (rows_nP != rows_nP[:1]).cpu()
    ranks = _ranks(comm, axis)
    for i, w in enumerate(group):
        odd = [str(ranks[place]) for place in range(size) if differs_nP[place, i]]
        if odd:
            differ = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {', '.join(odd)} differ"
            yield w, f"{differ} from rank {ranks[0]}, group {ranks} ({axis})"


def _ranks(comm: Comm, axis: str) -> list[int]:
    return torch.distributed.get_process_group_ranks(comm.meshes.group(axis))


def _groups_of_shards(param: Tensor) -> list[Any]:
    if not isinstance(param, DTensor):
        return []
    mesh = param.device_mesh
    # FSDP2's placement left of another shard is no `Shard`; what all ranks hold is `Replicate`.
    return [mesh.get_group(i) for i, p in enumerate(param.placements) if not p.is_replicate()]


def _gradient(w: Watched) -> Tensor | None:
    return w.current.grad


def _sums(grad: Tensor | None) -> Tensor:
    """Sum of the elements and of their squares, fp64 [2]."""
    if grad is None:
        return torch.zeros(2, dtype=torch.float64)
    local = local_tensor(grad)
    total = local.sum(dtype=torch.float64)
    return torch.stack([total, torch.linalg.vector_norm(local, dtype=torch.float64).square()])
