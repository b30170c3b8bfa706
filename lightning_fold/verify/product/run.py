"""`verify`: every legal mapping of N ranks against one process, on the user's own model.

Owns the order: list the mappings, refuse what does not fit, run the plain loop, run the ranks,
compare, diagnose. A crash costs its own mapping; the ranks start again for those that are left.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_fold.model.fold import check_model
from lightning_fold.model.inspect import find_parts
from lightning_fold.steps.microbatches import rows_of, split
from lightning_fold.steps.step import PROTOCOL
from lightning_fold.topology.folding import Folding
from lightning_fold.verify.launch import WorldRun, run_world
from lightning_fold.verify.mutations import MUTATIONS
from lightning_fold.verify.plan import Case
from lightning_fold.verify.product import pipelines
from lightning_fold.verify.product.arguments import foldings_of, what_of
from lightning_fold.verify.product.batches import batches_of
from lightning_fold.verify.product.checks import compare_mapping, compare_resumed
from lightning_fold.verify.product.diagnosis import Deviation, Failure, diagnose
from lightning_fold.verify.product.plain import STEPS, PlainCase, Way, run_plain
from lightning_fold.verify.product.result import MappingResult, VerifyResult
from lightning_fold.verify.product.shrink import describe, is_hugging_face
from lightning_fold.verify.product.subject import Built, Subject, build
from lightning_fold.verify.product.training import MappingCase, run_mapping, strategy_for

MOST_CRASHES = 3
_PLAIN_TIMEOUT_S, _MAPPING_TIMEOUT_S = 600.0, 120.0


def verify(
    model: str | Callable[..., nn.Module] | None = None,
    *,
    ranks: int = 4,
    config: str | Path | None = None,
    full: bool = False,
    mappings: Sequence[str] | None = None,
    pp: Sequence[int] | None = None,
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
        mappings: Ids of the mappings to run; None runs all.
        pp: Pipeline degrees whose mappings are run; None for all. Every mapping with stages runs
            with one schedule: the recipe's, else the built-in ones in turn.
        inject: Name of a fault of `verify.mutations` to inject.
        tolerance: Largest relative error; None is 1e-10, and 1e-6 for models of transformers,
            which compute parts in fp32.
        folder: Where records go; None is a temporary one.

    Raises:
        ValueError: An argument is wrong, or the model cannot be built, made small or fed.
        RuntimeError: The plain loop itself fails.
    """
    foldings = foldings_of(ranks, mappings, pp, inject)
    subject, options, notes = what_of(model, config, full=full, inject=inject)
    if folder is not None:
        return _Verification(subject, foldings, options, notes, inject, tolerance, folder).result()
    with tempfile.TemporaryDirectory(prefix="fold-verify-") as made:
        path = Path(made)
        return _Verification(subject, foldings, options, notes, inject, tolerance, path).result()


