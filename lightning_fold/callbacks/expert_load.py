"""How evenly the router spreads tokens over the experts, per layer, while training runs.

Invariant: counts are summed on the device and reduced over all ranks once per log step, all
layers in one vector, so watching costs one small collective and one host read per log step.
Which layers there are, pipeline stages tell each other once a fit. Counts training forwards only.
"""

import math
import os
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from lightning_fold.callbacks.run import (
    is_log_step,
    log_value,
    run_folder,
    save_figure,
    sum_over_world,
)
from lightning_fold.telemetry import RoutingCounts, Telemetry

# Shapes.  E all experts  L MoE layers

_MAX_RECORDS = 512
# Where the colours of the heat map end; a load above it looks like this one.
_MAX_SHOWN = 4.0


class LoadRecord(NamedTuple):
    """Routed rows of all ranks since the previous record, one int64 CPU tensor [E] per layer."""

    step: int
    counts: dict[str, Tensor]


class LoadStatistics(NamedTuple):
    """Balance of one layer.

    Attributes:
        max_over_mean: Rows of the busiest expert over the mean: 1 is even, E is one expert only.
        entropy: Entropy of the rows over log(E): 1 is even, 0 is one expert only.
        dead_fraction: Share of experts that got no row.
    """

    max_over_mean: float
    entropy: float
    dead_fraction: float


class ExpertLoadMonitor(Callback):
    """Logs `fold/expert_load/*` and draws `expert_load.png` when training ends.

    `max_over_mean`, `entropy` and `dead_fraction` (see `LoadStatistics`) come per layer, as
    `fold/expert_load/<layer>/<name>`, and as means over the layers. Each covers the steps since
    the previous log step, over all ranks.

    Args:
        dirpath: Folder of the picture; None is the Trainer's log folder.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.dirpath = dirpath
        self.history: list[LoadRecord] = []
        self._counts: dict[str, Tensor] = {}
        # Experts of every MoE layer of the model, in order of the forward; empty until asked for.
        self._layers: dict[str, int] = {}
        self._telemetry: Telemetry | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy without telemetry before anything is built."""
        if stage == "fit":
            _telemetry_of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier fit and listen."""
        self.history, self._counts, self._layers = [], {}, {}
        self._telemetry = _telemetry_of(trainer)
        self._telemetry.subscribe(RoutingCounts, self._add)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """At a log step, reduce and log. Collective over all ranks then."""
        if is_log_step(trainer) and (record := self._close_record(trainer)):
            for key, value in statistics_to_log(record).items():
                log_value(pl_module, key, value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reduce what is left, stop listening and draw. Collective over all ranks."""
        self._stop_listening()
        self._close_record(trainer)
        folder = run_folder(trainer, self.dirpath)
        if trainer.is_global_zero and self.history:
            draw_expert_load(self.history, folder / "expert_load.png")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop listening; a failed run reduces and draws nothing."""
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._telemetry is not None:
            self._telemetry.unsubscribe(RoutingCounts, self._add)
            self._telemetry = None

    def _add(self, event: RoutingCounts) -> None:
        if not event.training:
            return
        if event.layer in self._counts:
            self._counts[event.layer] += event.counts_E
        else:
            self._counts[event.layer] = event.counts_E.detach().clone()

    def _close_record(self, trainer: Trainer) -> LoadRecord | None:
        """Reduce what has been counted; None where no rank has. Collective over all ranks."""
        if not self._layers:
            self._layers = self._all_layers(trainer)
        if not self._layers:
            return None
        device = trainer.strategy.root_device
        own = [
            self._counts.get(layer, torch.zeros(size, dtype=torch.long, device=device))
            for layer, size in self._layers.items()
        ]
        total = sum_over_world(torch.cat(own)).cpu()
        self._counts = {}
        if not bool(total.any()):
            return None
        sizes = list(self._layers.values())
        counts = dict(zip(self._layers, total.split(sizes), strict=True))
        record = LoadRecord(trainer.global_step, counts)
        self.history = thin_history([*self.history, record])
        return record

    def _all_layers(self, trainer: Trainer) -> dict[str, int]:
        own = {layer: counts_E.numel() for layer, counts_E in self._counts.items()}
        told = [own]
        if trainer.world_size > 1:
            told = [{}] * trainer.world_size
            torch.distributed.all_gather_object(told, own)
        layers = {layer: size for stage in told for layer, size in stage.items()}
        return dict(sorted(layers.items(), key=lambda item: _by_numbers(item[0])))


def _by_numbers(layer: str) -> list[tuple[int, str]]:
    """Layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in layer.split(".")]


def load_statistics(counts_E: Tensor) -> LoadStatistics:
    """Describe the balance of one layer; no rows at all count as even, and every expert as dead."""
    rows = counts_E.double()
    total, experts = rows.sum(), counts_E.numel()
    dead_fraction = (counts_E == 0).double().mean().item()
    if total == 0:
        return LoadStatistics(1.0, 1.0, dead_fraction)
    share_E = rows / total
    entropy = -torch.special.xlogy(share_E, share_E).sum().item()
    return LoadStatistics(
        max_over_mean=(share_E.max() * experts).item(),
        entropy=entropy / math.log(experts) if experts > 1 else 1.0,
        dead_fraction=dead_fraction,
    )


