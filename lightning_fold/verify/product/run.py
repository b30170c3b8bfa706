"""`verify`: every legal mapping of N ranks against one process, on the user's own model.

Owns the order: list the mappings, refuse what does not fit, run the plain loop, run the ranks,
compare, diagnose. A crash costs its own mapping; the ranks start again for those that are left.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_fold.config import FoldedConfig
from lightning_fold.model.fold import check_model
from lightning_fold.topology.doctor import DEGREE_FIELDS, nearest
from lightning_fold.topology.folding import Folding, divisors, legal_foldings
from lightning_fold.verify.launch import WorldRun, run_world
from lightning_fold.verify.mutations import MUTATIONS
from lightning_fold.verify.plan import Case
from lightning_fold.verify.product.batches import batches_of
from lightning_fold.verify.product.checks import compare_mapping, compare_resumed
from lightning_fold.verify.product.diagnosis import Deviation, Failure, diagnose
from lightning_fold.verify.product.plain import PlainCase, run_plain
from lightning_fold.verify.product.result import MappingResult, VerifyResult
from lightning_fold.verify.product.shrink import describe, is_hugging_face
from lightning_fold.verify.product.subject import (
    Built,
    Subject,
    build,
    strategy_options,
    subject_of,
)
from lightning_fold.verify.product.training import MappingCase, run_mapping, strategy_for

MOST_RANKS, MOST_CRASHES = 8, 3
_PLAIN_TIMEOUT_S, _MAPPING_TIMEOUT_S = 600.0, 120.0
# They change what is computed, which the plain model does not do.
_CHANGES_RESULTS = (
    *("router", "router_options", "capacity_factor", "token_drop", "expert_precision"),
)
_NOT_OURS = (
    *DEGREE_FIELDS.values(),
    *("save_distributed_checkpoint", "async_save", "meta_init", "init_from", "moe_layers"),
    *("num_microbatches", "microbatch_size", "pipeline_schedule", "pipeline_layout"),
    *("virtual_pipeline_size", "collective_timeout_s"),
)


def verify(
    model: str | Callable[..., nn.Module] | None = None,
    *,
    ranks: int = 4,
    config: str | Path | None = None,
    full: bool = False,
    mappings: Sequence[str] | None = None,
    inject: str = "",
    tolerance: float | None = None,
    folder: Path | None = None,
) -> VerifyResult:
    """Compare every legal mapping of some ranks with a single process, in fp64 on Gloo.

    Starts processes; to be called from an ordinary program, by no rank.

    Args:
        model: A function or class that other processes can import, or its name as
            `module:callable` or `file.py:callable`; builds a LightningModule or a plain module.
            None is the built-in decoder.
        ranks: World size, 1 to 8.
        config: A LightningCLI recipe, in the place of `model`.
        full: Take the model at the size it has.
        mappings: Ids of the mappings to run; None runs all with pp = 1.
        inject: Name of a fault of `verify.mutations` to inject.
        tolerance: Largest relative error; None is 1e-10, and 1e-6 for models of transformers,
            which compute parts in fp32.
        folder: Where records go; None is a temporary one.

    Raises:
        ValueError: An argument is wrong, or the model cannot be built, made small or fed.
        RuntimeError: The plain loop itself fails.
    """
    foldings = _foldings(ranks, mappings, inject)
    subject, options, notes = _what(model, config, full=full, inject=inject)
    if folder is not None:
        return _Verification(subject, foldings, options, notes, inject, tolerance, folder).result()
    with tempfile.TemporaryDirectory(prefix="fold-verify-") as made:
        path = Path(made)
        return _Verification(subject, foldings, options, notes, inject, tolerance, path).result()


def refusal_of(folding: Folding, module: nn.Module, options: Mapping[str, Any]) -> str | None:
    """Why set-up refuses a mapping of this model; None if it does not. Changes nothing."""
    try:
        config = strategy_for(folding, options).config
        check_model(module, folding, context_method=config.context_parallel_method)
    except ValueError as error:
        return str(error)
    return None


class _Verification:
    """One call of `verify`."""

    def __init__(
        self,
        subject: Subject,
        foldings: Sequence[Folding],
        options: Mapping[str, Any],
        notes: Sequence[str],
        inject: str,
        tolerance: float | None,
        folder: Path,
    ) -> None:
        self.start = time.monotonic()
        self.subject = subject
        self.foldings = foldings
        self.options = options
        self.notes = tuple(notes)
        self.inject = inject
        self.folder = folder
        # A fault may show in one precision, with one feature or one kind of batch alone.
        self.shown = MUTATIONS[inject].case if inject else Case("", "")
        self.built = build(subject)
        batches_of(self.built, self.shown.batch)(0, 0, 1)
        self.tolerance = tolerance or _tolerance(self.built, self.shown.precision)
        self.resumes = not self.shown.feature
        self.deviations: list[Deviation] = []

    def result(self) -> VerifyResult:
        module = self.built.module
        refusals = {f: refusal_of(f, module, self.options) for f in self.foldings}
        fitting = [f for f in self.foldings if refusals[f] is None]
        found = {f: MappingResult(f.mapping_id, refusal=refusals[f]) for f in self.foldings}
        if fitting:
            found |= self._compare(fitting)
        results = tuple(found[f] for f in self.foldings)
        return VerifyResult(
            subject=str(self.subject),
            shrunk=describe(self.built.changes),
            ranks=self.foldings[0].world,
            tolerance=self.tolerance,
            injected=self.inject,
            mappings=results,
            findings=tuple(self._findings(results)),
            notes=self.notes,
            seconds=time.monotonic() - self.start,
        )

    def _findings(self, results: Sequence[MappingResult]) -> Any:
        compared = [result for result in results if result.checks]
        failures = [
            Failure(
                mapping=result.mapping,
                check=check.name,
                where=check.where,
                error=check.error,
                ratio=check.ratio,
                step=check.step,
                under=result.resumed_under,
            )
            for result in compared
            for check in result.failed
        ]
        return diagnose(failures, self.deviations, [result.mapping for result in compared])

    def _compare(self, fitting: Sequence[Folding]) -> dict[Folding, MappingResult]:
        plain = self._run_plain(fitting)
        cases = self._cases(fitting, plain["scale"])
        failures = _run_all(cases, self.folder / "ranks")
        trained = [case for case in cases if case.trains]
        found = {case.folding: self._mapping(case, failures, plain["runs"]) for case in trained}
        for saved, resumed in pairwise(cases if self.resumes else ()):
            result = found[saved.folding]
            if result.checks:
                found[saved.folding] = self._resumed(result, saved, resumed, failures, plain)
        return found

    def _run_plain(self, fitting: Sequence[Folding]) -> dict[str, Any]:
        case = PlainCase(
            model="",
            mapping=Folding.from_world(1).mapping_id,
            precision=self.shown.precision,
            feature=self.shown.feature,
            batch=self.shown.batch,
            subject=self.subject,
            degrees=tuple(sorted({folding.dp for folding in fitting})),
        )
        folder = self.folder / "plain"
        run = run_world(1, [case], folder, case_timeout=_PLAIN_TIMEOUT_S, run=run_plain)
        if run.failure is not None:
            raise RuntimeError(f"the plain loop over {self.subject} failed\n{run.failure}")
        # Written by a process of this call.
        record: dict[str, Any] = torch.load(folder / case.key / "plain.pt", weights_only=False)
        return record

    def _cases(self, fitting: Sequence[Folding], scale: Any) -> list[MappingCase]:
        """One case a mapping, each resuming its predecessor; a last one closes the ring."""
        cases: list[MappingCase] = []
        for number, folding in enumerate(fitting):
            case = MappingCase(
                model="",
                mapping=folding.mapping_id,
                precision=self.shown.precision,
                mutation=self.inject,
                feature=self.shown.feature,
                batch=self.shown.batch,
                subject=self.subject,
                scale=scale,
                options=self.options,
                resumes=cases[-1].key if cases and self.resumes else "",
                sharded=number % 2 == 0,
            )
            cases.append(case)
        if not self.resumes:
            return cases
        return [*cases, replace(cases[0], trains=False, resumes=cases[-1].key)]

    def _mapping(
        self, case: MappingCase, failures: Mapping[str, str], runs: Mapping[int, Any]
    ) -> MappingResult:
        if case.key in failures:
            return MappingResult(case.mapping, failure=failures[case.key])
        ranks = self._records(case)
        refusals = {rank.get("refusal") for rank in ranks}
        if refusals != {None}:
            return MappingResult(case.mapping, refusal="; ".join(sorted(map(str, refusals))))
        checks, deviations = compare_mapping(
            case.folding, ranks, runs[case.folding.dp], tolerance=self.tolerance
        )
        self.deviations += deviations
        return MappingResult(case.mapping, tuple(checks))

    def _resumed(
        self,
        result: MappingResult,
        saved: MappingCase,
        resumed: MappingCase,
        failures: Mapping[str, str],
        plain: Mapping[str, Any],
    ) -> MappingResult:
        """The saving mapping's result with its last check."""
        under = resumed.mapping
        if resumed.key in failures:
            # A mapping that crashed by itself says nothing of the checkpoint.
            story = f"resuming under {under}: {failures[resumed.key]}"
            return result if resumed.trains else replace(result, failure=story)
        expected = plain["runs"][saved.folding.dp]["resumed"][resumed.folding.dp]
        check = compare_resumed(self._records(resumed), expected, self.tolerance)
        return replace(result, checks=(*result.checks, check), resumed_under=under)

    def _records(self, case: MappingCase) -> list[dict[str, Any]]:
        folder = self.folder / "ranks" / case.key
        # Written by processes of this call.
        return [
            torch.load(folder / f"rank{rank}.pt", weights_only=False)
            for rank in range(case.folding.world)
        ]


