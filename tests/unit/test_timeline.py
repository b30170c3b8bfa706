"""Timelines: their figures, the trace file there and back, and the picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from lightning_fold.checkpoint import files
from lightning_fold.pipeline import picture
from lightning_fold.pipeline.picture import draw_timelines
from lightning_fold.pipeline.schedules import actions_of
from lightning_fold.pipeline.simulate import Costs, simulate
from lightning_fold.pipeline.timeline import Span, Timeline, read_trace, write_trace


def simulated(name: str, *, pp: int, vpp: int, n: int) -> Timeline:
    plan = actions_of(name, pp=pp, vpp=vpp, num_microbatches=n)
    return simulate(plan, Costs(1 / vpp, 1 / vpp, 1 / vpp))


ZBV = simulated("zbv", pp=2, vpp=2, n=4)


def test_spans_of_all_ranks_are_merged_and_start_at_zero() -> None:
    late = [Span(1, 1, 0, "F", 7.0, 9.0), Span(1, 1, 0, "B", 9.0, 12.0)]
    early = [Span(0, 0, 0, "B", 13.0, 15.0), Span(0, 0, 0, "F", 5.0, 6.0)]
    merged = Timeline.merged([late, early])
    assert [(s.rank, s.start_s, s.end_s) for s in merged.spans] == [
        (0, 0.0, 1.0),
        (0, 8.0, 10.0),
        (1, 2.0, 4.0),
        (1, 4.0, 7.0),
    ]
    assert (merged.makespan, merged.busy) == (10.0, {0: 3.0, 1: 5.0})
    assert merged.bubble == pytest.approx(1 - 8 / 20)
    assert merged.order(0) == ("0F0", "0B0")
    assert merged.peak_live == {0: 1, 1: 1}


def test_live_pairs_are_counted_until_their_backward() -> None:
    kinds = ["F0", "F1", "I0", "F2", "I1", "W0", "W1", "I2", "W2"]
    spans = [Span(0, 0, int(k[1]), k[0], float(i), i + 1.0) for i, k in enumerate(kinds)]
    other = [Span(0, 1, 0, "F", 1.5, 1.6), Span(0, 1, 0, "B", 8.5, 8.6)]
    both = Timeline((*spans, *other))
    assert both.peak_live == {0: 3}
    assert both.peak_live_of_stages == {0: 2, 1: 1}
    assert both.peak_waiting == {0: 2}


def woven_run() -> Timeline:
    """One rank's pieces as a run records them: F0, F1, then F2 woven with B0."""
    pieces = ["F0", "F0", "F1", "B0", "F2", "B0", "F2", "B0", "F2", "B1"]
    return Timeline(
        tuple(Span(0, 3, int(k[1]), k[0], float(i), i + 0.5) for i, k in enumerate(pieces))
    )


def test_pieces_of_a_computation_count_as_one() -> None:
    run = woven_run()
    assert run.order(0) == ("3F0", "3F1", "3B0", "3F2", "3B1")
    assert run.durations == {
        (3, "F", 0): 1.0,
        (3, "F", 1): 0.5,
        (3, "F", 2): 1.5,
        (3, "B", 0): 1.5,
        (3, "B", 1): 0.5,
    }
    assert run.mean_durations == {(3, "F"): 1.0, (3, "B"): 1.0}
    assert run.busy == {0: 5.0}


def test_a_backward_in_pieces_ends_with_the_last_of_them() -> None:
    assert woven_run().peak_live == {0: 3}
    assert woven_run().peak_live_of_stages == {3: 3}
    # Without the pieces of B0 after the first one of F2.
    early = Timeline(tuple(s for s in woven_run().spans if s.kind != "B" or s.start_s in (3, 9)))
    assert early.peak_live == {0: 2}
    delayed = ["F0", "F1", "I0", "I0", "I1", "W0", "I1", "W1", "W1"]
    spans = [Span(0, 0, int(k[1]), k[0], float(i), i + 0.5) for i, k in enumerate(delayed)]
    # The weight gradients of 0 are done before those of 1 are, and after I of 1 has begun.
    assert Timeline(tuple(spans)).peak_waiting == {0: 2}
    assert Timeline(tuple(spans)).peak_live == {0: 2}


