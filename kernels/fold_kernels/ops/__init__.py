"""Ops of a MoE layer: checked entries, registered with torch, each beside its plain reference.

An entry checks shapes, lets `fold_kernels.backend` choose, and calls one op of the namespace
`fold_kernels`, which `torch.compile` and the meta device see as one node. Where Triton does not
serve, the op runs its reference. The expert computation of the layer on a CPU does not come here:
`fold_kernels.expert_mlp` has a form of its own.
"""

from fold_kernels.ops.activations import down_backward, up_projection
from fold_kernels.ops.fp8 import fp8_grouped_gemm, quantize_blocks, quantize_rows
from fold_kernels.ops.products import grouped_gemm, weight_gradient
from fold_kernels.ops.router import route, router_topk
from fold_kernels.ops.rows import combine_rows, expert_index, gather_rows

__all__ = [
    "combine_rows",
    "down_backward",
    "expert_index",
    "fp8_grouped_gemm",
    "gather_rows",
    "grouped_gemm",
    "quantize_blocks",
    "quantize_rows",
    "route",
    "router_topk",
    "up_projection",
    "weight_gradient",
]
