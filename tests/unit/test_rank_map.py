"""The picture's content: text and JSON by value, the drawing by its cells and its overlaps."""

from __future__ import annotations

import json
import sys

import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from lightning_fold.topology import rank_map
from lightning_fold.topology.folding import AXES, Folding
from lightning_fold.topology.rank_map import draw_rank_map, rank_map_json, rank_map_text

SIXTEEN = Folding.from_world(16, tp=2, cp=2, pp=2, ep=4)
FOUR = Folding.from_world(4, tp=2, ep=4)
DRAWN = [
    (FOUR, 8),
    (Folding.from_world(8, tp=2, pp=2, ep=4), 8),
    (SIXTEEN, 8),
    (SIXTEEN, 4),
    (Folding.from_world(64, tp=4, cp=2, pp=2, etp=2, ep=8), 8),
]


def draw(folding, *, gpus_per_node):
    return rank_map._build_figure(rank_map._Grid(folding=folding, gpus_per_node=gpus_per_node))


def test_text_of_four_ranks():
    assert rank_map_text(FOUR, gpus_per_node=2).splitlines() == [
        "tp2cp1dp2pp1-etp1ep4edp1: 4 ranks, 2 nodes of 2 GPUs",
        "world 4 = pp 1 x stage_size 4",
        "",
        "node 0      rank |    0    1 |",
        "  attention tp   |    0    1 |",
        "            cp   |    0    0 |",
        "            dp   |    0    0 |",
        "            pp   |    0    0 |",
        "  MoE       etp  |    0    0 |",
        "            ep   |    0    1 |",
        "            edp  |    0    0 |",
        "            pp   |    0    0 |",
        "",
        "node 1      rank |    2    3 |",
        "  attention tp   |    0    1 |",
        "            cp   |    0    0 |",
        "            dp   |    1    1 |",
        "            pp   |    0    0 |",
        "  MoE       etp  |    0    0 |",
        "            ep   |    2    3 |",
        "            edp  |    0    0 |",
        "            pp   |    0    0 |",
        "",
        "groups, by rank",
        "  attention",
        "    tp   2 x 2    inside a node          [0 1] [2 3]",
        "    cp   4 x 1    every rank alone",
        "    dp   2 x 2    2 of 2 cross nodes     [0 2] [1 3]",
        "    pp   4 x 1    every rank alone",
        "  MoE",
        "    etp  4 x 1    every rank alone",
        "    ep   1 x 4    1 of 1 cross nodes     [0 1 2 3]",
        "    edp  4 x 1    every rank alone",
        "    pp   4 x 1    every rank alone",
    ]


@pytest.mark.parametrize("world", [1, 8, 16])
def test_text_lists_every_group_up_to_16_ranks(world):
    folding = Folding.from_world(world, ep=min(world, 4))
    text = rank_map_text(folding, gpus_per_node=8)
    assert "..." not in text
    for axis in ("dp", "ep", "edp"):
        for group in folding.groups(axis):
            assert len(group) == 1 or f"[{' '.join(map(str, group))}]" in text


def test_text_of_a_large_world_stays_short_and_says_what_it_leaves_out():
    text = rank_map_text(Folding.from_world(1024, tp=4, pp=8, ep=64), gpus_per_node=8)
    lines = text.splitlines()
    assert len(lines) < 70
    assert max(map(len, lines)) < 200
    assert "... 124 more ..." in lines
    assert any(line.startswith("node 127 ") for line in lines)
    assert "... 248 more ... [1020 1021 1022 1023]" in text
    assert "[0 1 2 ... 63]" in text


def test_groups_shown_and_left_out_add_up():
    folding = Folding.from_world(64, tp=2)
    (line,) = [
        line
        for line in rank_map_text(folding, gpus_per_node=8).splitlines()
        if line.startswith("    tp ")
    ]
    hidden = int(line.split(" more ")[0].split()[-1])
    assert line.count("[") + hidden == 32
    assert line.endswith("[62 63]")


def test_text_marks_the_groups_that_cross_nodes():
    folding = Folding.from_world(12, tp=2, ep=3)
    text = rank_map_text(folding, gpus_per_node=5)
    # Of ranks 0-4, 5-9, 10-11: only [4 5] crosses; of the triples [3 4 5] and [9 10 11] do.
    assert "tp   6 x 2    1 of 6 cross nodes" in text
    assert "ep   4 x 3    2 of 4 cross nodes" in text
    assert "3 nodes of 5 GPUs" in text


def test_json_has_both_views_and_survives_a_round_trip():
    data = json.loads(json.dumps(rank_map_json(SIXTEEN)))
    assert data["mapping_id"] == "tp2cp2dp2pp2-etp1ep4edp2"
    assert (data["world"], data["stage_size"]) == (16, 8)
    assert data["degrees"] == {"tp": 2, "cp": 2, "dp": 2, "pp": 2, "etp": 1, "ep": 4, "edp": 2}
    assert set(data["attention"]) | set(data["moe"]) == set(AXES)
    assert data["attention"]["pp"] == data["moe"]["pp"]
    for view in ("attention", "moe"):
        for axis, groups in data[view].items():
            assert groups == [list(group) for group in SIXTEEN.groups(axis)]


