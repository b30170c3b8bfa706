"""What is shipped: every op, with each built-in tile in every variant and each candidate in one."""

from __future__ import annotations

from collections.abc import Iterator

from fold_kernels.aot.case import Case, Op
from fold_kernels.aot.products import PRODUCTS
from fold_kernels.aot.rows import ROWS

OPS: dict[str, Op] = {**PRODUCTS, **ROWS}
# Numbers of rows that one kernel must serve: they change every step, and Triton compiles anew for
# an argument of 1 or a multiple of 16 unless it is told not to.
ROW_COUNTS = (4096, 4099, 1)


def shipped() -> Iterator[Case]:
    """Yield every kernel that is shipped."""
    for name, op in OPS.items():
        for tile in op.built_in or (None,):
            yield from (Case(name, variant, tile) for variant in op.variants)
        yield from (Case(name, op.variants[0], tile) for tile in op.candidates)


def smoke() -> Iterator[Case]:
    """Yield the first case of every op: whether another architecture compiles at all."""
    for name, op in OPS.items():
        yield Case(name, op.variants[0], op.built_in[0] if op.built_in else None)
