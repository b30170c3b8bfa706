"""`self.log` under a pipeline, where the user's step runs once per microbatch on the last stage.

What a step logs is recorded, not logged: the last stage combines the records of its microbatches
and sends them to the other stages, and then every rank logs them once, as if its step had run on
the whole batch. Thereby Lightning's own code decides on every rank about epochs, batch sizes,
resets and `sync_dist`, whose collectives all ranks enter together.

A combined value is, by `reduce_fx`: "mean" and "sum" the weighted mean over the microbatches, which
an epoch's sum adds once a step; "max" and "min" the extreme of the microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed import ProcessGroup
from torchmetrics import Metric

from lightning_fold.steps.metrics import StepMetrics, mirror_metrics, unchanged
from lightning_fold.steps.mirror import Mirror, Spec


@dataclass(frozen=True)
class _Line:
    """One `self.log` of a step, without its value: what rarely changes from step to step.

    Attributes:
        fx: Hook that logs, such as "training_step".
        name: Key.
        options: Arguments of `self.log` but value and batch size.
        metric: Name of the logged torchmetrics object in the module; None for a tensor.
        spec: Of the value; None for a metric without a value for the step.
    """

    fx: str
    name: str
    options: tuple[tuple[str, Any], ...]
    metric: str | None
    spec: Spec | None


@dataclass
class _Series:
    """What one `self.log` call gave in the microbatches of a step."""

    fx: str
    name: str
    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    batch_sizes: list[int | None] = field(default_factory=list)


_Layout = tuple[_Line, ...]


class MicrobatchLogs:
    """What the user's module logs in the steps of one pipeline, equal on all its ranks.

    A step is: `microbatch` around each call of the user's step on the last stage, `muted` around
    calls that do not count, then `mirror` on all ranks of the group.
    """

    def __init__(self, module: LightningModule, *, group: ProcessGroup | None, source: int) -> None:
        """Prepare for one module.

        Args:
            module: Attached to a Trainer when a step runs, and on its device.
            group: Ranks of the pipeline; None for one rank.
            source: Group rank of the last stage.
        """
        self._module = module
        self._group = group
        self._source = source
        self._begin()

    def _begin(self) -> None:
        self._metrics = StepMetrics(self._module)
        self._series: dict[tuple[str, str, int], _Series] = {}
        # Layouts that all ranks know, and the latest of each hook by its number here.
        self._known: list[_Layout] = [()]
        self._latest: dict[str | None, int] = {}
        self._metrics_stale = False

    def watch(self, trainer: Trainer) -> None:
        """Mirror the metrics whenever `trainer` comes to the end of an epoch or of a loader.

        Not at a last batch: `max_steps`, `should_stop` and a change of loaders end one unforeseen.
        To be called on all ranks whenever a Trainer starts: forgets what a failed step left.
        """
        self._begin()
        connector: Any = trainer._logger_connector
        reached = type(connector).epoch_end_reached

        def mirror_first() -> None:
            if self._metrics_stale:
                mirror_metrics(self._module, group=self._group, source=self._source)
                self._metrics_stale = False
            reached(connector)

        connector.epoch_end_reached = mirror_first

    @contextmanager
    def microbatch(self, *, weight: float) -> Generator[None, None, None]:
        """Record what is logged inside.

        Args:
            weight: Weight of this microbatch in the loss of the step.
        """
        seen: Counter[tuple[str, str]] = Counter()

        def record(fx: str, name: str, value: Any, **options: Any) -> None:
            key = (fx, name, seen[fx, name])
            seen[fx, name] += 1
            _add(self._series, key, value, weight=weight, options=options)

        with self._recording(record), self._metrics.watching():
            yield

    @contextmanager
    def muted(self) -> Generator[None, None, None]:
        """Ignore what is logged inside, and undo updates of metrics: a call that does not count."""
        with self._recording(lambda *args, **options: None), unchanged(self._module):
            yield

    def mirror(self) -> None:
        """Log what the last stage recorded in this step, on every rank. Collective over the group.

        One small broadcast, which the other stages wait for; two or three in a step whose keys
        differ from those of the latest step of the same hook. To be called in the precision
        plugin's context of the step, which decides in which dtype Lightning accumulates.
        """
        trainer = self._module.trainer
        if trainer._results is None:
            return
        self._metrics_stale = True
        mirror = Mirror(self._group, self._source, self._module.device)
        lines, values, batch_sizes = self._combined()
        self._series.clear()
        self._metrics.clear()
        received = self._exchange(mirror, tuple(lines), values, batch_sizes)
        for line, value, batch_size in received:
            self._log(line, value, batch_size)

    @contextmanager
    def _recording(self, record: Any) -> Generator[None, None, None]:
        results: Any = self._module.trainer._results
        with ExitStack() as stack:
            # `self.log` ends here, after its checks. Predictions have no results to log to.
            if results is not None:
                results.log = record
                stack.callback(delattr, results, "log")
            yield

    def _combined(self) -> tuple[list[_Line], list[Tensor], list[int]]:
        lines, values, batch_sizes = [], [], []
        for series in self._series.values():
            metric, value = self._value_of(series)
            spec = None if value is None else Spec.of(value)
            options = tuple(series.options.items())
            lines.append(_Line(series.fx, series.name, options, metric, spec))
            values += [] if value is None else [value]
            batch_sizes.append(_sum_of(series.batch_sizes))
        return lines, values, batch_sizes

    def _value_of(self, series: _Series) -> tuple[str | None, Tensor | None]:
        metric = series.values[-1]
        if not isinstance(metric, Metric):
            return None, _combine(series)
        for name, module in self._module.named_modules():
            if module is metric:
                value = self._metrics.value(metric) if series.options["on_step"] else None
                return name, value if isinstance(value, Tensor) else None
        raise ValueError(
            f"the metric logged as {series.name!r} in {series.fx} is no submodule of "
            f"{type(self._module).__name__}, and the other pipeline stages look it up by its name. "
            "Make it an attribute of the module."
        )

    def _exchange(
        self,
        mirror: Mirror,
        layout: _Layout,
        values: Sequence[Tensor],
        batch_sizes: Sequence[int],
    ) -> list[tuple[_Line, Tensor | None, int | None]]:
        fx = self._module._current_fx_name
        expected = self._latest.get(fx, 0)
        own = _index(self._known, layout, hint=expected)
        # The others know the size of the latest layout only; its first number tells the true one.
        fits = own == expected
        first = values if fits else [_blank(spec) for spec in _specs(self._known[expected])]
        sizes = batch_sizes if fits else [0] * len(self._known[expected])
        index, sizes, got = _broadcast(mirror, self._known[expected], own, sizes, first)
        if index == len(self._known):
            self._known.append(mirror.objects(layout))
        if index != expected:
            self._latest[fx] = index
            _, sizes, got = _broadcast(mirror, self._known[index], own, batch_sizes, values)
        remaining = iter(got)
        return [
            (line, next(remaining) if line.spec else None, size if size >= 0 else None)
            for line, size in zip(self._known[index], sizes, strict=True)
        ]

    def _log(self, line: _Line, value: Tensor | None, batch_size: int | None) -> None:
        trainer = self._module.trainer
        results: Any = trainer._results
        connector = trainer._logger_connector
        # As `LightningModule.log` does, which the other stages have not been through.
        if connector.should_reset_tensors(line.fx):
            results.reset(metrics=False, fx=line.fx)
        logged: Any = value
        if line.metric is not None:
            logged = self._module.get_submodule(line.metric)
            logged._forward_cache = value
        results.log(
            line.fx,
            line.name,
            logged,
            **dict(line.options),
            batch_size=batch_size,
            sync_dist_fn=trainer.strategy.reduce,
        )
        connector._current_fx = line.fx


def _add(
    all_series: dict[tuple[str, str, int], _Series],
    key: tuple[str, str, int],
    value: Any,
    *,
    weight: float,
    options: dict[str, Any],
) -> None:
    fx, name, _ = key
    batch_size = options.pop("batch_size", None)
    options = _portable(options, name=name, fx=fx)
    series = all_series.setdefault(key, _Series(fx, name, options))
    if series.options != options:
        raise ValueError(
            f"`self.log({name!r}, ...)` in {fx} had the arguments {series.options} in one "
            f"microbatch of a step and {options} in another. Log a key with the same arguments in "
            "all."
        )
    series.values.append(value if isinstance(value, Metric) else value.detach())
    series.weights.append(weight)
    series.batch_sizes.append(None if batch_size is None else int(batch_size))


def _portable(options: dict[str, Any], *, name: str, fx: str) -> dict[str, Any]:
    """Arguments that mean the same in another process."""
    options = dict(options)
    options.pop("sync_dist_fn", None)
    if options.pop("sync_dist_group", None) is not None:
        raise ValueError(
            f"`self.log({name!r}, ..., sync_dist_group=...)` in {fx}: every pipeline stage logs, "
            "and the group exists for the ranks of the last one only. Leave `sync_dist_group` out: "
            "values are reduced over the data parallel ranks."
        )
    reduce_fx = options["reduce_fx"]
    # Lightning refuses names that it does not know, on every rank.
    named = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx.__name__
    options["reduce_fx"] = "mean" if named == "avg" else named
    return options


def _combine(series: _Series) -> Tensor:
    values = torch.stack([value.to(torch.float64) for value in series.values])
    if series.options["reduce_fx"] == "max":
        value = values.amax()
    elif series.options["reduce_fx"] == "min":
        value = values.amin()
    else:
        value = _weighted_mean(values, series.weights)
    # Lightning keeps float64 and float32 and converts the rest to the default dtype.
    kept = series.values[0].dtype in (torch.float32, torch.float64)
    return value.to(series.values[0].dtype if kept else torch.get_default_dtype())


def _weighted_mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    # A microbatch without target tokens has weight 0 and perhaps a mean over nothing: NaN.
    kept = [i for i, weight in enumerate(weights) if weight > 0] or list(range(len(weights)))
    total = sum(weights[i] for i in kept)
    shares = [weights[i] / total if total else 1 / len(kept) for i in kept]
    return (values[kept] * values.new_tensor(shares)).sum()


def _sum_of(batch_sizes: Sequence[int | None]) -> int:
    known = [size for size in batch_sizes if size is not None]
    return sum(known) if known else -1


def _index(known: list[_Layout], layout: _Layout, *, hint: int) -> int:
    if known[hint] == layout:
        return hint
    return known.index(layout) if layout in known else len(known)


def _specs(layout: _Layout) -> list[Spec]:
    return [line.spec for line in layout if line.spec is not None]


def _blank(spec: Spec) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype)


def _broadcast(
    mirror: Mirror,
    layout: _Layout,
    index: int,
    batch_sizes: Sequence[int],
    values: Sequence[Tensor],
) -> tuple[int, list[int], list[Tensor]]:
    """Index, batch sizes and values as the source has them."""
    head = Spec((1 + len(layout),), torch.int64)
    sent = [torch.tensor([index, *batch_sizes]), *values] if mirror.is_source else None
    numbers, *received = mirror.tensors([head, *_specs(layout)], sent)
    # The source knows its numbers; the others wait here for the device, once a step.
    first, *sizes = [index, *batch_sizes] if mirror.is_source else numbers.tolist()
    return first, sizes, received
