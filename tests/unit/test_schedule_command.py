"""`lightning-fold schedule`: table, JSON, files and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_fold import cli_schedule
from lightning_fold.cli import main
from lightning_fold.pipeline.timeline import read_trace


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    """Run the command; its stdout, or its stderr where it fails."""
    assert main(["schedule", *words]) == status
    captured = capsys.readouterr()
    if status:
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        assert captured.err.startswith("lightning-fold: error: ")
        return captured.err.strip()
    assert captured.err == ""
    return captured.out


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *words, "--json"))
    return found


def test_one_schedule_is_shown_beside_1f1b_and_gpipe(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pp", "4", "--vpp", "2", "--microbatches", "8", "--schedule", "interleaved_1f1b"]
    lines = run(capsys, *words).splitlines()
    assert lines[0] == (
        "pp 4, 8 microbatches. A rank's layers cost forward 1, input gradient 1, weight gradient "
        "1; a hop 0."
    )
    rows = [line.split() for line in lines[3:6]]
    assert rows[0] == ["interleaved_1f1b", "2", "15.8%", "28.50", "5.5", "11", "9", "7", "5"]
    assert rows[1] == ["1f1b", "1", "27.3%", "33.00", "4", "4", "3", "2", "1", "(to", "compare)"]
    assert rows[2][:5] == ["gpipe", "1", "27.3%", "33.00", "8"]
    assert lines[-1] == (
        "1f1b gains memory over gpipe, no time (bubble 27.3% against 27.3%): live microbatches "
        "min(pp, m) = min(4, 8) = 4 against m = 8."
    )


def test_all_schedules_are_shown_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "--pp", "4", "--microbatches", "8", "--schedule", "all").splitlines()
    bubbles = {line.split()[0]: line.split()[2] for line in lines[3:9]}
    assert bubbles == {
        "gpipe": "27.3%",
        "1f1b": "27.3%",
        "interleaved_1f1b": "15.8%",
        "interleaved_zero_bubble": "5.9%",
        "zbv": "5.9%",
        "dualpipev": "5.9%",
    }
    assert not any(line.startswith("refused") for line in lines)


def test_what_cannot_serve_the_numbers_is_listed_as_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = run(capsys, "--pp", "4", "--vpp", "3", "--microbatches", "7").splitlines()
    shown = [line.split()[:2] for line in lines[3:7]]
    # A number of chunks that a schedule does not take leaves it its own.
    assert ["interleaved_1f1b", "3"] in shown
    assert ["1f1b", "1"] in shown
    refused = [line for line in lines if line.startswith("refused: ")]
    assert [line.split("'")[1] for line in refused] == ["zbv", "dualpipev"]
    assert refused[0].endswith("Change `--microbatches`.")


def test_json_of_one_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pp", "4", "--microbatches", "8", "--schedule"]
    found = figures(capsys, *words, "1f1b")
    assert found["bubble"] == pytest.approx(9 / 33)
    assert found["makespan"] == 33.0
    assert found["live_microbatches"] == [4, 3, 2, 1]
    names = ("schedule", "pp", "vpp", "microbatches")
    assert [found[name] for name in names] == ["1f1b", 4, 1, 8]
    found = figures(capsys, *words, "zbv")
    assert (found["vpp"], found["live_microbatches"]) == (2, [8, 8, 8, 8])
    assert found["live_microbatches_of_stages"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert found["bubble"] == pytest.approx(1.5 / 25.5)


def test_a_woven_schedule_is_shown_beside_itself(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pp", "4", "--microbatches", "8", "--schedule", "1f1b", "--overlap"]
    lines = run(capsys, *words).splitlines()
    rows = [line.split() for line in lines[3:6]]
    assert rows[0] == ["1f1b", "(woven)", "1", "27.3%", "33.00", "8", "8", "6", "4", "2"]
    assert rows[1] == ["1f1b", "1", "27.3%", "33.00", "4", "4", "3", "2", "1", "(to", "compare)"]
    assert rows[2][0] == "gpipe"
    assert lines[6] == ""
    words[5] = "dualpipev"
    lines = run(capsys, *words, "--vpp", "2").splitlines()
    assert [line.split()[0] for line in lines[3:7]] == ["dualpipev", "dualpipev", "1f1b", "gpipe"]
    assert [line.split()[-6] for line in lines[3:4]] == ["27.00"]
    assert "(bubble 27.3% against 27.3%)" in lines[-1]


def test_all_schedules_are_shown_with_those_that_weave(capsys: pytest.CaptureFixture[str]) -> None:
    # With hops, the woven 1f1b and the other one differ in the line about memory as well.
    words = ["--pp", "4", "--microbatches", "8", "--hop", "0.1"]
    plain = run(capsys, *words).splitlines()
    lines = run(capsys, *words, "--overlap").splitlines()
    names = [line.split("  ")[0] for line in lines[3:12]]
    assert [name for name in names if "(woven)" in name] == [
        "1f1b (woven)",
        "interleaved_1f1b (woven)",
        "dualpipev (woven)",
    ]
    assert [line for line in lines if "(woven)" not in line] == plain
    found = figures(capsys, *words, "--overlap")["schedules"]
    assert [row["overlap"] for row in found] == [
        False,
        False,
        True,
        False,
        True,
        *[False] * 3,
        True,
    ]
    # Too few microbatches are refused once.
    few = run(capsys, "--pp", "4", "--microbatches", "7", "--overlap").splitlines()
    refused = [line.split("'")[1] for line in few if line.startswith("refused: ")]
    assert refused == ["zbv", "dualpipev"]


def test_json_has_the_pairs_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pp", "4", "--microbatches", "8", "--schedule", "1f1b"]
    found = figures(capsys, *words, "--overlap")
    assert (found["overlap"], found["pairs"]) == (True, [1, 3, 5, 7])
    assert found["live_microbatches"] == [8, 6, 4, 2]
    found = figures(capsys, *words)
    assert (found["overlap"], found["pairs"]) == (False, [0, 0, 0, 0])


def test_a_woven_picture_and_trace_say_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[Any] = []
    monkeypatch.setattr(
        cli_schedule,
        "draw_timelines",
        lambda timelines, path, **kwargs: titles.append((kwargs["title"], list(timelines))),
    )
    trace = tmp_path / "trace.json"
    words = ["--pp", "2", "--microbatches", "4", "--schedule", "1f1b", "--trace", str(trace)]
    run(capsys, *words, "--overlap", "--png", str(tmp_path / "a.png"))
    run(capsys, *words[:-2], "--png", str(tmp_path / "a.png"))
    # Of all, only some are woven: their own names say which.
    run(capsys, *words[:4], "--overlap", "--png", str(tmp_path / "a.png"))
    assert titles[:2] == [
        ("pp 2, 4 microbatches, woven", ["1f1b (woven), vpp 1"]),
        ("pp 2, 4 microbatches", ["1f1b, vpp 1"]),
    ]
    assert titles[2][0] == "pp 2, 4 microbatches"
    assert "1f1b (woven), vpp 1" in titles[2][1]
    assert list(read_trace(trace)) == ["1f1b (woven), vpp 1"]


def test_costs_are_those_of_a_whole_rank(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ["--forward", "2", "--input-grad", "3", "--weight-grad", "1", "--hop", "0.5"]
    words = ["--pp", "2", "--microbatches", "4", *costs, "--schedule"]
    plain, chunks = figures(capsys, *words, "1f1b"), figures(capsys, *words, "interleaved_1f1b")
    assert plain["busy"] == chunks["busy"] == [24.0, 24.0]
    assert plain["makespan"] > 24 + 6
    assert plain["costs"]["hop"] == 0.5


def test_groups_reach_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pp", "4", "--vpp", "2", "--microbatches", "16", "--schedule", "interleaved_1f1b"]
    assert max(figures(capsys, *words)["live_microbatches"]) == 11
    assert max(figures(capsys, *words, "--group", "8")["live_microbatches"]) == 15


def test_files_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {name: tmp_path / f"timeline.{name}" for name in ("json", "png", "trace")}
    options = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    run(capsys, "--pp", "2", "--microbatches", "4", "--schedule", "zbv", *options)
    assert json.loads(files["json"].read_text())["schedule"] == "zbv"
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    (timeline,) = read_trace(files["trace"]).values()
    assert len(timeline.spans) == 2 * 2 * 4 * 3
    assert sorted(tmp_path.iterdir()) == sorted(files.values())
    run(capsys, "--pp", "2", "--microbatches", "4", *options)
    assert len(json.loads(files["json"].read_text())["schedules"]) == 6
    assert list(read_trace(files["trace"]))[:2] == ["gpipe, vpp 1", "1f1b, vpp 1"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--pp 4 --microbatches 8 --schedule zvb", 1, "Did you mean 'zbv'?"),
        ("--pp 4 --microbatches 8 --schedule zvb", 1, "Change `--schedule`."),
        ("--pp 4 --vpp 2 --microbatches 8 --schedule 1f1b", 1, "Change `--vpp` or `--schedule`."),
        ("--pp 4 --microbatches 7 --schedule zbv", 1, "8, 9, 10, ...  Change `--microbatches`."),
        ("--pp 0 --microbatches 7", 1, "pipeline_parallel_size=0, which"),
        ("--pp 2 --microbatches 7 --vpp 0", 1, "Change `--vpp`."),
        ("--pp 2 --microbatches 0 --schedule 1f1b", 1, "Change `--microbatches`."),
        ("--pp 4 --microbatches 8 --schedule interleaved_1f1b --group 2", 1, "Change `--group`."),
        ("--pp 4 --microbatches 8 --schedule zbv --group 4", 1, "has no groups of microbatches"),
        (
            "--pp 4 --microbatches 8 --schedule zbv --overlap",
            1,
            "'dualpipev'.  Change `--overlap` or `--schedule`.",
        ),
        ("--pp 4 --microbatches 8 --hop nan", 1, "hop=nan is no duration"),
        ("--pp 4 --microbatches 8 --input-grad -1", 1, "Change `--input-grad`."),
        ("--pp 4 --microbatches 8 --forward -1", 1, "forward=-1.0 is no duration"),
        ("--pp 4096 --microbatches 4096 --schedule 1f1b", 2, "4096*1*4096 = 16777216 is more than"),
        ("--pp 4096 --microbatches 4096", 2, "Change `--microbatches`."),
        ("--pp four --microbatches 8", 2, "argument --pp: invalid int value: 'four'"),
        ("--pp 4 --microbatches 8 --png nowhere/a.png", 2, "lies in no directory"),
        ("--pp 4 --microbatches 8 --png a.txt", 2, "Legal: a name that ends in .png. Change"),
        ("--pp 4 --microbatches 8 --trace .", 2, "is a directory. Change `--trace`."),
    ],
)
def test_refusals_are_one_line(
    capsys: pytest.CaptureFixture[str], words: str, status: int, message: str
) -> None:
    assert message in run(capsys, *words.split(), status=status)
