"""No line of the layer or its kernels reads a tensor back to the host, but through `to_host`.

What a syntax tree can decide: methods and functions that always synchronise, and `int`, `float` or
`bool` of a value that is known to be a tensor by its annotation or its shape suffix.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "lightning_fold" / "moe", ROOT / "kernels" / "fold_kernels")
# Tools that no step comes to: a sweep reads times and errors, the interpreter is the host.
TOOLS = {"aot", "tune", "interpreter.py"}
FILES = sorted(
    file
    for folder in FOLDERS
    for file in folder.rglob("*.py")
    if not TOOLS & set(file.relative_to(folder).parts)
)
METHODS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__"}
FUNCTIONS = {
    "nonzero",
    "argwhere",
    "masked_select",
    "bincount",
    "unique",
    "unique_consecutive",
    "is_nonzero",
    "equal",
    "allclose",
}
SUFFIX = re.compile(r"_[A-Za-z0-9]*[A-Z][A-Za-z0-9]*$|_[et]$")
SIZES = {"shape", "size", "numel", "dim", "ndim", "dtype", "device", "is_cuda", "layout"}


def reads(tree: ast.Module) -> Iterator[str]:
    """Expressions that synchronise with the device."""
    tensors = {
        arg.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for arg in (*node.args.args, *node.args.kwonlyargs)
        if arg.annotation is not None and ast.unparse(arg.annotation) == "Tensor"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and synchronises(node, tensors):
            yield ast.unparse(node)


def synchronises(call: ast.Call, tensors: set[str]) -> bool:
    if isinstance(call.func, ast.Name):
        converts = call.func.id in ("int", "float", "bool")
        return converts and any(holds_tensor(argument, tensors) for argument in call.args)
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "repeat_interleave":
        return not knows_its_size(call)
    return call.func.attr in METHODS | FUNCTIONS


def holds_tensor(node: ast.expr, tensors: set[str]) -> bool:
    """Whether a value is a tensor for sure: not its shape, its length or a number of it."""
    if isinstance(node, ast.Attribute) and node.attr in SIZES:
        return False
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute):
            is_torch = ast.unparse(function.value) == "torch" and function.attr not in SIZES
            return is_torch or holds_tensor(function, tensors)
        return False
    if isinstance(node, ast.Name):
        return node.id in tensors or bool(SUFFIX.search(node.id))
    return any(holds_tensor(child, tensors) for child in children(node))


def children(node: ast.AST) -> Iterator[ast.expr]:
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


def knows_its_size(call: ast.Call) -> bool:
    """An int repeats evenly; tensors of repeats need `output_size`."""
    given = {keyword.arg for keyword in call.keywords}
    repeats = call.args[0] if call.args else None
    is_tensor = isinstance(repeats, ast.Name) and not SUFFIX.search(repeats.id)
    return "output_size" in given or not is_tensor or "dim" in given


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_nothing_reads_a_tensor_back(file: Path) -> None:
    assert list(reads(ast.parse(file.read_text()))) == []


def test_the_layers_are_looked_at() -> None:
    names = {file.name for file in FILES}
    assert {"all_to_all.py", "dedup.py", "capacity.py", "experts.py", "permute.py"} <= names


@pytest.mark.parametrize(
    "line",
    [
        "x.item()",
        "counts_e.tolist()",
        "x_TD.cpu()",
        "x.numpy()",
        "torch.nonzero(mask)",
        "mask.nonzero()",
        "torch.bincount(ids)",
        "x.masked_select(y)",
        "torch.unique(ids)",
        "int(counts_e.sum())",
        "bool(valid_T.all())",
        "float(-weights_TK[0, 0])",
        "int(torch.max(x))",
        "torch.equal(a, b)",
    ],
)
def test_what_synchronises_is_seen(line: str) -> None:
    assert list(reads(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["int(x_TD.shape[0])", "int(x.numel())", "len(x)", "mask.bool()", "float(factor)"]
)
def test_what_does_not_is_left_alone(line: str) -> None:
    assert not list(reads(ast.parse(line)))
