"""torchmetrics under a pipeline: only the last stage updates them, and every rank computes them.

States accumulate per microbatch, which is right by construction of a metric. Two things are not:
the other stages have no states (`mirror_metrics`), and `forward` gives the value of a microbatch
where the user expects that of the batch (`StepMetrics`). Does not sync over dp: the metric does.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric

from lightning_fold.steps.mirror import Mirror, Spec


@dataclass(frozen=True)
class _Note:
    """One metric of the source, without its tensors.

    Attributes:
        name: Its name in the module.
        plain: Its numbers and words, such as the count of updates.
        states: Of each state one spec, or of a list state one for every element.
    """

    name: str
    plain: dict[str, Any]
    states: dict[str, Spec | list[Spec]]

    @property
    def specs(self) -> list[Spec]:
        return [
            spec
            for state in self.states.values()
            for spec in (state if isinstance(state, list) else [state])
        ]


def mirror_metrics(module: nn.Module, *, group: ProcessGroup | None, source: int) -> None:
    """Give every rank of a pipeline the last stage's states of all metrics in `module`.

    Collective over `group`. To be called before anyone computes: at the end of an epoch. Metrics
    of layers that the last stage does not hold keep their states.

    Args:
        module: The LightningModule; its metrics have the same names on all ranks.
        group: Ranks of the pipeline; None for one rank.
        source: Group rank of the last stage.
    """
    device: Any = module.device
    mirror = Mirror(group, source, device)
    named = {name: m for name, m in module.named_modules() if isinstance(m, Metric)}
    own = [_note(name, m) for name, m in named.items()] if mirror.is_source else None
    notes = mirror.objects(own)
    states = [t for m in named.values() for t in _tensors(m)] if mirror.is_source else None
    received = iter(mirror.tensors([spec for note in notes for spec in note.specs], states))
    for note in notes:
        tensors = [next(received) for _ in note.specs]
        # Also on the source: with a cached value its dp peers would not meet for a new one.
        if note.name in named:
            named[note.name]._computed = None
            if not mirror.is_source:
                _apply(note, named[note.name], tensors)


@contextmanager
def unchanged(module: nn.Module) -> Generator[None, None, None]:
    """Undo what happens inside to the metrics of `module`: a call that does not count."""
    kept = [
        (metric, metric._update_count, _copies(metric))
        for metric in module.modules()
        if isinstance(metric, Metric)
    ]
    try:
        yield
    finally:
        for metric, count, states in kept:
            if metric._update_count != count:
                metric._update_count, metric._computed = count, None
                for key, state in states.items():
                    setattr(metric, key, state)


def _copies(metric: Metric) -> dict[str, Any]:
    # Updates change tensors in place and append to lists.
    return {
        key: list(state) if isinstance(state, list) else state.clone()
        for key, state in metric.metric_state.items()
    }


def _note(name: str, metric: Metric) -> _Note:
    plain = {
        key: value
        for key, value in vars(metric).items()
        if isinstance(value, bool | int | float | str) and key != "training"
    }
    states: dict[str, Spec | list[Spec]] = {
        key: [Spec.of(t) for t in state] if isinstance(state, list) else Spec.of(state)
        for key, state in metric.metric_state.items()
    }
    return _Note(name, plain, states)


def _tensors(metric: Metric) -> list[Tensor]:
    return [
        tensor
        for state in metric.metric_state.values()
        for tensor in (state if isinstance(state, list) else [state])
    ]


def _apply(note: _Note, metric: Metric, tensors: list[Tensor]) -> None:
    for key, value in note.plain.items():
        setattr(metric, key, value)
    remaining = iter(tensors)
    for key, spec in note.states.items():
        if isinstance(spec, list):
            device = "cpu" if metric.compute_on_cpu else metric.device
            setattr(metric, key, [next(remaining).to(device) for _ in spec])
        else:
            setattr(metric, key, next(remaining).to(metric.device))


class StepMetrics:
    """Values of metrics over all microbatches of a step, as `forward` gives for a whole batch.

    A copy of the metric, empty at the start of the step, is updated with what `forward` is called
    with. The metric's own states are never touched, so that what the user reads of them inside
    the step is true.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[int, Metric] = {}

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Note the calls of all metrics of the module; for one microbatch."""
        handles = [
            metric.register_forward_pre_hook(self._note_call, with_kwargs=True)
            for metric in self._module.modules()
            if isinstance(metric, Metric)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def value(self, metric: Metric) -> Any:
        """Value of a metric over this step; None if its `forward` was not called."""
        noted = self._copies.get(id(metric))
        return None if noted is None else noted.compute()

    def clear(self) -> None:
        """Begin the next step."""
        self._copies.clear()

    def _note_call(self, metric: Any, args: Any, kwargs: Any) -> None:
        if id(metric) not in self._copies:
            self._copies[id(metric)] = self._empty_copy(metric)
        self._copies[id(metric)].update(*args, **kwargs)

    def _empty_copy(self, metric: Metric) -> Metric:
        # The memo makes the copy share these: a process group cannot be copied, and through the
        # hook of `watching` a metric leads to the whole model.
        shared = (metric.process_group, self, self._module)
        empty = copy.deepcopy(metric, {id(value): value for value in shared})
        empty.reset()
        empty._to_sync = metric.dist_sync_on_step
        return empty
