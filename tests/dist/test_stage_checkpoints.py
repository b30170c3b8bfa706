"""Checkpoints of a model whose parameters lie on pipeline stages: as one process writes and reads.

Four ranks start once; every case saves, and resumes from all that was saved before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rank_records
import stage_ranks
import torch
from stage_ranks import EMBED, FORMS, HALVED, HEAD, KINDS, Model, StageCase, optimizer_of
from torch import Tensor

from lightning_fold.checkpoint.convert import convert
from lightning_fold.checkpoint.folder import read_meta
from lightning_fold.checkpoint.safe_reader import read_index, tensors_of

TWO = "tp1cp1dp2pp2-etp1ep2edp1"
# The layers of a stage are no neighbours, as with virtual stages; the last stage has none.
CASES = (
    StageCase("hand-made", TWO, layout=(0, 1, 0)),
    StageCase("hand-made", "tp1cp1dp4pp1-etp1ep4edp1"),
    StageCase("hand-made", TWO, layout=(0, 0, 1)),
    StageCase("hand-made", "tp1cp1dp1pp4-etp1ep1edp1", layout=(0, 1, 2)),
)
MIXED, ONE, EVEN, FOUR = CASES
SHORT = (MIXED, ONE)
"""The cases of every test run: from stages to none and back, on plain torch's file too."""
ALL = [pytest.param(c, marks=() if c in SHORT else pytest.mark.slow, id=c.key) for c in CASES]
CUT = [param for param, case in zip(ALL, CASES, strict=True) if case.folding.pp > 1]

pytestmark = [pytest.mark.dist(4), pytest.mark.timeout(900)]


class Run:
    """What the ranks have written and told."""

    def __init__(self, folder: Path, cases: Sequence[StageCase]) -> None:
        self.folder, self.cases = folder, cases
        (folder / "plain").mkdir()
        for kind in KINDS:
            # As Lightning writes it: parameters are numbered and have no names.
            module, optimizer = stage_ranks.reference(kind)
            content = {
                "state_dict": module.state_dict(),
                "optimizer_states": [optimizer.state_dict()],
            }
            torch.save(content, folder / "plain" / f"{kind}.file")
        self.records = rank_records.read_records(4, cases, folder, stage_ranks.run)

    def path(self, case: StageCase, kind: str, form: str) -> Path:
        return self.folder / case.key / f"{kind}.{form}"

    def whole(self, case: StageCase, kind: str) -> dict[str, Any]:
        content: dict[str, Any] = torch.load(self.path(case, kind, "file"), weights_only=True)
        return content

    def told(self, case: StageCase, what: str) -> dict[str, Any]:
        """What the ranks agree on."""
        first, *others = (record[what] for record in self.records[case])
        assert all(other == first for other in others), [first, *others]
        result: dict[str, Any] = first
        return result


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Run:
    specs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    selected = [spec.params["case"] for spec in specs if "case" in spec.params]
    cases = [case for case in CASES if case in SHORT or case in selected]
    return Run(tmp_path_factory.mktemp("stages"), cases)


@pytest.mark.parametrize("case", ALL)
def test_every_form_of_every_cut_resumes_in_every_other(ran: Run, case: StageCase) -> None:
    earlier = [other.key for other in ran.cases[: ran.cases.index(case) + 1]]
    wanted = {f"{key} {kind}.{form}" for key in earlier for kind in KINDS for form in FORMS}
    wanted |= {f"plain {kind}.file" for kind in KINDS}
    for record in ran.records[case]:
        assert record["errors"].keys() == wanted
        for source, errors in record["errors"].items():
            keys = {"step", "exp_avg", "exp_avg_sq"} if "adamw" in source else {"momentum_buffer"}
            assert errors.keys() == {"weights", "next", *keys}
            assert max(errors.values()) <= 1e-12, (source, errors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ALL)
