"""Features beside the mapping that cases run with, and their plain single-process form.

The reference process loads this file and those it imports as a package of their own, so they
import torch, each other relatively, and nothing above: what a feature means is written here a
second time, without anything parallel. A feature is arguments of the strategy on the one side and
a `Plain` on the other.
"""

from __future__ import annotations

from .plain import Feature, Plain
from .plain_router import ROUTER
from .plain_tokens import TOKENS

__all__ = ["FEATURES", "Feature", "Plain"]

FEATURES: dict[str, Feature] = {
    "": Feature(),
    # The first MoE layer is split over etp, the last shared out over ep (one in between is dense).
    "layers": Feature({"moe_layers": {"0": {"etp": 2, "ep": 1}, 2: {"etp": 1, "ep": 2}}}),
    "selective": Feature({"activation_checkpointing": "selective"}),
    "full": Feature({"activation_checkpointing": "full"}),
    **ROUTER,
    **TOKENS,
}