def statistics_to_log(record: LoadRecord) -> dict[str, float]:
    """Flatten a record into metric keys: means over the layers first, then each layer."""
    layers = {layer: load_statistics(counts_E) for layer, counts_E in record.counts.items()}
    means = (sum(column) / len(layers) for column in zip(*layers.values(), strict=True))
    values = {
        f"fold/expert_load/{name}": mean
        for name, mean in zip(LoadStatistics._fields, means, strict=True)
    }
    for layer, statistics in layers.items():
        for name, value in statistics._asdict().items():
            values[f"fold/expert_load/{layer}/{name}"] = value
    return values


def thin_history(history: list[LoadRecord]) -> list[LoadRecord]:
    """Join neighbours once the history is full, so that a long run keeps a bounded record."""
    if len(history) < _MAX_RECORDS:
        return history
    pairs = zip(history[::2], history[1::2], strict=False)
    joined = [
        LoadRecord(
            late.step, {layer: early.counts[layer] + rows for layer, rows in late.counts.items()}
        )
        for early, late in pairs
    ]
    return joined + history[2 * len(joined) :]


def draw_expert_load(history: list[LoadRecord], path: str | os.PathLike[str]) -> None:
    """Draw layers x experts at start, middle and end above the curve of max/mean."""
    figure = Figure(figsize=(11.0, 7.0), layout="constrained")
    shown = sorted({0, len(history) // 2, len(history) - 1})
    layers = list(history[-1].counts)
    grid = figure.add_gridspec(2, len(shown), height_ratios=(3, 2))
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=_MAX_SHOWN)
    maps = [figure.add_subplot(grid[0, column]) for column in range(len(shown))]
    for axes, index in zip(maps, shown, strict=True):
        first = history[index - 1].step + 1 if index else 1
        axes.set_title(f"steps {first} to {history[index].step}", fontsize=10)
        image = axes.imshow(_relative_load(history[index]), norm=norm, cmap="RdBu_r", aspect="auto")
        axes.set_xlabel("expert")
        _label_axes(axes, layers, is_first=axes is maps[0])
    bar = figure.colorbar(image, ax=maps, extend="max", pad=0.01, ticks=[0, 0.5, 1, 2, 3, 4])
    bar.set_label("rows / mean rows of the layer")
    _draw_curve(figure.add_subplot(grid[1, :]), history, layers)
    figure.suptitle("Expert load: 1 (white) is even, 0 (blue) is an idle expert")
    save_figure(figure, path)


def _relative_load(record: LoadRecord) -> list[list[float]]:
    widest = max(counts_E.numel() for counts_E in record.counts.values())
    rows = []
    for counts_E in record.counts.values():
        load_E = counts_E.double() * counts_E.numel() / counts_E.sum().clamp(min=1)
        # NaN cells stay empty where layers differ in their number of experts.
        rows.append(load_E.tolist() + [math.nan] * (widest - counts_E.numel()))
    return rows


def _label_axes(axes: Axes, layers: list[str], *, is_first: bool) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    stride = math.ceil(len(layers) / 16)
    ticks = list(range(0, len(layers), stride))
    axes.set_yticks(ticks, [_short_name(layers[tick]) for tick in ticks] if is_first else [])
    if is_first:
        axes.set_ylabel("layer")


def _short_name(layer: str) -> str:
    numbers = [part for part in layer.split(".") if part.isdigit()]
    return numbers[0] if numbers else layer


def _draw_curve(axes: Axes, history: list[LoadRecord], layers: list[str]) -> None:
    steps = [record.step for record in history]
    curves = [
        [load_statistics(record.counts[layer]).max_over_mean for record in history]
        for layer in layers
    ]
    mean = [sum(column) / len(layers) for column in zip(*curves, strict=True)]
    marker = "o" if len(history) < 3 else ""
    for curve in curves:
        axes.plot(steps, curve, color="tab:red", alpha=0.25, linewidth=1, marker=marker)
    axes.plot([], [], color="tab:red", alpha=0.4, linewidth=1, label="each layer")
    axes.plot(steps, mean, color="black", linewidth=2, marker=marker, label="mean over layers")
    axes.axhline(1.0, color="gray", linestyle=":", linewidth=1, label="even")
    axes.set(xlabel="step", ylabel="max / mean", ylim=(0.9, None))
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=9)


def _telemetry_of(trainer: Trainer) -> Telemetry:
    telemetry = getattr(trainer.strategy, "telemetry", None)
    if telemetry is None:
        raise ValueError(
            f"ExpertLoadMonitor counts routed rows, and {type(trainer.strategy).__name__} emits no "
            "routing counts (it has no `telemetry`).\n"
            "Change `Trainer(strategy=...)` to FoldedMoEStrategy, or remove the callback."
        )
    return telemetry