def _run_all(cases: Sequence[MappingCase], folder: Path) -> dict[str, str]:
    """Run all cases; why there is no result, by key."""
    failures: dict[str, str] = {}
    left = list(cases)
    while left and len(failures) < MOST_CRASHES:
        run = run_world(
            left[0].folding.world, left, folder, case_timeout=_MAPPING_TIMEOUT_S, run=run_mapping
        )
        if run.failure is None:
            return failures
        left = _after_crash(left, run, failures)
        for path in folder.glob("*.error"):
            path.unlink()
    return failures | {case.key: f"not run after {MOST_CRASHES} crashes" for case in left}


def _after_crash(
    left: Sequence[MappingCase], run: WorldRun, failures: dict[str, str]
) -> list[MappingCase]:
    """The cases that have not run; what resumes a checkpoint that is not there resumes none."""
    keys = [case.key for case in left]
    place = keys.index(run.failed_case) if run.failed_case in keys else 0
    failures[keys[place]] = str(run.failure)
    rest = list(left[place + 1 :])
    if rest:
        rest[0] = replace(rest[0], resumes="")
    return rest


def _foldings(ranks: int, mappings: Sequence[str] | None, inject: str) -> list[Folding]:
    if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"ranks={ranks}: a verification starts as many processes. Legal ranks: 1 to "
            f"{MOST_RANKS}.  Change `--ranks`."
        )
    if inject and inject not in MUTATIONS:
        raise ValueError(
            f"{inject!r} is no fault. Legal: {', '.join(MUTATIONS)}. Change `--inject`."
        )
    legal = {f.mapping_id: f for f in legal_foldings(ranks, cp=divisors(ranks))}
    for mapping in mappings or ():
        if mapping not in legal:
            likely = nearest(mapping, legal)
            hint = f"; the nearest is {likely}" if likely else ""
            raise ValueError(
                f"{mapping!r} is no mapping of {ranks} ranks with pp = 1{hint}. "
                f"{len(legal)} are legal. Change `--mapping`."
            )
    if mappings:
        return [legal[mapping] for mapping in dict.fromkeys(mappings)]
    own = MUTATIONS[inject].case.mapping if inject else ""
    return sorted(legal.values(), key=lambda folding: folding.mapping_id != own)


def _what(
    model: str | Callable[..., nn.Module] | None,
    config: str | Path | None,
    *,
    full: bool,
    inject: str,
) -> tuple[Subject, dict[str, Any], list[str]]:
    """The model, arguments of the strategy, and what is left out of a recipe's."""
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


def _tolerance(built: Built, precision: str) -> float:
    if precision == "32":
        return 1e-5
    return 1e-6 if any(is_hugging_face(m) for m in built.module.modules()) else 1e-10
