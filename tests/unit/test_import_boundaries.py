"""Who may import what, read from the syntax trees of every source file."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"lightning_fold": ROOT, "fold_kernels": ROOT / "kernels"}

# Third-party package -> the files, or folders, that may import it.
OWNERS = {
    "lightning": (
        "lightning_fold/__init__.py",
        "lightning_fold/strategy.py",
        "lightning_fold/ranks.py",
        "lightning_fold/saving.py",
        "lightning_fold/stepping.py",
        "lightning_fold/compat.py",
        "lightning_fold/precision.py",
        "lightning_fold/steps/",
        "lightning_fold/module.py",
        "lightning_fold/data.py",
        "lightning_fold/loaders.py",
        "lightning_fold/sampling.py",
        "lightning_fold/faults/",
        "lightning_fold/cli.py",
        "lightning_fold/callbacks/",
        "lightning_fold/verify/harness.py",
        "lightning_fold/verify/resharding.py",
        "lightning_fold/verify/product/subject.py",
        "lightning_fold/verify/product/training.py",
    ),
    "transformers": ("lightning_fold/model/", "lightning_fold/verify/cases.py"),
    "triton": ("fold_kernels/",),
    "matplotlib": (
        "lightning_fold/callbacks/",
        "lightning_fold/pipeline/picture.py",
        "lightning_fold/topology/rank_map.py",
        "lightning_fold/verify/product/picture.py",
    ),
}
OWNERS["pytorch_lightning"] = ()
OWNERS["lightning_utilities"] = OWNERS["lightning"]

# The arrow of the architecture, lowest first: a file imports from its own row and those above it
# here. A new file or folder has to be put into a row.
LAYERS = (
    ("fold_kernels",),
    ("topology", "telemetry", "router_options", "dispatchers", "config"),
    ("params", "moe"),
    ("checkpoint", "pipeline", "disagg", "model"),
    (
        "strategy",
        "ranks",
        "saving",
        "stepping",
        "compat",
        "precision",
        "steps",
        "module",
        "hf_module",
        "data",
        "loaders",
        "sampling",
        "faults",
    ),
    (
        "cli",
        "cli_checkpoint",
        "cli_config",
        "cli_errors",
        "cli_schedule",
        "cli_tune",
        "cli_verify",
        "callbacks",
        "verify",
        "planner",
    ),
)
LAYER_OF = {unit: depth for depth, units in enumerate(LAYERS) for unit in units}

WITHOUT_TORCH = (
    "topology/folding.py",
    "topology/doctor.py",
    "topology/rank_map.py",
    "router_options.py",
    "dispatchers.py",
    "config.py",
)
READ_ENVIRONMENT = (
    "fold_kernels/aot/__main__.py",
    "fold_kernels/backend.py",
    "lightning_fold/strategy.py",
    "lightning_fold/cli_errors.py",
    "lightning_fold/faults/launcher.py",
    # Start processes, whose environment they have to write.
    "lightning_fold/cli_tune.py",
    "lightning_fold/verify/launch.py",
    "lightning_fold/verify/worker.py",
)


def source_files() -> dict[str, ast.Module]:
    return {
        file.relative_to(base).as_posix(): ast.parse(file.read_text())
        for package, base in PACKAGES.items()
        for file in sorted((base / package).rglob("*.py"))
    }


FILES = source_files()


def imports_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every import at any depth but under TYPE_CHECKING."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def imports_package(tree: ast.Module, package: str) -> bool:
    return any(module.partition(".")[0] == package for module, _ in imports_of(tree))


def unit_of(path: str) -> str:
    """Name of the folder or the file below the package; fold_kernels is one unit."""
    parts = path.removesuffix(".py").split("/")
    return parts[0] if parts[0] == "fold_kernels" else parts[1]


def imported_units(tree: ast.Module) -> set[str]:
    units = set()
    for module, name in imports_of(tree):
        first, *rest = module.split(".")
        if first == "fold_kernels":
            units.add(first)
        elif first == "lightning_fold":
            units.add(rest[0] if rest else name)
    return units


def unit_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for path, tree in FILES.items():
        if path != "lightning_fold/__init__.py":
            unit = unit_of(path)
            graph.setdefault(unit, set()).update(imported_units(tree) - {unit, "__version__"})
    return graph


def reaches(tree: ast.Module, module: str, attribute: str) -> bool:
    """Tell whether `module.attribute` is used, or imported by name."""
    uses = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return (module, attribute) in imports_of(tree) or f"{module}.{attribute}" in uses


def private_distributed_names(tree: ast.Module) -> set[str]:
    found = {
        f"{module}.{name}"
        for module, name in imports_of(tree)
        if module.startswith("torch.distributed") and "._" in f"{module}.{name}"
    }
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if text.startswith(("dist._", "torch.distributed.")) and "._" in text:
            found.add(text)
    return found


def test_the_walk_sees_the_packages() -> None:
    assert {"lightning_fold/strategy.py", "fold_kernels/backend.py"} <= set(FILES)
    assert "lightning_fold/model/inspect.py" in FILES


@pytest.mark.parametrize("package", OWNERS)
def test_third_party_packages_stay_with_their_owners(package: str) -> None:
    users = {path for path, tree in FILES.items() if imports_package(tree, package)}
    assert {path for path in users if not path.startswith(OWNERS[package])} == set()


def test_every_unit_has_a_layer() -> None:
    assert set(unit_graph()) - set(LAYER_OF) == set()


def test_imports_follow_the_arrow() -> None:
    upward = {
        f"{unit} imports {other}"
        for unit, others in unit_graph().items()
        for other in others
        if LAYER_OF[other] > LAYER_OF[unit]
    }
    assert upward == set()


def test_no_circle_of_imports_between_units() -> None:
    # `static_order` raises CycleError with the circle.
    assert list(TopologicalSorter(unit_graph()).static_order())


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_rank_arithmetic_imports_no_torch(name: str) -> None:
    assert not imports_package(FILES[f"lightning_fold/{name}"], "torch")


def test_private_names_of_torch_distributed_live_in_two_files() -> None:
    users = {path: names for path, t in FILES.items() if (names := private_distributed_names(t))}
    owners = {"lightning_fold/params/shard.py", "lightning_fold/pipeline/actions.py"}
    assert set(users) <= owners, users


@pytest.mark.parametrize("attribute", ["environ", "getenv"])
def test_environment_variables_are_read_at_the_top_only(attribute: str) -> None:
    readers = {path for path, tree in FILES.items() if reaches(tree, "os", attribute)}
    assert readers - set(READ_ENVIRONMENT) == set()


def test_kernels_is_a_folder_and_not_a_package() -> None:
    # A package of this name is imported by transformers in place of its own dependency.
    assert (ROOT / "kernels" / "fold_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()
