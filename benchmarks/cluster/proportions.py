"""The proportions of a real model on real links, slowed down until two cores can act them.

    real      one token of one layer in its forward: FLOPs over the rate of a GPU
              one row that leaves the node: bytes over a GPU's share of the links
    emulated  every time is `slowdown` times as long; rows are narrower, and so are the links

Derived and not tuned: what is chosen are the model, the GPU's rate, the links, and the slowdown.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cluster.emulate import Costs
from benchmarks.cluster.network import Rates
from lightning_fold.pipeline.costs import FLOPS_PER_WEIGHT, core_flops

_FLOAT_BYTES = 4
_BITS = 8
_MEGA = 1e6


@dataclass(frozen=True)
class Proportions:
    """A fine-grained MoE on a cluster; the defaults are Qwen3-30B-A3B on H100s in bf16.

    Attributes:
        hidden: Width of a token.
        query: Attention heads times head width.
        key_value: Key/value heads times head width.
        width: Of one expert.
        top_k: Experts of a token.
        sequence: Tokens that attend to each other.
        flops: What a GPU gets done in a second, all its kernels together: 30 % of the peak.
        link: Bytes a second from a GPU to other nodes: 400 Gb/s.
        inside: Bytes a second from a GPU to others of its node.
        element: Bytes of a number on the way.
    """

    hidden: int = 2048
    query: int = 4096
    key_value: int = 512
    width: int = 768
    top_k: int = 8
    sequence: int = 4096
    flops: float = 300e12
    link: float = 50e9
    inside: float = 450e9
    element: int = 2

    def costs(self, slowdown: float) -> Costs:
        """What a token and a row take."""
        weights = 2 * self.hidden * (self.query + self.key_value)
        core = core_flops(query_size=self.query, sequence_length=self.sequence)
        expert = FLOPS_PER_WEIGHT * 3 * self.hidden * self.width
        scale = slowdown / self.flops
        return Costs(scale * (FLOPS_PER_WEIGHT * weights + core), scale * expert)

    def rates(self, slowdown: float, *, hidden: int, per_node: int) -> Rates:
        """What the links of a node carry, where rows are `hidden` floats."""
        shrunk = _FLOAT_BYTES * hidden / (self.element * self.hidden)
        scale = per_node * shrunk * _BITS / _MEGA / slowdown
        return Rates(link=scale * self.link, inside=scale * self.inside)