@pytest.mark.parametrize(("folding", "gpus_per_node"), DRAWN)
def test_drawing_has_one_cell_per_rank_coloured_by_its_innermost_group(folding, gpus_per_node):
    figure = draw(folding, gpus_per_node=gpus_per_node)
    colours = list(rank_map._COLOURS)
    for axes, block in zip(figure.axes, (("cp", "tp"), ("ep", "etp")), strict=True):
        cells = [patch for patch in axes.patches if to_hex(patch.get_facecolor()) in colours]
        assert len(cells) == folding.world
        size = folding.size(block[0]) * folding.size(block[1])
        by_colour = [colours.index(to_hex(cell.get_facecolor())) for cell in cells]
        assert by_colour == [rank // size % len(colours) for rank in range(folding.world)]
        labels = [text.get_text() for text in axes.texts]
        assert [label for label in labels if label.isdigit()] == [
            str(rank) for rank in range(folding.world)
        ]


@pytest.mark.parametrize(("folding", "gpus_per_node"), DRAWN)
def test_drawing_has_one_frame_around_the_cells_of_each_node(folding, gpus_per_node):
    figure = draw(folding, gpus_per_node=gpus_per_node)
    for axes in figure.axes:
        frames = [patch for patch in axes.patches if patch.get_facecolor()[3] == 0]
        cells = [patch for patch in axes.patches if patch not in frames]
        assert len(frames) == -(-folding.world // gpus_per_node)
        for rank, cell in enumerate(cells):
            assert encloses(frames[rank // gpus_per_node], cell)


def encloses(frame: Rectangle, cell: Rectangle) -> bool:
    outer, inner = frame.get_bbox(), cell.get_bbox()
    return (
        outer.x0 <= inner.x0
        and outer.y0 <= inner.y0
        and outer.x1 >= inner.x1
        and outer.y1 >= inner.y1
    )


@pytest.mark.parametrize(
    ("folding", "gpus_per_node"),
    [*DRAWN, (Folding.from_world(1), 8), (Folding.from_world(16), 4), (Folding.from_world(6), 1)],
)
def test_no_label_overlaps_another_or_leaves_the_page(folding, gpus_per_node):
    figure = draw(folding, gpus_per_node=gpus_per_node)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.texts]
    for axes in figure.axes:
        boxes += [text.get_window_extent() for text in axes.texts if text.get_text()]
        boxes.append(axes.get_legend().get_window_extent())
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    for number, box in enumerate(boxes):
        assert not [other for other in boxes[number + 1 :] if box.overlaps(other)]


@pytest.mark.parametrize(("world", "gpus_per_node"), [(1024, 8), (144, 72), (64, 1), (20, 8)])
def test_large_world_is_drawn_up_to_a_whole_node(world, gpus_per_node):
    folding = Folding.from_world(world)
    grid = rank_map._Grid(folding=folding, gpus_per_node=gpus_per_node)
    assert grid.drawn == min(world, {1024: 128, 144: 72, 64: 16, 20: 20}[world])
    footer = rank_map._footer_lines(rank_map._VIEWS[0], grid)
    continues = f"ranks {grid.drawn} to {world - 1} continue the pattern" in footer
    assert continues == (grid.drawn < world)


def test_png_is_written_whole_beside_nothing_else(tmp_path):
    target = tmp_path / "rank_map.png"
    target.write_text("an older picture")
    draw_rank_map(SIXTEEN, target, gpus_per_node=8)
    pixels = imread(target)
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 1200
    assert list(tmp_path.iterdir()) == [target]


def test_failed_drawing_leaves_the_older_picture(tmp_path, monkeypatch):
    def fail(self, path, **_):
        path.write_text("half a picture")
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    target = tmp_path / "rank_map.png"
    target.write_text("an older picture")
    with pytest.raises(OSError, match="disk full"):
        draw_rank_map(FOUR, str(target), gpus_per_node=8)
    assert target.read_text() == "an older picture"
    assert list(tmp_path.iterdir()) == [target]


def test_drawing_does_not_touch_pyplot(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    draw_rank_map(FOUR, tmp_path / "rank_map.png", gpus_per_node=8)
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("gpus_per_node", [0, -1, True, 2.0])
def test_node_without_gpus_is_refused(gpus_per_node, tmp_path):
    with pytest.raises(ValueError, match=r"gpus_per_node=.*Change `gpus_per_node`"):
        rank_map_text(FOUR, gpus_per_node=gpus_per_node)
    with pytest.raises(ValueError, match=r"gpus_per_node=.*Change `gpus_per_node`"):
        draw_rank_map(FOUR, tmp_path / "a.png", gpus_per_node=gpus_per_node)
    assert list(tmp_path.iterdir()) == []
