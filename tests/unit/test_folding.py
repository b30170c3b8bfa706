"""Rank arithmetic against nested loops over the two grids, for every factorisation.

Owns the properties and golden lists of `Folding`; the wording of user errors is tested with
the doctor.
"""

from __future__ import annotations

import ast
import doctest
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fold.topology import folding as module
from lightning_fold.topology.folding import AXES, Folding, divisors, legal_foldings

ATTENTION = ("pp", "dp", "cp", "tp")
EXPERTS = ("pp", "edp", "ep", "etp")


def every_folding(world):
    return legal_foldings(world, cp=divisors(world), pp=divisors(world))


def walk(sizes):
    """Return the places of all ranks by walking a grid, last axis fastest."""
    return list(itertools.product(*(range(size) for size in sizes)))


def groups_by_walking(sizes, position):
    """Return the groups of one axis of a grid, found by comparing places."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(walk(sizes)):
        found.setdefault(place[:position] + place[position + 1 :], []).append(rank)
    return tuple(sorted(tuple(ranks) for ranks in found.values()))


def every_grid():
    """Yield (pp, outer, middle, inner) for every world up to 64: 84 grids for 64 ranks."""
    for world in range(1, 65):
        for pp in divisors(world):
            for outer in divisors(world // pp):
                for middle in divisors(world // pp // outer):
                    yield pp, outer, middle, world // pp // outer // middle


def test_docstring_picture_holds():
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted >= 7


@pytest.mark.parametrize("file", ["folding.py", "doctor.py"])
def test_pure_topology_imports_no_torch(file):
    tree = ast.parse((Path(module.__file__).parent / file).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [
        name
        for node in imports
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    ]
    assert names
    assert not [name for name in names if name.split(".")[0] in ("torch", "lightning")]


def test_groups_equal_those_of_a_grid_walk_for_every_factorisation():
    for pp, outer, middle, inner in every_grid():
        sizes = (pp, outer, middle, inner)
        stage = outer * middle * inner
        attention = Folding(tp=inner, cp=middle, dp=outer, pp=pp, etp=1, ep=stage, edp=1)
        experts = Folding(tp=stage, cp=1, dp=1, pp=pp, etp=inner, ep=middle, edp=outer)
        for position in range(4):
            expected = groups_by_walking(sizes, position)
            assert attention.groups(ATTENTION[position]) == expected
            assert experts.groups(EXPERTS[position]) == expected


def test_both_views_agree_on_stages_for_every_folding():
    for world in range(1, 65):
        for folding in every_folding(world):
            assert folding.world == world
            assert folding.stage_size * folding.pp == world
            assert folding.tp * folding.cp * folding.dp == folding.etp * folding.ep * folding.edp
            assert Folding.from_id(folding.mapping_id) == folding
            assert folding.stride("pp") == folding.stage_size


@pytest.mark.parametrize("world", [1, 6, 8, 12, 24])
def test_pp_groups_are_the_same_walked_through_either_view(world):
    for folding in every_folding(world):
        attention = [folding.size(axis) for axis in ATTENTION]
        experts = [folding.size(axis) for axis in EXPERTS]
        assert groups_by_walking(attention, 0) == groups_by_walking(experts, 0)
        assert folding.groups("pp") == groups_by_walking(attention, 0)


@st.composite
def foldings(draw):
    world = draw(st.integers(1, 64))
    pp = draw(st.sampled_from(divisors(world)))
    stage = world // pp
    tp = draw(st.sampled_from(divisors(stage)))
    cp = draw(st.sampled_from(divisors(stage // tp)))
    etp = draw(st.sampled_from(divisors(stage)))
    ep = draw(st.sampled_from(divisors(stage // etp)))
    return Folding.from_world(world, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)


@given(foldings(), st.sampled_from(AXES))
def test_groups_partition_the_ranks_in_coordinate_order(folding, axis):
    groups = folding.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(folding.world))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert len(group) == folding.size(axis)
        assert [folding.coordinates(rank)[axis] for rank in group] == list(range(len(group)))
        assert all(folding.group_of(rank, axis) == group for rank in group)


@given(foldings())
def test_coordinates_are_the_places_on_both_grids(folding):
    for axes in (ATTENTION, EXPERTS):
        places = walk([folding.size(axis) for axis in axes])
        for rank, place in enumerate(places):
            coordinates = folding.coordinates(rank)
            assert tuple(coordinates[axis] for axis in axes) == place
            assert tuple(coordinates) == AXES


@given(foldings())
def test_stages_hold_the_same_ranks_in_both_views(folding):
    for stage in range(folding.pp):
        ranks = set(range(stage * folding.stage_size, (stage + 1) * folding.stage_size))
        for axis in set(AXES) - {"pp"}:
            covered = [group for group in folding.groups(axis) if group[0] in ranks]
            assert set(itertools.chain(*covered)) == ranks


def pairs(*groups):
    return tuple(tuple(group) for group in groups)


PP_16 = tuple((rank, rank + 8) for rank in range(8))
QUADS_16 = pairs(range(4), range(4, 8), range(8, 12), range(12, 16))
DP_16 = pairs((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))
NEIGHBOURS_16 = tuple((rank, rank + 1) for rank in range(0, 16, 2))
ALONE_16 = tuple((rank,) for rank in range(16))


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("tp", NEIGHBOURS_16),
        ("cp", pairs((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))),
        ("dp", DP_16),
        ("pp", PP_16),
        ("etp", ALONE_16),
        ("ep", QUADS_16),
        ("edp", DP_16),
    ],
)
def test_golden_groups_as_megatron_builds_them(axis, expected):
    folding = Folding.from_world(16, tp=2, cp=2, pp=2, ep=4)
    assert folding.mapping_id == "tp2cp2dp2pp2-etp1ep4edp2"
    assert folding.groups(axis) == expected


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("etp", NEIGHBOURS_16),
        ("ep", pairs(*(range(first, first + 8, 2) for first in (0, 1, 8, 9)))),
        ("edp", ALONE_16),
        ("pp", PP_16),
    ],
)
def test_golden_groups_with_etp(axis, expected):
    folding = Folding.from_world(16, tp=2, cp=2, pp=2, etp=2, ep=4)
    assert folding.groups(axis) == expected


@pytest.mark.parametrize(("world", "count"), [(1, 1), (2, 6), (4, 18), (8, 40), (16, 75)])
def test_number_of_foldings_of_the_first_worlds(world, count):
    assert len(legal_foldings(world)) == count


@pytest.mark.parametrize("world", range(1, 65))
def test_number_of_foldings_is_the_closed_form(world):
    def d3(number):
        return sum(len(divisors(part)) for part in divisors(number))

    found = legal_foldings(world)
    assert len(set(found)) == len(found) == len(divisors(world)) * d3(world)
    expected = sum(
        len(divisors(world // pp // cp)) * d3(world // pp)
        for pp in divisors(world)
        for cp in divisors(world // pp)
    )
    assert len(set(every_folding(world))) == len(every_folding(world)) == expected


def test_prime_power_form_of_the_docstring():
    for power in range(7):
        expected = (power + 1) * (power + 1) * (power + 2) // 2
        assert len(legal_foldings(2**power)) == expected


def test_legal_foldings_come_in_a_stable_order():
    assert [folding.mapping_id for folding in legal_foldings(2)] == [
        "tp1cp1dp2pp1-etp1ep1edp2",
        "tp1cp1dp2pp1-etp1ep2edp1",
        "tp1cp1dp2pp1-etp2ep1edp1",
        "tp2cp1dp1pp1-etp1ep1edp2",
        "tp2cp1dp1pp1-etp1ep2edp1",
        "tp2cp1dp1pp1-etp2ep1edp1",
    ]


def test_degrees_that_do_not_fit_are_passed_over():
    assert legal_foldings(4, cp=(3,), pp=(1,)) == []
    assert legal_foldings(4, pp=(3,)) == []
    assert {folding.pp for folding in legal_foldings(4, pp=(4, 3, 1))} == {1, 4}


@given(st.integers(1, 2000))
def test_divisors_are_all_of_them(number):
    expected = tuple(part for part in range(1, number + 1) if math.gcd(part, number) == part)
    assert divisors(number) == expected


def test_pair_that_does_not_close_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match="does not close") as caught:
        Folding.from_id("tp2cp1dp2pp1-etp1ep2edp1")
    message = str(caught.value)
    assert "tp=2 cp=1 dp=2  ->  stage_size = 4" in message
    assert "1*2*1 = 2" in message
    assert message.endswith("Legal edp for etp=1 ep=2: 2.  Change `edp`.")


def test_pair_that_no_edp_closes_names_the_other_degrees():
    with pytest.raises(ValueError, match=r"none\.  Change `ep` or `etp`\.$"):
        Folding.from_id("tp2cp1dp2pp1-etp1ep3edp1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp2cp1dp2pp1",
        "tp2cp1dp2pp1-etp1ep4",
        "tp2cp1dp2pp1-etp1ep4edp1 ",
        "tp2cp1dp2pp1-etp1ep4edp1\n",
        "tp0cp1dp2pp1-etp1ep4edp1",
        "tp02cp1dp2pp1-etp1ep4edp1",
        "cp1tp2dp2pp1-etp1ep4edp1",
        "tp2cp1dp2pp1-ep4etp1edp1",
        "TP2CP1DP2PP1-ETP1EP4EDP1",
    ],
)
def test_malformed_mapping_id_is_refused(text):
    with pytest.raises(ValueError, match="is not a mapping id"):
        Folding.from_id(text)


@pytest.mark.parametrize("degree", [0, -2, True, 2.0, "2"])
def test_degree_that_is_no_positive_int_is_refused(degree):
    with pytest.raises(ValueError, match=r"tp=.*must be an int >= 1.*Change `tp`"):
        Folding(tp=degree, cp=1, dp=1, pp=1, etp=1, ep=1, edp=1)


@pytest.mark.parametrize(
    "degrees", [{"tp": 3}, {"ep": 3}, {"pp": 3}, {"tp": 0}, {"ep": -1}, {"etp": 4, "ep": 4}]
)
def test_from_world_refuses_what_does_not_divide(degrees):
    with pytest.raises(ValueError, match="world=8 is not a multiple of both"):
        Folding.from_world(8, **degrees)


def test_unknown_axis_and_rank_are_refused():
    folding = Folding.from_world(4, tp=2, ep=4)
    with pytest.raises(ValueError, match="Legal axes: tp, cp, dp, pp, etp, ep, edp"):
        folding.groups("sp")
    for rank in (-1, 4):
        with pytest.raises(ValueError, match="Legal ranks: 0 to 3"):
            folding.coordinates(rank)
        with pytest.raises(ValueError, match="Legal ranks: 0 to 3"):
            folding.group_of(rank, "tp")