def test_nothing_is_kept_where_no_backward_follows() -> None:
    plan = actions_of("gpipe", pp=2, vpp=1, num_microbatches=3, forward_only=True)
    assert simulate(plan).peak_live == {0: 0, 1: 0}


def test_an_empty_timeline_has_figures() -> None:
    empty = Timeline.merged([])
    assert (empty.makespan, empty.bubble, empty.busy, empty.peak_live) == (0.0, 0.0, {}, {})


def test_trace_comes_back(tmp_path: Path) -> None:
    measured = Timeline(
        tuple(Span(s.rank, s.stage, s.microbatch, s.kind, s.start_s, s.end_s + 0.1)
              for s in ZBV.spans)
    )  # fmt: skip
    path = tmp_path / "trace.json"
    write_trace(path, {"predicted": ZBV, "measured": measured})
    back = read_trace(path)
    assert list(back) == ["predicted", "measured"]
    for name, written in (("predicted", ZBV), ("measured", measured)):
        assert len(back[name].spans) == len(written.spans)
        for read, span in zip(back[name].spans, written.spans, strict=True):
            assert (read.start_s, read.end_s) == pytest.approx((span.start_s, span.end_s))
            assert read.__dict__ | {"start_s": 0, "end_s": 0} == (
                span.__dict__ | {"start_s": 0, "end_s": 0}
            )
    assert list(tmp_path.iterdir()) == [path]