def test_a_file_is_what_one_process_writes(ran: Run, case: StageCase, kind: str) -> None:
    module, optimizer = stage_ranks.reference(kind)
    saved = ran.whole(case, kind)
    wanted = module.state_dict()
    assert list(saved["state_dict"]) == list(wanted)
    for name, value in wanted.items():
        found = saved["state_dict"][name]
        if isinstance(value, Tensor):
            assert (found.shape, found.dtype) == (value.shape, value.dtype), name
            torch.testing.assert_close(found, value, rtol=0, atol=1e-12)
        else:
            assert found == value
    (states,) = saved["optimizer_states"]
    theirs = optimizer.state_dict()
    assert states["param_groups"] == theirs["param_groups"]
    assert list(states["state"]) == sorted(theirs["state"])
    for index, values in theirs["state"].items():
        assert list(states["state"][index]) == list(values)
        for key, value in values.items():
            found = states["state"][index][key]
            assert (found.shape, found.dtype) == (value.shape, value.dtype), (index, key)
            torch.testing.assert_close(found, value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_goes_on_from_it(ran: Run, kind: str) -> None:
    module, optimizer = stage_ranks.reference(kind)
    saved = ran.whole(MIXED, kind)
    other = Model(seed=1)
    resumed = optimizer_of(other, kind)
    other.load_state_dict(saved["state_dict"])
    resumed.load_state_dict(saved["optimizer_states"][0])
    stage_ranks.train(module, optimizer, steps=1)
    stage_ranks.train(other, resumed, steps=1)
    assert stage_ranks.difference(other.state_dict(), module.state_dict()) <= 1e-12


@pytest.mark.parametrize("case", CUT)
def test_a_folder_tells_of_all_stages_and_becomes_the_file(
    ran: Run, case: StageCase, tmp_path: Path
) -> None:
    own = read_meta(ran.path(case, "adamw", "folder"))["lightning_fold"]
    assert own["halved"] == list(HALVED)
    names = [group["params"] for group in own["optimizers"][0]["param_groups"]]
    assert names == ran.whole(case, "adamw")["lightning_fold"]["optimizer_names"][0]
    convert(ran.path(case, "adamw", "folder"), tmp_path / "x.ckpt")
    converted = torch.load(tmp_path / "x.ckpt", weights_only=True)
    wanted = ran.whole(case, "adamw")
    assert list(converted["state_dict"]) == list(wanted["state_dict"])
    assert converted["lightning_fold"] == wanted["lightning_fold"]
    torch.testing.assert_close(converted["state_dict"], wanted["state_dict"])
    torch.testing.assert_close(converted["optimizer_states"], wanted["optimizer_states"])


@pytest.mark.parametrize("case", CUT)
def test_what_several_stages_hold_is_written_once_by_the_first(ran: Run, case: StageCase) -> None:
    index = read_index(ran.path(case, "adamw", "folder"))
    first = {f"__{rank}_0.distcp" for rank in range(case.folding.stage_size)}
    for name in ("core.table", EMBED):
        places = [p for i, p in index.storage_data.items() if i.fqn == f"state_dict.{name}"]
        assert {place.relative_path for place in places} <= first
    for name, item in tensors_of(index).items():
        volume = sum(torch.Size(chunk.sizes).numel() for chunk in item.chunks)
        assert volume == item.size.numel(), name


REFUSED = {
    "lacks": r"1 names are missing \(core\.norm\.weight\) and 0 are unknown",
    "foreign": r"0 names are missing \(\) and 1 are unknown \(core\.layers\.9\.norm\.weight\)",
    "misshapen": r"core\.norm\.bias has shape \(9,\) there and \(4,\) here",
    "rounded": r"gate_up_proj as torch\.float32, the model has torch\.float64",
    "regrouped": r"parameter group 0 differs from the checkpoint's: 0 .* 1 are new \(core\.norm",
    "moment": r"core\.norm\.weight: the checkpoint holds shape \(3,\), the model has \(4,\)",
    "extra": r"no module has the extra state core\.norm\._extra_state",
    "options folder": r"group 1 has lr=0\.02 on stage 0 and lr=0\.5 on stage \d, and a checkpoint",
    "options file": r"group 1 has lr=0\.02 on stage 0 and lr=0\.5 on stage \d, and a checkpoint",
    "groups": r"another number of parameter groups on every stage \(stage 0: 2, .*stage \d: 3\)",
    "load": r"another number of parameter groups on every stage \(stage 0: 2, .*stage \d: 3\)",
    "nameless": r"SGD holds a parameter that is not in Model",
}


@pytest.mark.parametrize("case", CUT)
def test_what_does_not_fit_one_stage_is_refused_by_all_ranks(ran: Run, case: StageCase) -> None:
    refused = ran.told(case, "refused")
    assert refused.keys() == REFUSED.keys()
    for what, message in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            raise ValueError(refused[what])


@pytest.mark.parametrize("case", CUT)
def test_init_from_fills_every_stage_from_either_name_of_a_tied_weight(
    ran: Run, case: StageCase
) -> None:
    told = ran.told(case, "initial")
    for kept in (EMBED, HEAD):
        assert told[f"fits {kept}"] == ""
        assert told[f"difference {kept}"] == 0.0
        assert "1 names are missing (core.norm.bias) and 0 are unknown" in told[f"lacking {kept}"]
