"""The repository around the code: documents, recipes, pins, and plain text everywhere."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lightning_fold.cli import main
from lightning_fold.topology.folding import Folding

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FOLDERS = ("lightning_fold", "kernels", "tests", "benchmarks", "recipes", "docs", ".ci")
TARGETS = {
    "demo",
    "demo-pp",
    "test",
    "test-full",
    "mutate",
    "lint",
    "aot",
    "bench",
    "cluster-bench",
    "clean",
}


def texts() -> Iterator[Path]:
    suffixes = {".py", ".md", ".yaml", ".toml", ".txt", ""}
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*")]
    for file in [*files, *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt")]:
        if file.is_file() and file.suffix in suffixes and "__pycache__" not in file.parts:
            yield file


def mapping_of(recipe: Path) -> Folding:
    return Folding.from_id(recipe.name.removesuffix(".yaml").rpartition(".")[2])


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "docs/kernels.md",
        "docs/moe_layer.md",
        "docs/pipelines.md",
        "docs/schedules.md",
        "docs/verify.md",
    ],
)
def test_document_exists(name: str) -> None:
    assert (ROOT / name).stat().st_size > 200


def test_sources_are_ascii() -> None:
    files = list(texts())
    assert len(files) > 50
    assert [str(file) for file in files if not file.read_bytes().isascii()] == []


def test_make_has_its_targets() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    phony = next(line for line in lines if line.startswith(".PHONY:"))
    assert set(phony.split()[1:]) == TARGETS
    assert {line.partition(":")[0] for line in lines if re.match(r"[a-z-]+:", line)} == TARGETS


def test_pins_are_exact_and_name_no_build() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert {"torch==2.13.0", "triton==3.7.0", "lightning==2.6.6"} <= set(lines)


def test_recipes_are_found() -> None:
    files = [file for file in (ROOT / "recipes").iterdir() if file.is_file()]
    # Beside recipes, models that they or `verify` name.
    assert {file.suffix for file in files} <= {".yaml", ".py"}
    names = {recipe.name.partition(".")[0] for recipe in RECIPES}
    assert {"demo", "qwen3-moe"} <= names


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_is_named_after_the_mapping_it_configures(recipe: Path) -> None:
    folding = mapping_of(recipe)
    trainer = yaml.safe_load(recipe.read_text())["trainer"]
    sizes = trainer["strategy"]["init_args"]
    assert folding == Folding.from_world(
        trainer["devices"] * trainer.get("num_nodes", 1),
        tp=sizes.get("tensor_parallel_size", 1),
        cp=sizes.get("context_parallel_size", 1),
        pp=sizes.get("pipeline_parallel_size", 1),
        etp=sizes.get("expert_tensor_parallel_size", 1),
        ep=sizes.get("expert_parallel_size", 1),
    )


def test_demos_train_on_the_same_batches() -> None:
    demos = [recipe for recipe in RECIPES if recipe.name.startswith("demo")]
    assert len(demos) == 2
    rows = set()
    for recipe in demos:
        written = yaml.safe_load(recipe.read_text())
        rows.add(
            (
                written["data"]["init_args"]["batch_size"] * mapping_of(recipe).dp,
                written["data"]["init_args"]["seq_len"],
                written["trainer"]["max_steps"],
            )
        )
    assert len(rows) == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_is_accepted_by_the_command_line(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["fit", "--config", str(recipe), "--print_config"]
    monkeypatch.setattr(sys, "argv", ["lightning-fold", *arguments])
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    written = yaml.safe_load(recipe.read_text())
    assert printed["trainer"]["max_steps"] == written["trainer"]["max_steps"]
    assert printed["model"]["class_path"] == written["model"]["class_path"]


def test_every_test_file_is_collected(pytestconfig: pytest.Config) -> None:
    # pytest's default skips folders named dist.
    skipped = set(pytestconfig.getini("norecursedirs"))
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert "dist" in folders
    assert not folders & skipped
