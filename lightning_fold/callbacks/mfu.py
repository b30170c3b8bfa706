"""Model FLOPs utilisation, tokens per second and TFLOP/s per device, while training runs.

Invariant: the FLOPs are those of the model's mathematics (`flops`), summed over the global batch
and divided by all devices, so no parallel mapping, recomputation or padding can raise them.
The host waits for the device only at log steps, after the first step and around validation.
Does not time single phases, and does not know how the strategy parallelises.
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_fold.callbacks.exposed import ExposedTime
from lightning_fold.callbacks.flops import ModelShape, shape_from_config, training_flops
from lightning_fold.callbacks.peak import Peak, compute_type_of, lookup_peak, measure_matmul_peak
from lightning_fold.callbacks.run import is_log_step, log_value, sum_over_world
from lightning_fold.pipeline.costs import Attention

_DEFINITION = (
    "fold/mfu = model FLOP/s per device / peak FLOP/s per device.\n"
    "  model FLOPs: 6 per token and active matrix weight ({active:.4g} of them: top-{top_k} "
    "experts,\n    shared experts, projections, LM head) + {attention} attention core;\n"
    "    not counted: router, norms, embedding lookup, recomputation, dispatch\n"
    "  peak: {peak}\n"
    "  time: the training loop without validation, from the end of the first step"
)

_LOGGED = {
    "fold/tokens_per_s": ("device/items_per_sec", 1.0),
    "fold/tflops_per_device": ("device/flops_per_sec", 1e-12),
    "fold/mfu": ("device/mfu", 1.0),
}
_IN_PROGRESS_BAR = {"fold/tokens_per_s", "fold/mfu"}


class MFUMonitor(Callback):
    """Logs `fold/tokens_per_s`, `fold/tflops_per_device`, `fold/mfu` and `fold/tokens`.

    Tokens per second are global. Padding counts as tokens. The peak of a GPU comes from a table of
    dense peaks (`peak.register_device` adds one); on CPUs it is measured at the start of training
    with a dense matmul on all ranks at once, about two seconds long. Works with any strategy.
    A model whose sizes cannot be read gets tokens per second only, with one warning.

    Where experts are spread over ranks, on CPUs: `fold/exposed_communication`, the fraction of the
    time in which ranks stand still for rows of tokens, and `fold/hidden_communication`, 1 - that
    wait over the time in which the rows travel; both of the time since the previous log step, and
    means over all ranks.

    Args:
        attention: "causal" counts half of the score matrix, "full" counts all of it and is what
            arXiv 2504.14960 reports.
        peak_flops: Operations per second of one device, in place of table or measurement.
        shape: Sizes of the model, in place of those read from its config.
        batch_tokens: Maps a batch of this data-parallel rank to (tokens, sequence length), without
            reading device memory. By default both come from the shape of `input_ids`.
        window_size: Log steps that a rate spans, at least 2: the rate since the previous log step.
    """

    def __init__(
        self,
        *,
        attention: Attention = "causal",
        peak_flops: float | None = None,
        shape: ModelShape | None = None,
        batch_tokens: Callable[[Any], tuple[int, int]] | None = None,
        window_size: int = 2,
    ) -> None:
        super().__init__()
        _check_arguments(attention, peak_flops=peak_flops, window_size=window_size)
        self.attention: Attention = attention
        self.peak_flops = peak_flops
        self.shape = shape
        self.batch_tokens = batch_tokens or tokens_of_batch
        self.window_size = window_size
        self._is_announced = False
        self._exposed = ExposedTime()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the model, find the peak and start counting. Collective where it measures."""
        self._shape = self.shape or self._read_shape(trainer, pl_module)
        self._peak = self._find_peak(trainer)
        self._world, self._copies = trainer.world_size, data_parallel_size(trainer)
        # World size 1: everything fed is per device or global already, and Lightning's own
        # multiplication by the world would count every tp, cp and pp peer's tokens again.
        self._throughput = Throughput(
            available_flops=self._peak.flops, world_size=1, window_size=self.window_size
        )
        self._steps = self._tokens = self._flops = self._flops_seen = 0
        self._paused_at: float | None = None
        self._excluded = 0.0
        if trainer.strategy.root_device.type == "cpu":
            self._exposed.start(trainer)
        self._announce()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let the clock go on after validation and the checkpoint that followed it."""
        if self._paused_at is not None:
            self._excluded += perf_counter() - self._paused_at
            self._paused_at = None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch; at a log step read the clock and log."""
        self._count(batch)
        if trainer.fit_loop._should_accumulate():
            return
        self._steps += 1
        # The first step allocates and compiles, so the first window opens at its end.
        if self._steps > 1 and not is_log_step(trainer):
            return
        _wait_for_device(trainer)
        rates = self._read_rates()
        exposed = self._exposed.read()
        for key, value in {**rates, **exposed, "fold/tokens": self._tokens}.items():
            log_value(pl_module, key, value, prog_bar=key in _IN_PROGRESS_BAR)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the transport no more."""
        self._exposed.stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The same where training ends early."""
        self._exposed.stop()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock, once the training kernels in flight are done."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            _wait_for_device(trainer)
            self._paused_at = perf_counter()

    def _read_shape(self, trainer: Trainer, module: LightningModule) -> ModelShape | None:
        folding = getattr(trainer.strategy, "folding", None)
        try:
            return shape_of_model(module, is_whole=folding is None or folding.pp == 1)
        except ValueError as error:
            rank_zero_warn(f"MFUMonitor logs tokens per second only. {error}")
            return None

    def _find_peak(self, trainer: Trainer) -> Peak:
        if self.peak_flops is not None:
            return Peak(self.peak_flops, "given as peak_flops")
        if self._shape is None:
            return Peak(None, "not needed")
        device = trainer.strategy.root_device
        allows_tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        compute_type = compute_type_of(str(trainer.precision), allows_tf32=allows_tf32)
        if device.type == "cuda":
            return _peak_of_gpu(torch.cuda.get_device_name(device), compute_type)
        if device.type == "cpu":
            return _measure_cpu(trainer, compute_type)
        return _unknown_peak(device.type, compute_type)

    def _announce(self) -> None:
        if self._is_announced or self._shape is None:
            return
        self._is_announced = True
        flops, source = self._peak.flops, self._peak.source
        rank_zero_info(
            _DEFINITION.format(
                active=self._shape.active_weights,
                top_k=self._shape.top_k,
                attention=self.attention,
                peak=source if flops is None else f"{flops / 1e12:.4g} TFLOP/s ({source})",
            )
        )

    def _count(self, batch: Any) -> None:
        tokens, sequence_length = self.batch_tokens(batch)
        self._tokens += tokens * self._copies
        if self._shape is not None:
            self._flops += self._copies * training_flops(
                self._shape,
                tokens=tokens,
                sequence_length=sequence_length,
                attention=self.attention,
            )

    def _read_rates(self) -> dict[str, float]:
        self._throughput.update(
            time=perf_counter() - self._excluded,
            batches=self._steps,
            samples=self._tokens,
            lengths=self._tokens,
            flops=self._new_flops_per_device(),
        )
        rates = self._throughput.compute()
        return {key: rates[name] * scale for key, (name, scale) in _LOGGED.items() if name in rates}

    def _new_flops_per_device(self) -> int | None:
        if self._shape is None:
            return None
        new, self._flops_seen = self._flops - self._flops_seen, self._flops
        return new // self._world


