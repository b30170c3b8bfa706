"""Which experts `expert_precision="fp8_block"` can serve: refused before anything is touched."""

from __future__ import annotations

import torch

from fold_kernels.expert_forms import Precision
from lightning_fold.model.inspect import ExpertsSpec
from lightning_fold.topology import doctor
from lightning_fold.topology.folding import Folding


def check_precision(spec: ExpertsSpec, folding: Folding, precision: Precision) -> None:
    """Refuse fp8 for experts that are not folded, compute in fp64, or have other widths.

    Args:
        spec: The experts of a layer.
        folding: Their mapping.
        precision: See `FoldedConfig.expert_precision`.

    Raises:
        ValueError: Names the layer and what to change.
    """
    if precision == "bf16":
        return
    if spec.refusal is not None:
        raise ValueError(
            f"{spec.name} ({type(spec.module).__name__}) computes its own experts ({spec.refusal}),"
            f" and expert_precision={precision!r} lives inside folded ones. Legal: 'bf16'.  Change "
            "`expert_precision`."
        )
    if any(param.dtype == torch.float64 for param in spec.module.parameters()):
        doctor.refuse_fp8_of(f"{spec.name}, which holds weights of fp64,", "torch.float64")
    doctor.check_fp8_widths(
        spec.name, model_width=spec.model_width, width=spec.width, folding=folding
    )
