"""What surrounds the products, bound by memory: routing, order, gathers, quantisation."""

# Shapes.  T tokens or rows   K top-k   E experts   D model width

from __future__ import annotations

from fold_kernels.aot.case import BF16, FP32, INT32, INT64, Case, Op, meta
from fold_kernels.gpu.combine import combine, gather
from fold_kernels.gpu.index import expert_index
from fold_kernels.gpu.quantize import quantize_blocks, quantize_rows
from fold_kernels.gpu.router import router_topk, router_topk_backward
from fold_kernels.gpu.tiles import tile_map
from fold_kernels.router import RouterSpec
from fold_kernels.tables import BUILT_IN

SUMS, D = 4096, 2048
# Of Mixtral, gpt-oss and DeepSeek-V3: scores, experts, top-k, and what is special.
ROUTERS = ("softmax 8 2", "softmax 128 4 after bias", "sigmoid 256 8 groups bias")
NUM_EXPERTS = ("8", "128", "1024")


def _router_spec(case: Case) -> RouterSpec:
    scores, _, top_k, *special = case.words
    grouped = "groups" in special
    return RouterSpec(
        top_k=int(top_k),
        scores=scores,  # type: ignore[arg-type]
        softmax_after_topk="after" in special,
        num_groups=8 if grouped else 1,
        top_groups=4 if grouped else 1,
    )


def _router(case: Case, tokens: int) -> object:
    experts = int(case.words[1])
    bias_E = meta(experts, dtype=FP32) if "bias" in case.words else None
    return router_topk(meta(tokens, experts, dtype=FP32), _router_spec(case), bias_E)


def _router_backward(case: Case, tokens: int) -> object:
    spec, experts = _router_spec(case), int(case.words[1])
    index_TK = meta(tokens, spec.top_k, dtype=INT64)
    grad_TK = meta(tokens, spec.top_k, dtype=FP32)
    return router_topk_backward(meta(tokens, experts, dtype=FP32), index_TK, grad_TK, spec)


def _index(case: Case, rows: int) -> object:
    return expert_index(meta(rows, dtype=INT64), int(case.variant))


def _tile_map(case: Case, rows: int) -> object:
    offsets = meta(int(case.variant) + 1, dtype=INT32)
    return tile_map(offsets, rows, BUILT_IN["gemm/many"].m)


def _gather(case: Case, rows: int) -> object:
    return gather(meta(SUMS, D), meta(rows, dtype=INT64))


def _combine(case: Case, rows: int) -> object:
    scale = meta(rows, dtype=FP32) if case.variant else None
    return combine(meta(rows, D), meta(rows, dtype=INT64), meta(SUMS + 1, dtype=INT64), scale)


def _quantize_rows(case: Case, rows: int) -> object:
    return quantize_rows(meta(rows, D))


def _quantize_blocks(case: Case, rows: int) -> object:
    weight = meta(8, D, D, dtype=BF16)
    return quantize_blocks(weight.transpose(1, 2) if case.variant else weight)


ROWS = {
    "router": Op("router_topk_kernel", _router, ROUTERS),
    "router_backward": Op("router_topk_backward_kernel", _router_backward, ROUTERS),
    "count": Op("count_kernel", _index, NUM_EXPERTS),
    "rank": Op("rank_kernel", _index, NUM_EXPERTS[:1]),
    "tile_map": Op("tile_map_kernel", _tile_map, NUM_EXPERTS),
    "gather": Op("gather_kernel", _gather),
    "combine": Op("combine_kernel", _combine, ("", "scaled")),
    "quantize_rows": Op("quantize_rows_kernel", _quantize_rows),
    "quantize_blocks": Op("quantize_blocks_kernel", _quantize_blocks, ("", "transposed")),
}
