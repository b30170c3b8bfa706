"""Parallel folding for Mixture-of-Experts training under the PyTorch Lightning Trainer.

Importing this package registers `Trainer(strategy="folded_moe")`.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_fold.strategy import FoldedMoEStrategy
from lightning_fold.topology.folding import Folding

__version__ = "0.1.0"
__all__ = ["FoldedMoEStrategy", "Folding", "__version__"]

FoldedMoEStrategy.register_strategies(StrategyRegistry)
