"""FoldedMoEStrategy: the order of set-up, and delegation.

Owns the order in which a model is inspected, folded, sharded and given its optimizers. Decides no
mapping (`topology`), and leaves `strategy.model is lightning_module`, so that keys and hooks stay
the user's. Steps are `stepping`'s, checkpoints `saving`'s, questions about ranks `ranks`'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import (  # type: ignore[attr-defined]
    rank_zero_info,
)
from torch import nn

import __main__
from lightning_fold import compat, precision
from lightning_fold.checkpoint.initial import open_initial
from lightning_fold.checkpoint.whole import WholeModel
from lightning_fold.config import FoldedConfig, checked_names
from lightning_fold.model.fold import fold_model
from lightning_fold.model.on_meta import parameters_on_meta
from lightning_fold.model.sentinel import install_sentinel
from lightning_fold.model.weights import WeightSource, fold_with_weights, starts_on_meta
from lightning_fold.moe.capacity import capacity_of
from lightning_fold.moe.tokens import RunningTokens
from lightning_fold.params import Family
from lightning_fold.pipeline.schedules import check_schedule
from lightning_fold.stepping import SteppingStrategy
from lightning_fold.steps.pipelined import PipelinedSteps
from lightning_fold.topology.comm import Comm
from lightning_fold.topology.doctor import resolve_folding
from lightning_fold.topology.folding import Folding
from lightning_fold.topology.layer_foldings import layer_foldings
from lightning_fold.topology.meshes import build_meshes
from lightning_fold.topology.replicas import seed_token_owners, sync_buffers, sync_module_states

# Ranks that import from a shared disk start minutes apart.
_START_S = 600.0


class FoldedMoEStrategy(SteppingStrategy):
    """Train a Mixture-of-Experts model with separate mappings for attention and MoE layers.

    Every argument is a field of `lightning_fold.config.FoldedConfig`, which says what it does and
    what it costs. Data parallel degrees follow from the world.
    """

    strategy_name = "folded_moe"

    @checked_names
    def __init__(
        self,
        *,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        expert_tensor_parallel_size: int = 1,
        data_parallel_shard: Literal["optimizer", "full"] = "optimizer",
        capacity_factor: float | None = None,
        token_drop: Literal["probability", "position"] = "probability",
        dispatcher: str = "auto",
        context_parallel_method: Literal["all_gather", "ulysses", "ring"] = "all_gather",
        pipeline_schedule: str = "1f1b",
        virtual_pipeline_size: int = 1,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        pipeline_layout: str | None = None,
        pipeline_overlap: bool = False,
        activation_checkpointing: Literal["none", "selective", "full"] = "none",
        expert_precision: Literal["bf16", "fp8_block"] = "bf16",
        moe_layers: dict[str, Any] | None = None,
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        meta_init: bool = False,
        init_from: str | None = None,
        router: Literal["model", "folded", "balanced"] = "model",
        router_options: dict[str, Any] | None = None,
        sentinel_every: int = 0,
        collective_timeout_s: float = 1800.0,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__()
        self.config = FoldedConfig(**arguments)
        self.config.check()
        self._names_before: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}

    # What others may read.

    @property
    def folding(self) -> Folding:
        """The mapping; known from the Trainer's construction on."""
        if self._comm is not None:
            return self.meshes.folding
        c = self.config
        return resolve_folding(
            self.num_processes * self.num_nodes,
            tp=c.tensor_parallel_size,
            cp=c.context_parallel_size,
            pp=c.pipeline_parallel_size,
            etp=c.expert_tensor_parallel_size,
            ep=c.expert_parallel_size,
        )

    @property
    def layer_foldings(self) -> dict[int, Folding]:
        """The foldings of decoder layers that have their own, by number (`moe_layers`)."""
        return layer_foldings(self.config.moe_layers, self.folding)

    @property
    def families(self) -> dict[str, Family]:
        """Family of every parameter, by its name in `lightning_module.named_parameters()`."""
        return dict(self._model_or_raise().families)

    @property
    def tokens(self) -> RunningTokens:
        """Which tokens of the batch this rank holds inside the model, of the latest forward."""
        return self._model_or_raise().tokens

    # Set-up.

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        # An illegal mapping or a bad file is refused before any process starts.
        _ = self.layer_foldings
        if self.config.init_from is not None:
            open_initial(self.config.init_from)
        precision.check_experts(self.precision_plugin, self.config.expert_precision)
        self._check_pipeline()
        if not environment.creates_processes_externally:
            compat.check_relaunch(self.num_processes, getattr(__main__, "__file__", None))
        self._launcher = self._guard.launch_with(self)

    def _check_pipeline(self) -> None:
        c = self.config
        if self.folding.pp > 1:
            check_schedule(
                c.pipeline_schedule,
                self.folding.pp,
                c.virtual_pipeline_size,
                c.num_microbatches,
                overlap=c.pipeline_overlap,
            )

    def setup_environment(self) -> None:
        """Start the process group and build the meshes, once per strategy."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        backend = "nccl" if self.root_device.type == "cuda" else "gloo"
        environment = self.cluster_environment
        assert environment is not None
        limit_s = self.config.collective_timeout_s
        # This one also bounds how long the other ranks may take to start.
        start = timedelta(seconds=max(limit_s, _START_S))
        _init_dist_connection(environment, backend, timeout=start)
        self._guard.connect(self, timeout_s=limit_s)
        if self._comm is None:
            timeout = timedelta(seconds=limit_s)
            meshes = build_meshes(
                self.folding,
                self.root_device.type,
                layer_foldings=self.layer_foldings.values(),
                timeout=timeout,
                tells_apart=self.config.pipeline_overlap,
            )
            self._comm = Comm(meshes, self.telemetry)

    def setup(self, trainer: Trainer) -> None:
        """Fold and shard the model once, then build optimizers if fitting. Collective."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        compat.check_trainer(trainer, async_save=self.config.async_save)
        module = self._module
        if self._store is None or self._store.module is not module:
            self._fold(module)
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._setup_fit(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
        self._guard.set_up(trainer, self)
        if self.pipeline is not None:
            self.pipeline.set_up(trainer)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # FSDP2 would gather inference tensors, which a later training step cannot use.
            loop.inference_mode = False

    def _fold(self, module: LightningModule) -> None:
        self._names_before = {
            id(p): (weakref.ref(p), n) for n, p in module.named_parameters(remove_duplicate=False)
        }
        self.precision_plugin.convert_module(module)
        config = self.config
        on_meta = starts_on_meta(module, meta_init=config.meta_init, path=config.init_from)
        if not on_meta:
            self._to_device(module, sync_module_states)
        if self.folding.pp > 1:
            self.pipeline = PipelinedSteps(module, config, self.comm, self.root_device)
        fold = partial(
            fold_model,
            module,
            comm=self.comm,
            dispatcher=self.config.dispatcher,
            capacity=capacity_of(self.config),
            router=self.config.routing,
            layer_foldings=self.layer_foldings,
            context_method=self.config.context_parallel_method,
            activation_checkpointing=self.config.activation_checkpointing,
            expert_precision=self.config.expert_precision,
            frees_after_forward=self.config.data_parallel_shard == "full",
            cut=None if self.pipeline is None else self.pipeline.leave_own,
        )
        self._folded = fold_with_weights(
            module,
            fold,
            source=self._weight_source(on_meta),
            stages=lambda: self._stages_of(self._whole),
        )
        if on_meta:
            # A pipeline's stages have buffers of their own.
            self._to_device(module, partial(sync_buffers, group=self.meshes.group("stage")))
        self._store = self._open_store(module, self._folded, self._whole)
        core = self._folded.parts.core
        if self.pipeline is not None:
            self.pipeline.start(
                self._folded,
                forward_context=lambda step: precision.step_context(self.precision_plugin, step),
                scale=lambda loss: precision.scaled(self.precision_plugin, loss),
            )
        core.register_forward_pre_hook(self._note_core_call)
        core.register_forward_hook(self._reshard_without_grad, always_call=True)
        if self.meshes.size("dp") < self.world_size:
            compat.sync_metrics_over(module, self.meshes.group("dp"))
        if config.sentinel_every > 0:
            every = config.sentinel_every
            self.sentinel = install_sentinel(self._folded, comm=self.comm, every=every)
        stages = "" if self.pipeline is None else f"\n{self.pipeline.describe()}"
        rank_zero_info(self._folded.describe(self.folding) + stages)

    @property
    def _whole(self) -> WholeModel | None:
        return None if self.pipeline is None else self.pipeline.cut.whole

    def _to_device(self, module: LightningModule, sync: Callable[[nn.Module], None]) -> None:
        self.model_to_device()
        if self.world_size > 1:
            sync(module)

    def _weight_source(self, on_meta: bool) -> WeightSource:
        return WeightSource(
            on_meta=on_meta,
            path=self.config.init_from,
            seed=int(self.broadcast(torch.initial_seed())),
            device=self.root_device,
        )

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Where `configure_model` builds: on this rank's device; parameters may come later."""
        later = self.config.meta_init or self.config.init_from is not None
        meta = parameters_on_meta() if later else nullcontext()
        with super().tensor_init_context(empty_init), meta:
            yield

    def _setup_fit(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        self.setup_optimizers(trainer)
        if self.world_size > 1:
            seed_token_owners(self.comm)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the optimizers on the folded parameters; rebind those that were built before."""
        super().setup_optimizers(trainer)
        current = dict(self._module.named_parameters())
        before = {key: name for key, (ref, name) in self._names_before.items() if ref() is not None}
        elsewhere = () if self._whole is None else self._whole.parameters
        for optimizer in self.optimizers:
            compat.rebind_stale_parameters(
                optimizer, current=current, names_before=before, elsewhere=elsewhere
            )
            compat.check_optimizer(optimizer)
        if (balance := self._model_or_raise().balance) is not None:
            balance.watch(self.optimizers)

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        self._module.to(self.root_device)

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's plugin, with clipping and loss scaling that know the meshes."""
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            precision.install(
                plugin,
                on_norm=self._record_norm,
                device=lambda: self.root_device,
                twins=lambda: self.pipeline.counted_elsewhere() if self.pipeline else (),
            )
        self._precision_plugin = plugin

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `strategy="folded_moe"`."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="Parallel folding with default degrees"
            )


__all__ = ["FoldedMoEStrategy"]
