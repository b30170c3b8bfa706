"""Which scenario runs on which world; `slow` ones only where a slow test was selected."""

from __future__ import annotations

import re

# Options of scenarios_parity, by world and mapping.
PARITY: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"plain": ("sgd", "clipped", "adamw_fused", "manual")},
    2: {
        "ep2": (
            "validated", "interrupted", "clipped_accumulated", "adamw_fused", "padded", "stale",
            "late", "headed", "router_logits", "two_optimizers", "frozen_experts",
        ),
        "tp2ep2": (
            "sgd", "validated", "clipped_value", "grouped", "padded", "odd_length", "tied",
            "biased", "frozen_router", "checkpointed", "toggling", "manual", "fp32",
        ),
        "pp2": (
            "validated", "interrupted", "clipped_accumulated", "padded", "tied", "frozen_experts",
            "adamw_fused",
        ),
        "pp2zbv": ("clipped_accumulated", "few"),
        "pp2woven": ("validated", "clipped_accumulated"),
    },
    4: {
        "pp2ep2": ("clipped_accumulated", "padded"),
        "pp2ep2woven": ("clipped_accumulated",),
        "tp2ep2": ("narrow", "padded", "clipped_accumulated", "fp32"),
        "tp2ep4": ("one_expert_each", "all_experts"),
        "tp4ep4": ("short",),
        "tp2ep2etp2": ("biased",),
    },
}  # fmt: skip
SLOW_PARITY: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "dp2": ("sgd",),
        "etp2": ("sgd", "adamw_foreach"),
        "ep2": (
            "accumulated", "grouped", "biased", "tied", "frozen_router", "unfreezing", "toggling",
        ),
        "tp2ep2": (
            "adamw", "adamw_foreach", "interrupted", "clipped", "accumulated", "frozen_experts",
            "frozen_embedding", "unfreezing", "stale", "late", "two_optimizers", "short",
        ),
        "pp2": (
            "sgd", "clipped_value", "adamw_foreach", "odd_length", "biased", "frozen_router",
            "frozen_embedding", "unfreezing", "stale", "fp32", "grouped", "late", "checkpointed",
        ),
        "pp2zbv": ("tied", "padded", "checkpointed", "grouped"),
        "pp2woven": (
            "interrupted", "padded", "odd_length", "tied", "biased", "frozen_router",
            "frozen_experts", "frozen_embedding", "unfreezing", "grouped", "late", "stale", "fp32",
            "few",
        ),
    },
    4: {
        "tp4ep4": ("tied",), "tp2ep4": ("sgd",), "pp2tp2": ("validated", "tied", "padded"),
        "pp2ep2": ("validated", "grouped"), "pp2ep2woven": ("padded", "frozen_experts"),
    },
}  # fmt: skip

