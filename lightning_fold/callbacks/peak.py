"""The denominator of MFU: how many operations per second one device can do at most.

Owns the table of dense (never sparse) matrix peaks by GPU name, and the measurement that stands
in for it on CPUs. Invariant: a device that the table does not know has no peak, so no MFU, rather
than the peak of a neighbour with a similar name. Does not know which parallel mapping runs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

# Vendor data sheets, dense, in TFLOP/s: bf16 and fp16 | tf32 | fp32. A key matches a device whose
# name holds all its words; the key with most words wins.
_DATA_SHEETS = {
    "B200": (2250.0, 1125.0, 75.0),
    "GB200": (2500.0, 1250.0, 80.0),
    "GH200": (989.4, 494.7, 66.9),
    "H200": (989.4, 494.7, 66.9),
    "H200 NVL": (835.5, 417.5, 60.0),
    "H100": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.2),
    "H100 NVL": (835.5, 417.5, 60.0),
    "H800": (989.4, 494.7, 66.9),
    "H800 PCIe": (756.0, 378.0, 51.2),
    "H20": (148.0, 74.0, 44.0),
    "A100": (312.0, 156.0, 19.5),
    "A800": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
    "L40": (181.0, 90.5, 90.5),
    "L4": (121.0, 60.0, 30.3),
}
_COMPUTE_TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_MATMUL_SIZE = 768


@dataclass(frozen=True)
class Peak:
    """Operations per second of one device, None where unknown, and where the figure is from."""

    flops: float | None
    source: str


def register_device(name: str, compute_type: str, flops: float) -> None:
    """Add or replace the peak of a GPU.

    Args:
        name: Words that `torch.cuda.get_device_name` holds, such as "H100 PCIe".
        compute_type: One of bf16, fp16, tf32, fp32, fp64.
        flops: Dense operations per second.

    Raises:
        ValueError: If the compute type is unknown or the figure is not positive.
    """
    if compute_type not in _COMPUTE_TYPES or flops <= 0:
        raise ValueError(
            f"register_device({name!r}, {compute_type!r}, {flops:g}): no such peak.\n"
            f"Legal compute types: {', '.join(_COMPUTE_TYPES)}; flops > 0."
        )
    _PEAKS.setdefault(_words(name), {})[compute_type] = flops


def lookup_peak(device_name: str, compute_type: str) -> float | None:
    """Return the dense peak of a GPU by its CUDA name, None if the table has no such device."""
    words = _words(device_name)
    # A MIG slice carries the name of the whole GPU and has a fraction of its peak.
    if "mig" in words:
        return None
    matches = [key for key in _PEAKS if key <= words]
    return _PEAKS[max(matches, key=len)].get(compute_type) if matches else None


def compute_type_of(precision: str, *, allows_tf32: bool) -> str:
    """Name the type that a Trainer precision such as "bf16-mixed" multiplies in."""
    single = "tf32" if allows_tf32 else "fp32"
    return {"16": "fp16", "32": single, "64": "fp64"}.get(precision.split("-")[0], "bf16")


def measure_matmul_peak(
    compute_type: str,
    *,
    barrier: Callable[[], None],
    sum_over_ranks: Callable[[float], float],
    seconds: float = 0.3,
    rounds: int = 5,
) -> float:
    """Measure the matmul rate of all ranks together, while all of them compute.

    Collective over all ranks. Ranks that share cores slow each other down in training too, so
    the best rank alone would be a peak that no run can reach; the best joint round is one.

    Args:
        compute_type: See `register_device`.
        barrier: Lets the ranks of one round start together.
        sum_over_ranks: Sums one number over all ranks.
        seconds: Time per round; every rank computes for the whole of it.
        rounds: Rounds, of which the best counts.

    Returns:
        Operations per second of all ranks together.
    """
    # Constants rather than random numbers: the run's random state stays what the seed made it.
    factor = torch.full((_MATMUL_SIZE, _MATMUL_SIZE), 0.5, dtype=_COMPUTE_TYPES[compute_type])
    product = torch.empty_like(factor)
    rates = []
    for _ in range(rounds):
        torch.mm(factor, factor, out=product)
        barrier()
        rates.append(sum_over_ranks(_matmul_rate(factor, product, seconds=seconds)))
    return max(rates)


def _matmul_rate(factor: torch.Tensor, product: torch.Tensor, *, seconds: float) -> float:
    start, products = perf_counter(), 0
    while perf_counter() - start < seconds:
        torch.mm(factor, factor, out=product)
        products += 1
    return products * 2.0 * _MATMUL_SIZE**3 / (perf_counter() - start)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[^a-z0-9]+", name.lower())) - {""}


# Users add their devices here through `register_device`.
_PEAKS: dict[frozenset[str], dict[str, float]] = {
    _words(name): {
        "bf16": half * 1e12,
        "fp16": half * 1e12,
        "tf32": tf32 * 1e12,
        "fp32": single * 1e12,
    }
    for name, (half, tf32, single) in _DATA_SHEETS.items()
}
