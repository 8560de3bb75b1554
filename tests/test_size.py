"""Functions and modules stay short enough to be read at once (CONTRIBUTING.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = 100  # of a function, without its docstring
MOST_LINES_OF_A_MODULE = 500


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def long_functions(text: str, most: int) -> list[str]:
    """The functions of a module's text with more lines, as "name: lines"."""
    found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [f"{node.name}: {lines_of(node)}" for node in found if lines_of(node) > most]


@pytest.mark.parametrize("folder", ["dejax", "benchmarks", "examples"])
def test_functions_are_short(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (names := long_functions(path.read_text(), MOST_LINES))
    }
    assert not found, f"longer than {MOST_LINES} lines; make steps with names of them: {found}"


def test_modules_are_short() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in (ROOT / "dejax").rglob("*.py")}
    named = {str(path.relative_to(ROOT)): size for path, size in sizes.items()}
    long = {name: size for name, size in named.items() if size > MOST_LINES_OF_A_MODULE}
    assert not long, f"longer than {MOST_LINES_OF_A_MODULE} lines; a module has one concept: {long}"


def test_the_counts() -> None:
    text = 'def f():\n    """Says\n    two lines."""\n    a = 1\n    return a\n\n\nasync def g():\n    pass\n'
    assert long_functions(text, 2) == ["f: 3"] and long_functions(text, 1) == ["f: 3", "g: 2"]