OTHERS: dict[int, tuple[str, ...]] = {
    1: ("early-sharded@plain", "refused@plain"),
    2: (
        "entry_points@tp2ep2", "string_name", "sampler@dp2", "sampler@tp2", "predict-33@ep2",
        "reshard@ep2", "logging@dp2", "logging@tp2", "callbacks-sharded@ep2",
        "callbacks-whole@tp2ep2", "second_module@ep2", "unseeded@ep2", "generate-25@ep2",
        "generate-25@tp2ep2", "outputs-7@tp2", "outputs-1@tp2", "dropout@tp2",
        "dropout-recomputed@tp2", "dropout@ep2", "precision-64-true@ep2",
        "precision-bf16-mixed@tp2ep2", "precision-bf16-true@tp2ep2", "precision-16-mixed@ep2",
        "overflow@ep2", "events@tp2ep2", "unsupported-list@dp2", "unsupported-gpt_oss@dp2",
        "refused@ep2", "refused@tp2", "resume-sharded_grouped@ep2", "resume-sharded_adamw@tp2ep2",
        "resume-whole_two_optimizers@tp2ep2", "resume-whole_grouped@ep2", "written-adamw@tp2ep2",
        "written-grouped@ep2", "early-sharded@ep2", "weights_only-sharded@ep2",
        "weights_only-whole@ep2", "written-adamw@ddp", "written-grouped@ddp",
        "adopted-2_adamw_ddp@tp2ep2", "rotated-behind@ep2", "rotated-behind_whole@ep2",
        "dropped-sharded@tp2ep2", "dropped-whole@tp2ep2",
        "held-full@dp2", "held-optimizer@dp2",
        "entry_points@pp2", "predict-33@pp2", "logging@pp2", "callbacks-sharded@pp2",
        "plateau@pp2", "dropout@pp2", "precision-16-mixed_torch@pp2", "overflow@pp2",
        "served@pp2", "own_loss@pp2", "packed@pp2", "refused@pp2", "overflow@pp2woven",
        "precision-bf16-mixed@pp2", "precision-bf16-mixed@pp2woven",
        "resume-sharded_grouped@pp2", "written-adamw@pp2", "adopted-2_adamw_ddp@pp2",
    ),
    4: (
        "predict-33@pp2ep2", "adopted-2_adamw_pp2@pp2ep2",
        "tokens@ep2etp2", "tokens@dp4", "tokens@tp2ep4", "resume-whole_narrow@tp2ep2",
        "resume-sharded_narrow@tp2ep2", "generate-25@tp2ep4", "adopted-2_grouped_ddp@tp4ep4",
    ),
}  # fmt: skip
SLOW_OTHERS: dict[int, tuple[str, ...]] = {
    2: (
        "unseeded@pp2", "sampler@pp2", "callbacks-whole@pp2", "second_module@pp2", "reshard@pp2",
        "dropout-recomputed@pp2", "precision-64-true@pp2", "precision-bf16-true@pp2",
        "precision-16-mixed@pp2", "precision-bf16-true@pp2woven", "precision-16-mixed@pp2woven",
        "resume-whole_grouped@pp2",
        "written-grouped@pp2", "early-sharded@pp2", "weights_only-whole@pp2",
        "dropped-sharded@pp2", "rotated-behind@pp2",
    ),
    4: ("resume-sharded_narrow@pp2tp2",),
}  # fmt: skip
PLAIN = (
    "plateau@plain", "served@plain", "own_loss@plain", "packed@plain",
    "adopted-2_adamw_pp2@plain",
    "entry_points@plain", "reshard@plain", "callbacks-x@plain", "second_module@plain2",
    "generate-25@plain", "outputs-7@plain", "outputs-1@plain", "unsupported-list@plain2",
    "unsupported-gpt_oss@plain2", "uninterrupted-grouped@plain", "uninterrupted-adamw@plain",
    "uninterrupted-two_optimizers@plain", "uninterrupted-narrow@plain", "written-adamw@plain",
    "written-grouped@plain", "adopted-2_adamw_tp2ep2@plain", "adopted-2_grouped_ep2@plain",
)  # fmt: skip
SLOW_PLAIN = ("adopted-2_grouped_pp2@plain", "second_module@plain")


def parity_ids(world: int, *, slow: bool) -> list[str]:
    """Scenario ids of the parity runs of one world: the default ones, or the slow ones alone."""
    table = (SLOW_PARITY if slow else PARITY).get(world, {})
    return [f"fit-{option}@{mapping}" for mapping, options in table.items() for option in options]


def plain_twin(scenario: str, world: int) -> str:
    """The plain run that averages the losses of as many sub-batches as there are dp ranks."""
    option, _, mapping = scenario.partition("@")
    dp = world
    for _, size in re.findall(r"(?<![a-z])(tp|pp)(\d)", mapping):
        dp //= int(size)
    return f"{option}@plain{dp if dp > 1 else ''}"


def scenarios_of(world: int, *, slow: bool) -> list[str]:
    """All scenarios of one world, in order; world 0 is plain Lightning."""
    if world == 0:
        twins = {
            plain_twin(scenario, other)
            for other in (1, 2, 4)
            for kind in ((False, True) if slow else (False,))
            for scenario in parity_ids(other, slow=kind)
        }
        return [*sorted(twins), *PLAIN, *(SLOW_PLAIN if slow else ())]
    extra = [*parity_ids(world, slow=True), *SLOW_OTHERS.get(world, ())] if slow else []
    return [*parity_ids(world, slow=False), *OTHERS[world], *extra]
