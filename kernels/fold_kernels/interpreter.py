"""Make Triton's interpreter round as a GPU does; for tests and dry runs, under TRITON_INTERPRET=1.

The interpreter of Triton 3.6 and 3.7 holds bf16 as uint16 and computes on the bit patterns without
a word (triton #11584), truncates on the way to bf16, and neither rounds nor saturates on the way
to fp8. `install` mends casts and `tl.dot`, and turns every other arithmetic on 16-bit brain floats
into an error: kernels here widen to fp32 right after a load, and a dot is all that may come first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8, np.uint8),
}
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def install() -> None:
    """Mend the interpreter of this process; more calls change nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "rounds_as_a_gpu", False):
        return
    builder.rounds_as_a_gpu = True
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_dot = _dot
    interpreter._convert_float = _converted(interpreter._convert_float)
    for name in ("binary_op", "unary_op", "create_fma"):
        setattr(builder, name, _without_bf16(getattr(builder, name)))
    for name in ("sum", "min_max"):
        setattr(interpreter.ReduceOps, name, _without_bf16(getattr(interpreter.ReduceOps, name)))


def _widen(data: Any, dtype: Any) -> Any:
    """Values as numpy numbers: fp32 for what numpy has no type for."""
    if dtype not in _TORCH:
        return data
    kind, bits, _ = _TORCH[dtype]
    raw = torch.from_numpy(np.ascontiguousarray(data).copy())
    return raw.view(bits).view(kind).float().numpy()


def _narrow(data: Any, dtype: Any) -> Any:
    """fp32 to the bits of `dtype`: round to nearest even; fp8 saturates."""
    kind, bits, unsigned = _TORCH[dtype]
    wide = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32).copy())
    if dtype.primitive_bitwidth == 8:
        limit = torch.finfo(kind).max
        wide = wide.clamp(-limit, limit)
    return wide.to(kind).view(bits).numpy().view(unsigned).reshape(np.shape(data))


def _cast(stock: Any) -> Any:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if before == after or not (before in _TORCH or after in _TORCH):
            return stock(self, source, target)
        wide = _widen(source.data, before)
        if after in _TORCH:
            return interpreter.TensorHandle(_narrow(wide, after), after)
        return interpreter.TensorHandle(wide.astype(interpreter._get_np_dtype(target)), after)

    return cast_impl


def _converted(stock: Any) -> Any:
    def convert(data: Any, before: Any, after: Any, rounding: Any) -> Any:
        toward_zero = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if toward_zero or not (before in _TORCH or after in _TORCH):
            return stock(data, before, after, rounding)
        wide = _widen(data, before)
        if after in _TORCH:
            return _narrow(wide, after)
        kind = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}[after]
        return wide.astype(kind).view(getattr(np, f"uint{after.primitive_bitwidth}"))

    return convert


def _dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
    if acc.dtype.scalar in _TORCH:
        raise TypeError("a dot accumulates in fp32: give it an fp32 accumulator")
    left, right = (_widen(x.data, x.dtype.scalar) for x in (a, b))
    product = np.matmul(left, right, dtype=acc.data.dtype) + acc.data
    return interpreter.TensorHandle(product, acc.dtype.scalar)


def _without_bf16(stock: Any) -> Any:
    def checked(self: Any, first: Any, *rest: Any, **options: Any) -> Any:
        one = first[0] if isinstance(first, tuple) else first
        if one.dtype.scalar == tl.bfloat16 and not any(op in _BITWISE for op in rest):
            raise TypeError("arithmetic on bf16: widen to fp32 right after the load")
        return stock(self, first, *rest, **options)

    return checked
