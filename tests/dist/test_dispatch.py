"""Every dispatcher on degenerate routings, with and without a capacity, against a loop over tokens.

The ranks of a world start once and run the mappings of all selected tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dispatch_ranks
import pytest
import torch
from dispatch_ranks import DROPPED, DROPS, ROUTINGS, reference

from lightning_fold.verify.launch import run_world
from lightning_fold.verify.plan import Case

MAPPINGS = {
    2: ("tp1cp1dp2pp1-etp1ep2edp1", "tp1cp1dp2pp1-etp2ep1edp1", "tp1cp1dp2pp1-etp1ep1edp2"),
    4: ("tp1cp1dp4pp1-etp2ep2edp1", "tp1cp1dp4pp1-etp1ep4edp1", "tp1cp1dp4pp1-etp1ep2edp2"),
}
SHORT = ("tp1cp1dp2pp1-etp1ep1edp2", "tp1cp1dp4pp1-etp2ep2edp1")
"""The mappings of every test run: `local`, and both axes at once."""
WORLD_OF = {mapping: world for world, mappings in MAPPINGS.items() for mapping in mappings}


class Worlds:
    """Results of the ranks by mapping; a world starts when the first test asks for it."""

    def __init__(self, folder: Path, selected: set[str]) -> None:
        self.folder = folder
        self.selected = selected
        self.started: set[int] = set()

    def __call__(self, mapping: str) -> list[dict[str, Any]]:
        world, case = WORLD_OF[mapping], Case("decoder", mapping)
        if world not in self.started:
            self.started.add(world)
            chosen = [other for other in MAPPINGS[world] if other in self.selected]
            cases = [Case("decoder", other) for other in chosen]
            ran = run_world(world, cases, self.folder, run=dispatch_ranks.run)
            assert ran.failure is None, ran.failure
        return [torch.load(self.folder / case.key / f"rank{r}.pt") for r in range(world)]


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Worlds:
    specs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    selected = {str(spec.params["mapping"]) for spec in specs if "mapping" in spec.params}
    return Worlds(tmp_path_factory.mktemp("dispatch"), selected)


def dispatchers(mapping: str) -> list[str]:
    alone = ["local"] if mapping.endswith("etp1ep1edp2") else []
    return [*alone, "all_to_all", "all_gather", "dedup"]


def as_param(mapping: str) -> Any:
    marks = [pytest.mark.dist(WORLD_OF[mapping])]
    return pytest.param(mapping, marks=marks if mapping in SHORT else [*marks, pytest.mark.slow])


def compare(ranks: list[dict[str, Any]], key: str, wanted: dict[str, Any]) -> None:
    for rank, result in enumerate(ranks):
        got = result["results"][key]
        for name in ("out", "hidden", "weights"):
            close(got[name], wanted["ranks"][rank][name], f"{key}: {name} of rank {rank}")
        for name in ("gate_up_proj", "down_proj"):
            close(got[name], wanted[name], f"{key}: {name}")


def close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        got, wanted, rtol=1e-11, atol=1e-12, msg=lambda text: f"{what}\n{text}"
    )


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("mapping", [as_param(mapping) for mapping in WORLD_OF])
def test_dispatchers_match_a_loop_over_tokens(mapping: str, routing: str, ranks_of: Worlds) -> None:
    wanted, ranks = reference(routing, WORLD_OF[mapping]), ranks_of(mapping)
    for dispatcher in dispatchers(mapping):
        compare(ranks, f"{dispatcher}.{routing}", wanted)


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("mapping", [as_param(mapping) for mapping in WORLD_OF])
def test_capacity_drops_what_the_textbook_drops_padded_or_not(
    mapping: str, drop: str, ranks_of: Worlds
) -> None:
    ranks = ranks_of(mapping)
    for routing in DROPPED:
        wanted = reference(routing, WORLD_OF[mapping], DROPS[drop])
        for form in [*dispatchers(mapping), "padded"]:
            compare(ranks, f"{form}.{routing}.{drop}", wanted)


@pytest.mark.parametrize("mapping", [as_param(mapping) for mapping in WORLD_OF])
def test_one_host_synchronisation_a_layer_and_none_with_static_shapes(
    mapping: str, ranks_of: Worlds
) -> None:
    for result in ranks_of(mapping):
        for key, got in result["results"].items():
            assert got["syncs"] == [0 if key.startswith("padded") else 1, 0], key


@pytest.mark.parametrize("mapping", [as_param(mapping) for mapping in WORLD_OF])
def test_nan_weights_are_told_by_all_peers_with_layer_and_rank(
    mapping: str, ranks_of: Worlds
) -> None:
    folding = Case("decoder", mapping).folding
    peers = {r for axis in ("ep", "etp") for r in folding.group_of(1, axis)}
    if folding.ep > 1 and folding.etp > 1:
        peers = set(range(folding.world))
    for rank, result in enumerate(ranks_of(mapping)):
        assert bool(result["nan"]) is (rank in peers)
        for message in result["nan"].values():
            assert message.startswith("model.experts: NaN routing weights on rank 1. ")


@pytest.mark.parametrize("mapping", [as_param(mapping) for mapping in WORLD_OF])
def test_gradients_of_weights_are_computed_while_those_of_rows_travel(
    mapping: str, ranks_of: Worlds
) -> None:
    for result in ranks_of(mapping):
        wanted = [name for name in dispatchers(mapping) if name != "local"]
        has_peers = not mapping.endswith("etp1ep1edp2")
        assert result["filled"] == (dict.fromkeys(wanted, True) if has_peers else {})
