"""The command `lightning-fold schedule`: what a pipeline schedule costs, before anything runs.

Owns the table, the JSON and which schedules are shown together; the figures are the simulator's.
Costs are those of all layers of a rank, so that schedules with different numbers of chunks compare.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from lightning_fold.checkpoint.files import write_whole
from lightning_fold.cli_config import CommandParser, in_options, writable
from lightning_fold.cli_errors import UsageError
from lightning_fold.pipeline.picture import draw_timelines
from lightning_fold.pipeline.schedules import (
    SCHEDULES,
    Plan,
    actions_of,
    check_count,
    schedule_of,
)
from lightning_fold.pipeline.simulate import Costs, simulate
from lightning_fold.pipeline.timeline import Timeline, write_trace

ALL = "all"
MAX_CELLS = 1 << 14
_REFERENCES = ("1f1b", "gpipe")
_OPTIONS = {
    "pipeline_schedule": "schedule",
    "pipeline_parallel_size": "pp",
    "virtual_pipeline_size": "vpp",
    "num_microbatches": "microbatches",
    "pipeline_overlap": "overlap",
    "group": "group",
    "forward": "forward",
    "input_grad": "input-grad",
    "weight_grad": "weight-grad",
    "hop": "hop",
}
_UNIT = "1 = a rank's forward at --forward 1"
_SHOWN_RANKS = 16


@dataclass(frozen=True)
class _Row:
    """One schedule on the clock."""

    plan: Plan
    timeline: Timeline

    @property
    def name(self) -> str:
        """Its schedule, and whether that is woven."""
        return f"{self.plan.name} (woven)" if self.plan.overlap else self.plan.name

    @property
    def live(self) -> list[int]:
        """Most live activations by rank; one belongs to a microbatch and a chunk."""
        return list(self.timeline.peak_live.values())

    @property
    def whole(self) -> float:
        """The largest of them, as microbatches in all layers of a rank."""
        return max(self.live) / self.plan.vpp


def run_schedule(words: list[str]) -> None:
    """Print idle time, duration and memory of one schedule, or of all.

    Raises:
        UsageError: An option is wrong.
        ValueError: The schedule cannot serve the numbers.
    """
    options = _parser().parse_args(words[1:])
    to_file = {name: getattr(options, name) for name in ("json", "png", "trace")}
    if options.json == "-":
        to_file["json"] = None
    files = {name: writable("schedule", file, f"--{name}") for name, file in to_file.items()}
    try:
        _costs(options).check(num_stages=1)
        shown, references, refused = _rows(options)
    except ValueError as error:
        raise type(error)(in_options(str(error), _OPTIONS)) from None
    if options.json == "-":
        print(json.dumps(_json(options, shown)))
    else:
        print("\n".join(_text(options, shown, references, refused)))
    timelines = {f"{row.name}, vpp {row.plan.vpp}": row.timeline for row in shown}
    if files["json"] is not None:
        write_whole(files["json"], (json.dumps(_json(options, shown), indent=1) + "\n").encode())
    if files["png"] is not None:
        title = f"pp {options.pp}, {options.microbatches} microbatches"
        title += ", woven" if options.overlap and options.schedule != ALL else ""
        draw_timelines(timelines, files["png"], title=title, unit=_UNIT)
    if files["trace"] is not None:
        write_trace(files["trace"], timelines)


def _parser() -> CommandParser:
    parser = CommandParser(
        "schedule",
        "Show the idle time (bubble), the duration and the live activations of a pipeline "
        "schedule. A rank's layers cost --forward, --input-grad and --weight-grad per microbatch; "
        "its chunks share them.",
    )
    parser.add_argument("--pp", type=int, required=True, help="ranks of the pipeline")
    parser.add_argument("--vpp", type=int, help="chunks of each rank; the fewest legal ones")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches of a step")
    parser.add_argument(
        "--schedule", metavar="NAME", default=ALL, help=f"{', '.join(SCHEDULES)}, or {ALL}"
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help=f"weave pairs of a forward and a backward; of {ALL}, also show those that can",
    )
    parser.add_argument("--group", type=int, help="microbatch group size of interleaved_1f1b")
    for name in ("forward", "input-grad", "weight-grad"):
        parser.add_argument(f"--{name}", type=float, default=1.0, metavar="COST")
    parser.add_argument("--hop", type=float, default=0.0, metavar="COST", help="of a message")
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="the figures; stdout alone"
    )
    parser.add_argument("--png", metavar="FILE", help="draw the timeline")
    parser.add_argument("--trace", metavar="FILE", help="the timeline for Perfetto or Chrome")
    return parser


def _rows(options: argparse.Namespace) -> tuple[list[_Row], list[_Row], list[str]]:
    """What was asked for, what it is compared with, and what cannot be run."""
    if options.schedule != ALL:
        row = _row(options, options.schedule, options.vpp, overlap=options.overlap)
        plain = [_row(options, options.schedule, options.vpp)] if options.overlap else []
        others = [name for name in _REFERENCES if name != options.schedule]
        return [row], plain + [_row(options, name, None) for name in others], []
    if options.vpp is not None:
        check_count("virtual_pipeline_size", options.vpp)
    rows, refused = [], []
    for name, schedule in SCHEDULES.items():
        legal = options.vpp if schedule.allows(options.vpp or 0) else None
        try:
            rows.append(_row(options, name, legal))
            if options.overlap and schedule.overlaps:
                rows.append(_row(options, name, legal, overlap=True))
        except UsageError:
            raise
        except ValueError as error:
            refused.append(str(error))
    if not rows:
        raise ValueError(refused[-1])
    return rows, [], refused


def _row(options: argparse.Namespace, name: str, vpp: int | None, *, overlap: bool = False) -> _Row:
    """Simulate one schedule; the fewest legal chunks where none are given."""
    schedule = schedule_of(name)
    chunks = schedule.least_stages if vpp is None else vpp
    cells = options.pp * chunks * options.microbatches
    if cells > MAX_CELLS:
        raise UsageError(
            f"schedule: pp*vpp*microbatches = {options.pp}*{chunks}*{options.microbatches} = "
            f"{cells} is more than a table can show. Legal: up to {MAX_CELLS}.  "
            "Change `--microbatches`."
        )
    is_asked = name == options.schedule or schedule.grouped
    plan = actions_of(
        name,
        pp=options.pp,
        vpp=chunks,
        num_microbatches=options.microbatches,
        group=options.group if is_asked else None,
        overlap=overlap,
    )
    return _Row(plan, simulate(plan, _costs(options, chunks)))


def _costs(options: argparse.Namespace, chunks: int = 1) -> Costs:
    """Of one of a rank's chunks."""
    return Costs(
        forward=options.forward / chunks,
        input_grad=options.input_grad / chunks,
        weight_grad=options.weight_grad / chunks,
        hop=options.hop,
    )


