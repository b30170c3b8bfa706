"""Entry points, data, logging, metrics, callbacks and generation under the Trainer."""

from __future__ import annotations

import pytest

from contract.compare import worst
from contract.launch import Run


@pytest.mark.parametrize("mapping", ["tp2ep2", "pp2"])
def test_entry_points_run_twice_on_one_set_up(mapping: str, two: Run, plain: Run) -> None:
    run, reference = two(f"entry_points@{mapping}"), plain("entry_points@plain")
    assert run["built_once"]
    assert run["is_module"]
    assert run["losses"] == pytest.approx(reference["losses"], rel=1e-6)
    assert worst(run["after"], reference["after"])[0] < 1e-9


def test_string_name_is_plain_data_parallelism(two: Run) -> None:
    assert two("string_name")["mapping"] == "tp1cp1dp2pp1-etp1ep1edp2"


def test_dp_ranks_share_out_the_samples(two: Run) -> None:
    first, second = two.ranks("sampler@dp2")
    assert first["distributed"]
    for stage in ("trained", "validated"):
        assert sorted(first[stage] + second[stage]) == list(range(8))


@pytest.mark.parametrize("mapping", ["tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_tp_and_pp_peers_see_the_same_samples(mapping: str, two: Run) -> None:
    first, second = two.ranks(f"sampler@{mapping}")
    assert first["trained"] == second["trained"]
    assert sorted(first["trained"]) == first["validated"] == second["validated"] == list(range(8))


def test_workers_are_seeded_by_dp_rank(two: Run) -> None:
    first, second = two.ranks("sampler@tp2")
    assert first["drawn"] == second["drawn"]
    first, second = two.ranks("sampler@dp2")
    assert not set(first["drawn"]) & set(second["drawn"])


def test_uneven_predict_batches_are_all_returned_once(two: Run) -> None:
    first, second = two.ranks("predict-33@ep2")
    assert (len(first["rows"]), len(second["rows"])) == (17, 16)
    assert sorted(first["rows"] + second["rows"]) == list(range(33))


def test_pp_peers_return_all_predictions(two: Run, four: Run) -> None:
    assert [rank["rows"] for rank in two.ranks("predict-33@pp2")] == [[*range(33)]] * 2
    ranks = [rank["rows"] for rank in four.ranks("predict-33@pp2ep2")]
    assert (len(ranks[0]), len(ranks[1])) == (17, 16)
    assert sorted(ranks[0] + ranks[1]) == list(range(33))
    assert ranks[2:] == ranks[:2]


@pytest.mark.parametrize("mapping", ["ep2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_validation_sees_shards_that_were_written_in_place(
    mapping: str, two: Run, plain: Run
) -> None:
    run, reference = two(f"reshard@{mapping}"), plain("reshard@plain")
    assert run["first"] == pytest.approx(reference["first"], rel=1e-6)
    assert run["second"] == pytest.approx(reference["second"], rel=1e-6)
    assert abs(run["second"] - run["first"]) > 1e-2


def test_full_shards_free_every_layer_between_forward_and_backward(two: Run) -> None:
    assert [rank["held"] for rank in two.ranks("held-full@dp2")] == [0.0, 0.0]
    assert two("held-optimizer@dp2")["held"] == 1.0


@pytest.mark.parametrize("mapping", ["dp2", "tp2", "pp2"])
def test_synced_logs_and_metrics_count_every_sample_once(mapping: str, two: Run) -> None:
    for rank in two.ranks(f"logging@{mapping}"):
        logged, sums = rank["logged"], rank["sums"]
        batches = 3 * (2 if mapping == "dp2" else 1)
        mean = sum(sums) / (12 * 8)
        assert logged["metric_sum"] == sum(sums)
        assert logged["sum"] == pytest.approx(mean * batches)
        assert logged["mean"] == pytest.approx(mean)
        assert logged["metric_mean"] == pytest.approx(mean)


def test_decisions_are_taken_by_all_ranks(two: Run) -> None:
    for rank in two.ranks("logging@tp2"):
        assert rank["decisions"] == [False, True]


@pytest.mark.parametrize(
    "scenario",
    [
        "callbacks-sharded@ep2",
        "callbacks-whole@tp2ep2",
        "callbacks-sharded@pp2",
        pytest.param("callbacks-whole@pp2", marks=pytest.mark.slow),
    ],
)
def test_callbacks_and_loggers_work_as_in_plain_lightning(
    scenario: str, two: Run, plain: Run
) -> None:
    reference = plain("callbacks-x@plain")
    for rank in two.ranks(scenario):
        for key in ("epochs", "best_path", "files"):
            assert rank[key] == reference[key], key
        for key in ("best", "test_loss"):
            assert rank[key] == pytest.approx(reference[key], rel=1e-6), key
    run = two(scenario)
    assert run["tensorboard"] == reference["tensorboard"]
    lines, wanted = run["csv"].splitlines(), reference["csv"].splitlines()
    assert lines[0] == wanted[0]
    assert len(lines) == len(wanted)
    if "tp2" in scenario:
        assert lines == wanted
    if "pp2" in scenario:
        for line, other in zip(lines[1:], wanted[1:], strict=True):
            assert _numbers(line) == pytest.approx(_numbers(other), rel=1e-6)


def _numbers(line: str) -> list[float]:
    return [float(cell or -1) for cell in line.split(",")]


@pytest.mark.parametrize(
    ("mapping", "twin"), [("ep2", "plain2"), pytest.param("pp2", "plain", marks=pytest.mark.slow)]
)
def test_a_second_module_on_one_trainer_is_folded(
    mapping: str, twin: str, two: Run, plain: Run
) -> None:
    run, reference = two(f"second_module@{mapping}"), plain(f"second_module@{twin}")
    assert worst(run["after"], reference["after"])[0] < 1e-9


@pytest.mark.parametrize("mapping", ["ep2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_unseeded_ranks_start_from_rank_0(mapping: str, two: Run) -> None:
    run = two(f"unseeded@{mapping}")
    assert worst(run["start"], run["wanted"])[0] == 0.0


@pytest.mark.parametrize("scenario", ["generate-25@ep2", "generate-25@tp2ep2"])
def test_generation_inside_validation_equals_one_process(
    scenario: str, two: Run, plain: Run
) -> None:
    wanted = plain("generate-25@plain")["tokens"]
    assert len({len(tokens) for tokens in wanted}) > 1, "ranks should stop at different lengths"
    ranks = [rank["tokens"] for rank in two.ranks(scenario)]
    if "tp2" in scenario:
        assert ranks == [wanted, wanted]
    else:
        assert [*ranks[0], *ranks[1]] == wanted


def test_generation_on_four_ranks_equals_one_process(four: Run, plain: Run) -> None:
    ranks = [rank["tokens"] for rank in four.ranks("generate-25@tp2ep4")]
    assert ranks[0] == ranks[1]
    assert [*ranks[0], *ranks[2]] == plain("generate-25@plain")["tokens"]
