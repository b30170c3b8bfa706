"""The checks that refuse an illegal mapping before any process group exists.

Owns the wording of every refusal about ranks, experts and heads: the equation with its
numbers, what breaks, the legal values and the strategy argument to change. Pure integers and
strings: it reads sizes that others took from a model, never a model, and imports no torch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import NoReturn

from lightning_fold.topology.folding import Folding, divisors

# Width of the blocks that expert_precision='fp8_block' quantises; `fold_kernels.quantized` has it
# too, and imports torch.
FP8_BLOCK = 128

DEGREE_FIELDS = {
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def resolve_folding(world: int, *, tp: int, cp: int, pp: int, etp: int, ep: int) -> Folding:
    """Return the folding of a world, or refuse it naming the strategy argument to change.

    Raises:
        ValueError: a degree is not a positive int, or a view does not cover the world.
    """
    check_degree("world", world, field="devices * num_nodes")
    for axis, degree in {"tp": tp, "cp": cp, "pp": pp, "etp": etp, "ep": ep}.items():
        check_degree(axis, degree)
    if world % pp:
        raise ValueError(
            "Folding does not close: pp * stage_size must equal world.\n"
            f"  pp={pp} does not divide world={world}.\n"
            f"Legal pp: {_listed(divisors(world))}.  Change `pipeline_parallel_size`."
        )
    _check_attention(world // pp, pp=pp, tp=tp, cp=cp)
    _check_moe(world // pp, tp=tp, cp=cp, etp=etp, ep=ep)
    return Folding.from_world(world, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)


def check_degree(axis: str, degree: object, *, field: str | None = None) -> None:
    """Refuse a degree that is not a positive int; a bool is not one.

    Raises:
        ValueError: names `field`, by default the strategy argument of the axis.
    """
    field = field or DEGREE_FIELDS[axis]
    if type(degree) is not int:
        kind = type(degree).__name__
        raise ValueError(
            f"{axis}={degree!r} is a {kind}; {axis} counts ranks and must be an int."
            f"  Legal {axis}: 1, 2, 3, ...  Change `{field}`."
        )
    if degree < 1:
        raise ValueError(
            f"{axis}={degree} leaves no rank; {axis} must be at least 1."
            f"  Legal {axis}: 1, 2, 3, ...  Change `{field}`."
        )


def check_experts(name: str, *, num_experts: int, width: int, folding: Folding) -> None:
    """Refuse a MoE layer whose experts the folding cannot split.

    Args:
        name: Module path of the experts, which opens the message.
        num_experts: Routed experts of the layer.
        width: Expert width, which etp splits.
        folding: The resolved mapping.

    Raises:
        ValueError: ep does not divide the experts, or etp does not divide the width.
    """
    ep, etp, stage = folding.ep, folding.etp, folding.stage_size
    if num_experts % ep:
        legal = _listed(divisors(math.gcd(num_experts, stage // etp)), " ")
        raise ValueError(
            f"{name}: {num_experts} experts cannot be split over ep={ep}; legal ep: {legal} "
            f"(they divide {num_experts} and stage_size/etp = {stage}/{etp} = {stage // etp})."
            f"  Change `{DEGREE_FIELDS['ep']}`."
        )
    if width % etp:
        legal = _listed(divisors(math.gcd(width, stage // ep)), " ")
        raise ValueError(
            f"{name}: expert width {width} cannot be split over etp={etp}; legal etp: {legal} "
            f"(they divide {width} and stage_size/ep = {stage}/{ep} = {stage // ep})."
            f"  Change `{DEGREE_FIELDS['etp']}`."
        )


def check_fp8_widths(name: str, *, model_width: int, width: int, folding: Folding) -> None:
    """Refuse `expert_precision="fp8_block"` for experts that do not divide into its blocks.

    Args:
        name: Module path of the experts, which opens the message.
        model_width: Width of the tokens.
        width: Expert width, which etp divides.
        folding: The resolved mapping.

    Raises:
        ValueError: 128 does not divide the model width, the expert width, or that of a rank.
    """
    blocks = f"blocks of {FP8_BLOCK}, which expert_precision='fp8_block' quantises"
    for kind, size in (("model", model_width), ("expert", width)):
        if size % FP8_BLOCK:
            raise ValueError(
                f"{name}: {kind} width {_in_blocks(size)} cannot be cut into {blocks}; legal: "
                f"'bf16', or a width that {FP8_BLOCK} divides.  Change `expert_precision`."
            )
    etp, ep, stage = folding.etp, folding.ep, folding.stage_size
    local = width // etp
    if local % FP8_BLOCK:
        legal = _listed(divisors(math.gcd(width // FP8_BLOCK, stage // ep)), " ")
        raise ValueError(
            f"{name}: expert width/etp = {width}/{etp} = {_in_blocks(local)} cannot be cut into "
            f"{blocks}; legal etp: {legal} (they divide {width}/{FP8_BLOCK} = "
            f"{width // FP8_BLOCK} and stage_size/ep = {stage}/{ep} = {stage // ep}), or 'bf16'."
            f"  Change `{DEGREE_FIELDS['etp']}` or `expert_precision`."
        )


def refuse_fp8_of(what: str, dtype: str) -> NoReturn:
    """Refuse `expert_precision="fp8_block"` for experts that compute in a dtype it has no form for.

    Args:
        what: What says so, which opens the message.
        dtype: The dtype.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"{what} makes the experts compute in {dtype}, and expert_precision='fp8_block' multiplies "
        "numbers of 4 significant bits. Legal with it: precision '32-true', 'bf16-true', "
        f"'bf16-mixed', '16-mixed'; legal with {dtype}: 'bf16'.  Change `expert_precision` or the "
        "Trainer's `precision`."
    )