def refusal_of(case: MappingCase, module: nn.Module) -> str | None:
    """Why set-up refuses a mapping of this model; None if it does not. Changes nothing."""
    try:
        config = strategy_for(case).config
        check_model(module, case.folding, context_method=config.context_parallel_method)
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
        self.read: dict[tuple[str, int], list[Any]] = {}

    def result(self) -> VerifyResult:
        cases = self._cases()
        refusals = [self._refusal(case) for case in cases]
        found = {
            case.mapping: replace(_no_result(case), refusal=refusal)
            for case, refusal in zip(cases, refusals, strict=True)
        }
        fitting = [case for case in cases if found[case.mapping].refusal is None]
        if fitting:
            found |= self._compare(fitting)
        results = tuple(found.values())
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

    def _compare(self, fitting: Sequence[MappingCase]) -> dict[str, MappingResult]:
        plain = self._run_plain(fitting)
        cases = self._in_a_ring([replace(case, scale=plain["scale"]) for case in fitting])
        failures = _run_all(cases, self.folder / "ranks")
        trained = [case for case in cases if case.trains]
        found = {case.mapping: self._mapping(case, failures, plain["runs"]) for case in trained}
        for saved, resumed in pairwise(cases if self.resumes else ()):
            result = found[saved.mapping]
            if result.checks:
                found[saved.mapping] = self._resumed(result, saved, resumed, failures, plain)
        return found

    def _run_plain(self, fitting: Sequence[MappingCase]) -> dict[str, Any]:
        case = PlainCase(
            model="",
            mapping=Folding.from_world(1).mapping_id,
            precision=self.shown.precision,
            feature=self.shown.feature,
            subject=self.subject,
            ways=tuple(dict.fromkeys(map(Way.of, fitting))),
        )
        folder = self.folder / "plain"
        run = run_world(1, [case], folder, case_timeout=_PLAIN_TIMEOUT_S, run=run_plain)
        if run.failure is not None:
            raise RuntimeError(f"the plain loop over {self.subject} failed\n{run.failure}")
        # Written by a process of this call.
        record: dict[str, Any] = torch.load(folder / case.key / "plain.pt", weights_only=False)
        return record

    def _cases(self) -> list[MappingCase]:
        """One case a mapping."""
        turns = itertools.count()
        return [self._case(f, next(turns) if f.pp > 1 else 0) for f in self.foldings]

    def _case(self, folding: Folding, turn: int) -> MappingCase:
        case = MappingCase(
            model="",
            mapping=folding.mapping_id,
            precision=self.shown.precision,
            mutation=self.inject,
            feature=self.shown.feature,
            batch=self.shown.batch,
            subject=self.subject,
            options={k: v for k, v in self.options.items() if k not in pipelines.OPTIONS},
        )
        if folding.pp == 1:
            return case
        if case.batch == "padded":
            case = replace(case, batch="rows")
        fields = pipelines.pipeline_of(
            folding,
            turn=turn,
            num_layers=len(find_parts(self.built.module).layers),
            rows=self._least_rows(case),
            options=self.options,
        )
        return replace(case, **fields)

    def _read(self, case: MappingCase) -> list[Any]:
        """All batches that a mapping reads; mappings with equal dp read the same."""
        key = case.batch, case.folding.dp
        if key not in self.read:
            batches, dp = batches_of(self.built, case.batch), case.folding.dp
            steps = range(STEPS + 1)
            self.read[key] = [batches(step, rank, dp) for step in steps for rank in range(dp)]
        return self.read[key]

    def _least_rows(self, case: MappingCase) -> int:
        """Rows of the smallest batch that a mapping reads; 0 where a batch has none."""
        try:
            return min(map(rows_of, self._read(case)))
        except ValueError:
            return 0

    def _refusal(self, case: MappingCase) -> str | None:
        """Why a mapping is not run: its batches cannot be cut, or set-up refuses it."""
        if case.folding.pp > 1 and not hasattr(self.built.module, "split_batch"):
            try:
                for batch in self._read(case):
                    split(batch, max(1, case.num_microbatches or 1))
            except ValueError as error:
                return str(error)
        return refusal_of(case, self.built.module)

    def _in_a_ring(self, cases: Sequence[MappingCase]) -> list[MappingCase]:
        """The cases, each resuming its predecessor; a last one closes the ring."""
        if not self.resumes:
            return list(cases)
        before = ["", *(case.key for case in cases)]
        ring = [
            replace(case, resumes=key, sharded=number % 2 == 0)
            for number, (case, key) in enumerate(zip(cases, before, strict=False))
        ]
        return [*ring, replace(ring[0], trains=False, resumes=before[-1])]

    def _mapping(
        self, case: MappingCase, failures: Mapping[str, str], runs: Mapping[Way, Any]
    ) -> MappingResult:
        result = _no_result(case)
        if case.key in failures:
            story = failures[case.key]
            refused = case.folding.pp > 1 and refused_step(story)
            return replace(result, refusal=refused) if refused else replace(result, failure=story)
        ranks = self._records(case)
        refusals = {rank.get("refusal") for rank in ranks}
        if refusals != {None}:
            return replace(result, refusal="; ".join(sorted(map(str, refusals))))
        checks, deviations = compare_mapping(
            case.folding, ranks, runs[Way.of(case)], tolerance=self.tolerance
        )
        self.deviations += deviations
        return replace(result, checks=tuple(checks))

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
            story = failures[resumed.key]
            if resumed.trains or refused_step(story):
                return result
            return replace(result, failure=f"resuming under {under}: {story}")
        expected = plain["runs"][Way.of(saved)]["resumed"][Way.of(resumed)]
        check = compare_resumed(self._records(resumed), expected, self.tolerance)
        return replace(result, checks=(*result.checks, check), resumed_under=under)

    def _records(self, case: MappingCase) -> list[dict[str, Any]]:
        folder = self.folder / "ranks" / case.key
        # Written by processes of this call.
        return [
            torch.load(folder / f"rank{rank}.pt", weights_only=False)
            for rank in range(case.folding.world)
        ]


def refused_step(story: str) -> str | None:
    """What a pipeline says of a training step that it cannot run, if that ended the ranks."""
    lines = [line for line in story.splitlines() if PROTOCOL in line]
    return lines[-1].rpartition("ValueError: ")[2].strip() if lines else None


def _no_result(case: MappingCase) -> MappingResult:
    pipeline = case.schedule if case.folding.pp > 1 else ""
    virtual = f" x{case.virtual_stages}" if case.virtual_stages > 1 else ""
    return MappingResult(case.mapping, schedule=f"{pipeline}{virtual}")


def _run_all(cases: Sequence[MappingCase], folder: Path) -> dict[str, str]:
    """Run all cases; why there is no result, by key."""
    failures: dict[str, str] = {}
    left = list(cases)
    crashes = 0
    while left and crashes < MOST_CRASHES:
        run = run_world(
            left[0].folding.world, left, folder, case_timeout=_MAPPING_TIMEOUT_S, run=run_mapping
        )
        if run.failure is None:
            return failures
        left, crashes = _after_crash(left, run, failures), crashes + 1
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
    if left[place].folding.pp > 1 and refused_step(str(run.failure)):
        # The step fits no pipeline at all.
        failures |= {case.key: str(run.failure) for case in rest if case.folding.pp > 1}
        rest = [case for case in rest if case.folding.pp == 1]
    return [replace(case, resumes="") if case.resumes in failures else case for case in rest]


def _tolerance(built: Built, precision: str) -> float:
    if precision == "32":
        return 1e-5
    return 1e-6 if any(is_hugging_face(m) for m in built.module.modules()) else 1e-10
