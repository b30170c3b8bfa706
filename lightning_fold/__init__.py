"""Parallel folding for Mixture-of-Experts training under the PyTorch Lightning Trainer.

Importing this package registers `Trainer(strategy="folded_moe")`.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_fold.dispatchers import register_dispatcher
from lightning_fold.model.adapters import register_experts
from lightning_fold.model.replay import RouterReplay
from lightning_fold.pipeline.schedules import register_schedule
from lightning_fold.strategy import FoldedMoEStrategy
from lightning_fold.topology.folding import Folding

__version__ = "0.1.0"
__all__ = [
    "FoldedMoEStrategy",
    "Folding",
    "RouterReplay",
    "__version__",
    "register_dispatcher",
    "register_experts",
    "register_schedule",
]

FoldedMoEStrategy.register_strategies(StrategyRegistry)