def check_heads(name: str, *, heads: int, kv_heads: int, folding: Folding) -> None:
    """Refuse an attention layer whose heads tp cannot split.

    Key/value heads fewer than tp are replicated, which needs tp to be a multiple of them.

    Args:
        name: Module path of the attention, which opens the message.
        heads: Query heads.
        kv_heads: Key/value heads.
        folding: The resolved mapping.

    Raises:
        ValueError: tp splits neither evenly.
    """
    tp = folding.tp
    if _splits_heads(tp, heads=heads, kv_heads=kv_heads):
        return
    fits = divisors(folding.stage_size // folding.cp)
    legal = [size for size in fits if _splits_heads(size, heads=heads, kv_heads=kv_heads)]
    reason = (
        f"{heads} heads cannot be split over tp={tp}"
        if heads % tp
        else f"{kv_heads} key/value heads can be neither split over tp={tp} nor replicated evenly"
    )
    raise ValueError(
        f"{name}: {reason}; legal tp: {_listed(legal, ' ')} (they divide {heads} heads, and "
        f"divide {kv_heads} key/value heads or are a multiple of them)."
        f"  Change `{DEGREE_FIELDS['tp']}`."
    )


def check_context_heads(name: str, *, heads: int, folding: Folding) -> None:
    """Refuse `context_parallel_method="ulysses"` where cp cannot share a tp rank's heads.

    Args:
        name: Module path of the attention, which opens the message.
        heads: Query heads of all tp ranks, which tp divides.
        folding: The resolved mapping.

    Raises:
        ValueError: cp does not divide heads/tp.
    """
    tp, cp = folding.tp, folding.cp
    if (heads // tp) % cp == 0:
        return
    legal = divisors(math.gcd(heads // tp, folding.stage_size // tp))
    raise ValueError(
        f"{name}: heads/tp = {heads}/{tp} = {heads // tp} cannot be shared over cp={cp} by "
        f"context_parallel_method='ulysses'; legal cp: {_listed(legal, ' ')} (they divide "
        f"{heads // tp}), or any cp with 'all_gather' or 'ring'."
        f"  Change `{DEGREE_FIELDS['cp']}` or `context_parallel_method`."
    )


def largest_legal_ep(world: int, num_experts: int) -> int:
    """Return the largest ep that divides both the world and the experts, with etp = pp = 1."""
    return math.gcd(world, num_experts)


def nearest(word: str, legal: Iterable[str]) -> str | None:
    """Return the legal word most like a misspelt one, or None where none is alike."""
    matches = difflib.get_close_matches(word, list(legal), n=1)
    return matches[0] if matches else None


def _check_attention(stage: int, *, pp: int, tp: int, cp: int) -> None:
    if stage % (tp * cp) == 0:
        return
    raise ValueError(
        "Folding does not close: tp*cp*dp must equal world/pp per pipeline stage.\n"
        f"  world={stage * pp} pp={pp}  ->  stage_size = {stage}\n"
        f"  tp={tp} cp={cp}  ->  {tp}*{cp} = {tp * cp} does not divide {stage}\n"
        + _remedy(stage, ("tp", tp), ("cp", cp))
    )


def _check_moe(stage: int, *, tp: int, cp: int, etp: int, ep: int) -> None:
    if stage % (etp * ep) == 0:
        return
    attention = f"tp={tp} cp={cp} dp={stage // (tp * cp)}"
    experts = f"etp={etp} ep={ep}"
    raise ValueError(
        "Folding does not close: etp*ep*edp must equal tp*cp*dp per pipeline stage.\n"
        f"  {attention}  ->  stage_size = {stage}\n"
        f"  {experts:{len(attention)}}  ->  {etp}*{ep} = {etp * ep} does not divide {stage}\n"
        + _remedy(stage, ("ep", ep), ("etp", etp))
    )


def _remedy(stage: int, first: tuple[str, int], second: tuple[str, int]) -> str:
    """List what each of two degrees could be beside the other, and the fields that help."""
    choices: list[str] = []
    fields: list[str] = []
    for (axis, _), (other, size) in ((first, second), (second, first)):
        legal = divisors(stage // size) if stage % size == 0 else ()
        choices.append(f"Legal {axis} for {other}={size}: {_listed(legal)}.")
        if legal:
            fields.append(f"`{DEGREE_FIELDS[axis]}`")
    # Where neither helps alone, both have to change.
    change = " or ".join(fields) or " and ".join(
        f"`{DEGREE_FIELDS[axis]}`" for axis, _ in (first, second)
    )
    return "  ".join([*choices, f"Change {change}."])


def _splits_heads(tp: int, *, heads: int, kv_heads: int) -> bool:
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _in_blocks(width: int) -> str:
    return f"{width} = {width // FP8_BLOCK}*{FP8_BLOCK} + {width % FP8_BLOCK}"


def _listed(values: Iterable[int], separator: str = ", ") -> str:
    return separator.join(str(value) for value in values) or "none"
