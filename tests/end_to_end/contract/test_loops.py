"""Entry points, data, logging, metrics, callbacks and generation under the Trainer."""

from __future__ import annotations

import pytest

from contract.compare import worst
from contract.launch import Run


def test_entry_points_run_twice_on_one_set_up(two: Run, plain: Run) -> None:
    run, reference = two("entry_points@tp2ep2"), plain("entry_points@plain")
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


def test_tp_peers_see_the_same_samples(two: Run) -> None:
    first, second = two.ranks("sampler@tp2")
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


def test_validation_sees_shards_that_were_written_in_place(two: Run, plain: Run) -> None:
    run, reference = two("reshard@ep2"), plain("reshard@plain")
    assert run["first"] == pytest.approx(reference["first"], rel=1e-6)
    assert run["second"] == pytest.approx(reference["second"], rel=1e-6)
    assert abs(run["second"] - run["first"]) > 1e-2


def test_full_shards_free_every_layer_between_forward_and_backward(two: Run) -> None:
    assert [rank["held"] for rank in two.ranks("held-full@dp2")] == [0.0, 0.0]
    assert two("held-optimizer@dp2")["held"] == 1.0


@pytest.mark.parametrize("mapping", ["dp2", "tp2"])
def test_synced_logs_and_metrics_count_every_sample_once(mapping: str, two: Run) -> None:
    for rank in two.ranks(f"logging@{mapping}"):
        logged, sums = rank["logged"], rank["sums"]
        batches = 3 * (2 if mapping == "dp2" else 1)
        assert logged["sum"] == logged["metric_sum"] == sum(sums)
        assert logged["mean"] == pytest.approx(sum(sums) / batches)
        assert logged["metric_mean"] == pytest.approx(sum(sums) / batches)


def test_decisions_are_taken_by_all_ranks(two: Run) -> None:
    for rank in two.ranks("logging@tp2"):
        assert rank["decisions"] == [False, True]


@pytest.mark.parametrize("scenario", ["callbacks-sharded@ep2", "callbacks-whole@tp2ep2"])
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


def test_a_second_module_on_one_trainer_is_folded(two: Run, plain: Run) -> None:
    run, reference = two("second_module@ep2"), plain("second_module@plain2")
    assert worst(run["after"], reference["after"])[0] < 1e-9


def test_unseeded_ranks_start_from_rank_0(two: Run) -> None:
    run = two("unseeded@ep2")
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
