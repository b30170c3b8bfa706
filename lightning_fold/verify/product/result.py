"""The result of a verification: values, one table, JSON. Runs nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from lightning_fold.verify.product.checks import NAMES, StepCheck
from lightning_fold.verify.product.diagnosis import Finding

_SHORT = {name: name.replace(" gradient", " grad") for name in NAMES}


@dataclass(frozen=True)
class MappingResult:
    """What became of one mapping.

    Attributes:
        mapping: Mapping id.
        checks: In order of comparison.
        refusal: Why it was not run, in the words of set-up.
        failure: Why there is no result: a crash or a hang.
        resumed_under: Mapping id under which its checkpoint was resumed.
        schedule: Of its pipeline, and `x` virtual stages; empty with pp = 1.
    """

    mapping: str
    checks: tuple[StepCheck, ...] = ()
    refusal: str | None = None
    failure: str | None = None
    resumed_under: str = ""
    schedule: str = ""

    @property
    def failed(self) -> list[StepCheck]:
        """Checks beyond their tolerance, the first in time first."""
        return sorted((c for c in self.checks if not c.passed), key=lambda check: check.step)

    @property
    def passed(self) -> bool:
        """Whether all was compared and is close."""
        return bool(self.checks) and not self.failed and self.failure is None

    @property
    def verdict(self) -> str:
        """One word, or the first check that failed."""
        if self.refusal is not None:
            return "refused"
        if self.failure is not None:
            return "FAILED"
        return "ok" if self.passed else f"OFF: {self.failed[0].name}"


@dataclass(frozen=True)
class VerifyResult:
    """What `verify` found.

    Attributes:
        subject: The model, in words.
        shrunk: What was changed to make it small; empty if nothing was.
        ranks: Number of ranks.
        tolerance: Largest relative error that passes.
        injected: Name of the injected mutation; empty for none.
        mappings: All legal ones, or those that were asked for.
        findings: What is off, and the likely cause.
        notes: What was left out of the recipe.
        seconds: Wall time.
    """

    subject: str
    shrunk: str
    ranks: int
    tolerance: float
    injected: str
    mappings: tuple[MappingResult, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def run(self) -> list[MappingResult]:
        """Mappings that were not refused."""
        return [result for result in self.mappings if result.refusal is None]

    @property
    def passed(self) -> bool:
        """Whether a mapping ran, and every one that did is equal."""
        return bool(self.run) and all(result.passed for result in self.run)

    def headline(self) -> str:
        """One line: how many mappings are legal, refused and run."""
        refused = len(self.mappings) - len(self.run)
        return (
            f"{self.ranks} ranks: {len(self.mappings)} legal mappings{self._pipelines()}, "
            f"{refused} refused, {len(self.run)} run against one process in {self.seconds:.0f} s"
        )

    def _pipelines(self) -> str:
        number = sum(bool(result.schedule) for result in self.mappings)
        return f" ({len(self.mappings) - number} with pp = 1)" if number else ""

    def table(self) -> Table:
        """Mappings by checks: worst relative errors, ratios of what is off, verdict."""
        names = shown_checks(self.mappings)
        schedules = ["schedule"] if any(result.schedule for result in self.run) else []
        table = Table("mapping", *schedules, *(_SHORT[name] for name in names), "verdict")
        for result in self.run:
            found = {check.name: check for check in result.checks}
            cells = [*(result.schedule or "-" for _ in schedules)]
            cells += [_cell(found.get(name)) for name in names]
            style = None if result.passed else "bold red"
            table.add_row(result.mapping, *cells, result.verdict, style=style)
        return table

    def refusals(self) -> list[str]:
        """Refused mappings by reason, one line a reason."""
        by_reason: dict[str, list[str]] = {}
        for result in self.mappings:
            if result.refusal is not None:
                by_reason.setdefault(" ".join(result.refusal.split()), []).append(result.mapping)
        return [
            f"refused {len(mappings)}: {', '.join(mappings)}: {reason}"
            for reason, mappings in by_reason.items()
        ]

    def failures(self) -> list[str]:
        """Crashes and hangs, with their stories."""
        return [f"{r.mapping} failed: {r.failure}" for r in self.mappings if r.failure is not None]

    def to_json(self) -> dict[str, Any]:
        """Every figure, as JSON values."""
        return {
            "subject": self.subject,
            "shrunk": self.shrunk,
            "ranks": self.ranks,
            "tolerance": self.tolerance,
            "injected": self.injected,
            "passed": self.passed,
            "legal": len(self.mappings),
            "refused": len(self.mappings) - len(self.run),
            "run": len(self.run),
            "seconds": round(self.seconds, 1),
            "notes": list(self.notes),
            "findings": [_finding_json(finding) for finding in self.findings],
            "mappings": [_mapping_json(result) for result in self.mappings],
        }


def shown_checks(mappings: Sequence[MappingResult]) -> list[str]:
    """Checks that any mapping has, in order of comparison."""
    present = {check.name for result in mappings for check in result.checks}
    return [name for name in NAMES if name in present]


def _cell(check: StepCheck | None) -> str:
    if check is None:
        return "-"
    if check.tolerance == 0:
        return f"{check.error:.0f}"
    ratio = "" if check.passed or math.isnan(check.ratio) else f" x{check.ratio:.3g}"
    return f"{check.error:.0e}{ratio}"


def _mapping_json(result: MappingResult) -> dict[str, Any]:
    return {
        "mapping": result.mapping,
        "verdict": result.verdict,
        "refusal": result.refusal,
        "failure": result.failure,
        "resumed_under": result.resumed_under,
        "schedule": result.schedule,
        "checks": {check.name: _check_json(check) for check in result.checks},
    }


def _check_json(check: StepCheck) -> dict[str, Any]:
    return {
        "error": _number(check.error),
        "tolerance": check.tolerance,
        "passed": check.passed,
        "first_step": check.step,
        "where": check.where,
        "ratio": _number(check.ratio),
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    plain = asdict(finding)
    return {**plain, "ratio": _number(finding.ratio), "text": str(finding)}


def _number(value: float) -> float | str | None:
    """JSON has neither infinity nor NaN."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else "infinite"