def test_trace_is_what_viewers_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, {"predicted": ZBV})
    events = json.loads(path.read_text())["traceEvents"]
    labels = [(e["name"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert labels == [
        ("process_name", 0, "predicted"),
        ("thread_name", 0, "rank 0"),
        ("thread_name", 1, "rank 1"),
    ]
    first = next(e for e in events if e["ph"] == "X")
    assert first == {
        "ph": "X",
        "name": "F 0",
        "cat": "F",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 5e5,
        "args": {"rank": 0, "stage": 0, "microbatch": 0, "kind": "F"},
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": 3}',
        '{"traceEvents": [{"name": "x"}]}',
        '{"traceEvents": [{"name": "F", "ph": "X", "pid": 4}]}',
        '{"traceEvents": [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "p"}}, '
        '{"name": "x", "ph": "X", "pid": 0, "ts": 0, "dur": 1, "args": {"rank": 0, "stage": 0, '
        '"microbatch": 0, "kind": "Q"}}]}',
    ],
)
def test_other_files_are_no_traces(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no trace of a pipeline"):
        read_trace(path)


def test_failed_write_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    path = tmp_path / "trace.json"
    path.write_text("an older trace")
    monkeypatch.setattr(files, "publish", fail)
    with pytest.raises(OSError, match="disk full"):
        write_trace(path, {"predicted": ZBV})
    assert path.read_text() == "an older trace"
    assert list(tmp_path.iterdir()) == [path]


def boxes(axes: Any) -> list[tuple[tuple[float, ...], int]]:
    """Colour and number of boxes of every collection of a panel."""
    return [
        (to_rgb(collection.get_facecolor()[0]), len(collection.get_paths()))
        for collection in axes.collections
    ]


@pytest.mark.parametrize(
    ("name", "pp", "vpp", "n"),
    [("1f1b", 2, 1, 4), ("zbv", 4, 2, 8), ("interleaved_1f1b", 8, 2, 16)],
)
def test_picture_has_one_numbered_box_per_computation(name: str, pp: int, vpp: int, n: int) -> None:
    found = simulated(name, pp=pp, vpp=vpp, n=n)
    figure = picture._figure({"predicted": found}, title="", unit="s")
    (axes,) = figure.axes
    assert sum(number for _, number in boxes(axes)) == len(found.spans)
    for kind in "FBIW":
        for chunk in range(vpp):
            colour = picture._colour(kind, chunk, vpp)
            here = sum(number for seen, number in boxes(axes) if seen == pytest.approx(colour))
            stages = {s for s, place in picture._chunks(found).items() if place == chunk}
            assert here == sum(s.kind == kind and s.stage in stages for s in found.spans)
    numbers = sorted(int(text.get_text()) for text in axes.texts)
    assert numbers == sorted(span.microbatch for span in found.spans)
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        f"rank {rank}" for rank in range(pp)
    ]
    assert f"bubble {found.bubble:.1%}" in axes.get_title(loc="left")


def test_numbers_stay_inside_their_boxes() -> None:
    found = simulated("zbv", pp=8, vpp=2, n=16)
    figure = picture._figure({"predicted": found}, title="", unit="s")
    figure.canvas.draw()
    (axes,) = figure.axes
    per_unit = axes.transData.transform((0.5, 0))[0] - axes.transData.transform((0, 0))[0]
    for text in axes.texts:
        assert text.get_window_extent().width < per_unit
        assert text.get_fontsize() >= 5


def test_pieces_share_a_number_and_narrow_ones_have_no_edge() -> None:
    pieces = 100
    spans = [
        Span(0, 0, m, kind, t + i / pieces, t + (i + 1) / pieces)
        for t, (kind, m) in enumerate([("F", 4), ("F", 5), ("B", 4), ("B", 5)])
        for i in range(pieces)
    ]
    whole = Timeline(tuple(Span(0, 0, m, "F", float(m), m + 1.0) for m in range(4)))
    figure = picture._figure({"whole": whole, "pieces": Timeline(tuple(spans))}, title="", unit="s")
    upper, lower = figure.axes
    assert [text.get_text() for text in lower.texts] == ["4", "5", "4", "5"]
    middles = [text.get_position()[0] for text in lower.texts]
    assert middles == pytest.approx([0.5, 1.5, 2.5, 3.5])
    assert sum(number for _, number in boxes(lower)) == 4 * pieces
    assert {width for c in lower.collections for width in c.get_linewidths()} == {0.0}
    assert {width for c in upper.collections for width in c.get_linewidths()} == {picture._EDGE}


def test_numbers_are_in_the_pieces_of_a_woven_pair() -> None:
    plan = actions_of("1f1b", pp=4, vpp=1, num_microbatches=8, overlap=True)
    found = simulate(plan)
    figure = picture._figure({"predicted": found}, title="", unit="s")
    (axes,) = figure.axes
    numbers = sorted(int(text.get_text()) for text in axes.texts)
    assert numbers == sorted(span.microbatch for span in found.spans)


def test_pieces_widen_a_picture_twice_at_most() -> None:
    def width(pieces: int) -> float:
        spans = [
            Span(0, 0, m, "F", m + i / pieces, m + (i + 1) / pieces)
            for m in range(80)
            for i in range(pieces)
        ]
        figure = picture._figure({"run": Timeline(tuple(spans))}, title="", unit="s")
        return float(figure.get_size_inches()[0])

    assert width(2) == width(20)
    assert width(2) - picture._SIDES == pytest.approx(2 * (width(1) - picture._SIDES))


def test_panels_share_their_axis_and_show_both_bubbles() -> None:
    slower = Timeline(
        tuple(Span(s.rank, s.stage, s.microbatch, s.kind, 2 * s.start_s, 2 * s.start_s + 0.5)
              for s in ZBV.spans)
    )  # fmt: skip
    figure = picture._figure({"predicted": ZBV, "measured": slower}, title="zbv", unit="s")
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim() == (0.0, slower.makespan)
    assert upper.get_title(loc="left").startswith(f"predicted: bubble {ZBV.bubble:.1%}")
    assert lower.get_title(loc="left").startswith(f"measured: bubble {slower.bubble:.1%}")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [
        "F forward, chunk 0",
        "F forward, chunk 1",
        "I input gradients, chunk 0",
        "I input gradients, chunk 1",
        "W weight gradients, chunk 0",
        "W weight gradients, chunk 1",
    ]


def test_png_is_written_whole_without_pyplot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    path = tmp_path / "timeline.png"
    path.write_text("an older picture")
    draw_timelines({"predicted": ZBV}, path, title="zbv")
    assert imread(path).shape[1] > 900
    assert list(tmp_path.iterdir()) == [path]
    assert "matplotlib.pyplot" not in sys.modules
