"""What the arguments of `verify` mean: mappings, a model, and arguments of the strategy.

Bad ones are refused here, before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lightning_fold.config import FoldedConfig
from lightning_fold.topology.doctor import DEGREE_FIELDS, nearest
from lightning_fold.topology.folding import Folding, divisors, legal_foldings
from lightning_fold.verify.mutations import MUTATIONS
from lightning_fold.verify.product.subject import Subject, strategy_options, subject_of

MOST_RANKS = 8
# They change what is computed, which the plain model does not do.
_CHANGES_RESULTS = (
    *("router", "router_options", "capacity_factor", "token_drop", "expert_precision"),
)
_NOT_OURS = (
    *DEGREE_FIELDS.values(),
    *("save_distributed_checkpoint", "async_save", "meta_init", "init_from", "moe_layers"),
    *("num_microbatches", "microbatch_size", "pipeline_layout", "collective_timeout_s"),
)


def foldings_of(
    ranks: int, mappings: Sequence[str] | None, pp: Sequence[int] | None, inject: str
) -> list[Folding]:
    """The mappings to compare, that of an injected fault first.

    Raises:
        ValueError: An argument is wrong.
    """
    if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"ranks={ranks}: a verification starts as many processes. Legal ranks: 1 to "
            f"{MOST_RANKS}.  Change `--ranks`."
        )
    if inject and inject not in MUTATIONS:
        raise ValueError(
            f"{inject!r} is no fault. Legal: {', '.join(MUTATIONS)}. Change `--inject`."
        )
    degrees = divisors(ranks)
    for degree in pp or ():
        if degree not in degrees:
            raise ValueError(
                f"pp={degree} does not divide {ranks} ranks. Legal pp: "
                f"{', '.join(map(str, degrees))}.  Change `--pp`."
            )
    found = legal_foldings(ranks, cp=degrees, pp=sorted(set(pp or degrees)))
    legal = {folding.mapping_id: folding for folding in found}
    for mapping in mappings or ():
        if mapping not in legal:
            likely = nearest(mapping, legal)
            hint = f"; the nearest is {likely}" if likely else ""
            raise ValueError(
                f"{mapping!r} is no mapping of {ranks} ranks{hint}. "
                f"{len(legal)} are legal. Change `--mapping`."
            )
    if mappings:
        return [legal[mapping] for mapping in dict.fromkeys(mappings)]
    own = MUTATIONS[inject].case.mapping if inject else ""
    return sorted(legal.values(), key=lambda folding: folding.mapping_id != own)


def what_of(
    model: str | Callable[..., nn.Module] | None,
    config: str | Path | None,
    *,
    full: bool,
    inject: str,
) -> tuple[Subject, dict[str, Any], list[str]]:
    """The model, arguments of the strategy, and what is left out of a recipe's.

    Raises:
        ValueError: They name no model, or the recipe cannot be read.
    """
    subject = subject_of(model, config, full=full)
    if inject and subject.decoder:
        # The fault's own model can show it: tied weights untied need tied ones.
        subject = replace(subject, decoder=_showing(inject))
    options = strategy_options(subject.recipe) if subject.recipe else {}
    if inject:
        shown = MUTATIONS[inject].case
        options |= {
            "context_parallel_method": shown.context_parallel_method,
            "data_parallel_shard": shown.shard,
        }
        if shown.folding.pp > 1:
            options |= {
                "pipeline_schedule": shown.schedule,
                "virtual_pipeline_size": shown.virtual_stages,
            }
    known = FoldedConfig.from_mapping(options)
    left_out = {
        name: getattr(known, name)
        for name in _CHANGES_RESULTS
        if options.get(name, None) not in (None, getattr(FoldedConfig(), name))
    }
    notes = [
        f"left out of the recipe, being no part of the plain model: {name}={value!r}"
        for name, value in left_out.items()
    ]
    kept = {k: v for k, v in options.items() if k not in (*_CHANGES_RESULTS, *_NOT_OURS)}
    return subject, kept, notes


def _showing(inject: str) -> str:
    own = MUTATIONS[inject].case.model
    # Shared experts and biases harm none and show more.
    return "decoder-shared-bias" if own == "decoder" else own