def tokens_of_batch(batch: Any) -> tuple[int, int]:
    """Return (tokens, sequence length) of a batch from the shape of its `input_ids` [B, S].

    A tensor, or a tuple or list that starts with one, is taken for the `input_ids` themselves.

    Raises:
        TypeError: If the batch holds no such tensor.
    """
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
    elif isinstance(batch, (tuple, list)):
        ids = batch[0] if batch else None
    else:
        ids = getattr(batch, "input_ids", batch)
    if not isinstance(ids, torch.Tensor) or ids.ndim == 0:
        raise TypeError(
            f"MFUMonitor finds no `input_ids` [B, S] in a batch of type {type(batch).__name__}.\n"
            "Pass `batch_tokens`, a function from a batch to (tokens, sequence length)."
        )
    return ids.numel(), ids.shape[-1]


def shape_of_model(module: nn.Module, *, is_whole: bool = True) -> ModelShape:
    """Read the sizes from the first config inside the module that describes a decoder.

    Args:
        module: The module or anything around it.
        is_whole: Whether all layers are here (they are not in a pipeline stage), so that the
            config's MoE layers can be compared with those of the structure.

    Raises:
        ValueError: If there is no such config, or it contradicts the structure.
    """
    configs = (getattr(child, "config", None) for child in module.modules())
    config = next((found for found in configs if hasattr(found, "num_hidden_layers")), None)
    if config is None:
        raise ValueError(
            f"{type(module).__name__} has no `config` with `num_hidden_layers`.\n"
            "Pass `shape=ModelShape(...)` to MFUMonitor."
        )
    shape = shape_from_config(config)
    found = sum(
        isinstance(getattr(child, "experts", None), nn.Module) for child in module.modules()
    )
    if is_whole and found != shape.moe_layers:
        raise ValueError(
            f"{type(config).__name__} describes {shape.moe_layers} MoE layers, the model has "
            f"{found}.\nPass `shape=ModelShape(...)` to MFUMonitor."
        )
    return shape


def data_parallel_size(trainer: Trainer) -> int:
    """Count the ranks that hold different batches."""
    folding = getattr(trainer.strategy, "folding", None)
    if folding is not None:
        return int(folding.dp)
    # What the distributed sampler splits by; ModelParallelStrategy's tp peers share a batch.
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("num_replicas", trainer.world_size))


def _check_arguments(attention: str, *, peak_flops: float | None, window_size: int) -> None:
    if attention not in ("causal", "full"):
        raise ValueError(f"MFUMonitor(attention={attention!r}): legal values: 'causal', 'full'.")
    if peak_flops is not None and peak_flops <= 0:
        raise ValueError(f"MFUMonitor(peak_flops={peak_flops:g}): legal values: > 0, or None.")
    if window_size < 2:
        raise ValueError(f"MFUMonitor(window_size={window_size}): legal values: 2 and more.")


def _peak_of_gpu(name: str, compute_type: str) -> Peak:
    flops = lookup_peak(name, compute_type)
    if flops is None:
        return _unknown_peak(name, compute_type)
    return Peak(flops, f"{name}, dense {compute_type}, data sheet")


def _unknown_peak(name: str, compute_type: str) -> Peak:
    rank_zero_warn(
        f"MFUMonitor logs TFLOP/s without MFU: no {compute_type} peak is known for {name!r}. "
        "Pass `peak_flops` or call `lightning_fold.callbacks.register_device`."
    )
    return Peak(None, f"unknown for {name}")


def _measure_cpu(trainer: Trainer, compute_type: str) -> Peak:
    def sum_over_ranks(rate: float) -> float:
        return sum_over_world(torch.tensor(rate, dtype=torch.float64)).item()

    total = measure_matmul_peak(
        compute_type, barrier=trainer.strategy.barrier, sum_over_ranks=sum_over_ranks
    )
    return Peak(
        total / trainer.world_size,
        f"CPU, measured: {compute_type} matmul on {trainer.world_size} processes at once, "
        f"{total / 1e12:.4g} TFLOP/s in all",
    )


def _wait_for_device(trainer: Trainer) -> None:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
