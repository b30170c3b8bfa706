"""The part of the table of illegal configurations that is about pipelines."""

from __future__ import annotations

from typing import Any

from hostile_cases import STRATEGY, Case


def piped(name: str, says: str, *, slow: bool = True, **changes: Any) -> Case:
    """A pipeline of two ranks, unless `changes` of the strategy say otherwise."""
    fields = {"pipeline_parallel_size": 2, **changes}
    changed = {STRATEGY + key: value for key, value in fields.items()}
    return Case(name, says, {"trainer.devices": 2, **changed}, slow=slow)


PIPELINES = [
    piped(
        "pp does not divide the world",
        r"pp \* stage_size must equal world\. Legal pp: 1, 2\. .*Change `pipeline_parallel_size`",
        pipeline_parallel_size=3,
    ),
    piped(
        "microbatches without a pipeline",
        r"num_microbatches=4 says how a pipeline works, .*pipeline_parallel_size=1 .*`num_micro",
        pipeline_parallel_size=1,
        num_microbatches=4,
    ),
    piped(
        "schedule without a pipeline",
        r"pipeline_schedule='gpipe' says .*Legal pipeline_schedule then: '1f1b'\. .*`pipeline_sch",
        pipeline_parallel_size=1,
        pipeline_schedule="gpipe",
    ),
    piped(
        "number and size of microbatches",
        r"num_microbatches=4 and microbatch_size=2 both say .*Change `microbatch_size`",
        num_microbatches=4,
        microbatch_size=2,
    ),
    piped(
        "no virtual stage",
        r"virtual_pipeline_size=0 .*Legal virtual_pipeline_size: 1, 2, 3.*`virtual_pipeline_size`",
        virtual_pipeline_size=0,
    ),
    piped(
        "microbatches of no row",
        r"microbatch_size=0 .*Legal microbatch_size: 1, 2, 3.*Change `microbatch_size`",
        microbatch_size=0,
    ),
    piped(
        "zbv with three stages a rank",
        r"'zbv' cannot run pp\*vpp = 2\*3 = 6 stages.*legal virtual_pipeline_size for 'zbv': 2",
        pipeline_schedule="zbv",
        virtual_pipeline_size=3,
        slow=False,
    ),
    piped(
        "zbv with fewer microbatches than stages",
        r"'zbv' needs .*2\*2 = 4; num_microbatches=3\. Legal num_microbatches: 4.*`num_microbatch",
        pipeline_schedule="zbv",
        virtual_pipeline_size=2,
        num_microbatches=3,
    ),
    piped(
        "unknown schedule",
        r"'zvb' is no schedule\. Did you mean 'zbv'\? .*Change `pipeline_schedule`",
        pipeline_schedule="zvb",
    ),
    piped(
        "full shards under a pipeline",
        r"data_parallel_shard='full' .*pipeline_parallel_size=2 .*Change `data_parallel_shard`",
        data_parallel_shard="full",
    ),
    # Found by every rank, once the model is there: one message all the same.
    piped(
        "layout with an unknown letter",
        r"pipeline_layout: 'x' is no item .*Change `pipeline_layout`",
        pipeline_layout="Etx|tL",
        slow=False,
    ),
    piped(
        "layout of other layers",
        r"pipeline_layout: 3 decoder layers .*num_layers=2.*Change `pipeline_layout`",
        pipeline_layout="Ett|tL",
    ),
    piped(
        "layout of other stages",
        r"pipeline_layout: 3 stages .*virtual_pipeline_size = 2.*Change `pipeline_layout`",
        pipeline_layout="Et|t|L",
    ),
    piped(
        "layout that leaves a rank nothing",
        r"pipeline rank 1 has no parameters: pipeline_layout=Ett\|\|\|L .*Change `pipeline_layout`",
        pipeline_schedule="zbv",
        virtual_pipeline_size=2,
        pipeline_layout="Ett|||L",
    ),
    piped(
        "more stages than layers",
        r"num_layers=2 .*pp \* vpp = 2 \* 2 = 4 stages: 2 would have no layer.*`pipeline_layout`",
        pipeline_schedule="interleaved_1f1b",
        virtual_pipeline_size=2,
    ),
]