def _json(options: argparse.Namespace, rows: list[_Row]) -> dict[str, Any]:
    if options.schedule != ALL:
        return _figures(options, rows[0])
    return {
        "schedule": ALL,
        "pp": options.pp,
        "microbatches": options.microbatches,
        "schedules": [_figures(options, row) for row in rows],
    }


def _figures(options: argparse.Namespace, row: _Row) -> dict[str, Any]:
    plan, timeline = row.plan, row.timeline
    return {
        "schedule": plan.name,
        "pp": plan.pp,
        "vpp": plan.vpp,
        "microbatches": plan.num_microbatches,
        "overlap": plan.overlap,
        "bubble": timeline.bubble,
        "makespan": timeline.makespan,
        "busy": list(timeline.busy.values()),
        # By pipeline rank; the second one of live microbatches by virtual stage.
        "pairs": [
            sum(action.sub_actions is not None for action in listed)
            for listed in plan.actions.values()
        ],
        "live_microbatches": row.live,
        "live_microbatches_of_stages": list(timeline.peak_live_of_stages.values()),
        "waiting_weight_gradients": list(timeline.peak_waiting.values()),
        "costs": {
            "forward": options.forward,
            "input_grad": options.input_grad,
            "weight_grad": options.weight_grad,
            "hop": options.hop,
        },
    }


def _text(
    options: argparse.Namespace, shown: list[_Row], references: list[_Row], refused: list[str]
) -> list[str]:
    lines = [
        f"pp {options.pp}, {options.microbatches} microbatches. A rank's layers cost forward "
        f"{options.forward:g}, input gradient {options.input_grad:g}, weight gradient "
        f"{options.weight_grad:g}; a hop {options.hop:g}.",
        "",
        f"{'schedule':<24} {'vpp':>3} {'bubble':>8} {'makespan':>9}  "
        f"{'live microbatches':>17}  live chunks by rank",
        *map(_line, shown),
        *(f"{_line(row)}   (to compare)" for row in references),
        "",
        _memory_line(options, [*shown, *references]),
    ]
    names = in_options("\n".join(f"refused: {line}" for line in refused), _OPTIONS)
    return lines + names.splitlines()


def _line(row: _Row) -> str:
    live = list(map(str, row.live))
    if len(live) > _SHOWN_RANKS:
        live = [*live[: _SHOWN_RANKS - 2], "...", live[-1]]
    return (
        f"{row.name:<24} {row.plan.vpp:>3} {row.timeline.bubble:>8.1%} "
        f"{row.timeline.makespan:>9.2f}  {row.whole:>17.4g}  {' '.join(live)}"
    )


def _memory_line(options: argparse.Namespace, rows: list[_Row]) -> str:
    bubble = {row.name: f"{row.timeline.bubble:.1%}" for row in rows}
    pp, m = options.pp, options.microbatches
    return (
        f"1f1b gains memory over gpipe, no time (bubble {bubble['1f1b']} against "
        f"{bubble['gpipe']}): live microbatches min(pp, m) = min({pp}, {m}) = {min(pp, m)} "
        f"against m = {m}."
    )
