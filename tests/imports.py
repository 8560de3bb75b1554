"""What imports what in dejax, read from the source: imports inside functions and for type checking included."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

Graph = dict[str, set[str]]


def modules(package: str = "dejax") -> dict[str, Path]:
    """The modules of a package by dotted name."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported_names(path: Path, annotations: bool = True) -> frozenset[str]:
    """Every dotted name that a file imports; `from a import b` gives `a.b`.

    Args:
      path: the file.
      annotations: whether imports under `if TYPE_CHECKING` count.
    """
    found: set[str] = set()
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not annotations:
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def import_graph(annotations: bool = True) -> Graph:
    """Which modules of dejax each of its modules imports, for annotations alone or not.

    The package `dejax` itself is left out: it loads its parts lazily, and what others read of it is its version.
    """
    known = modules()

    def module_of(name: str) -> str:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    graph = {
        importer: {module_of(name) for name in imported_names(path, annotations)} - {"", "dejax", importer}
        for importer, path in known.items()
    }
    del graph["dejax"]
    return graph


def cycles(graph: Graph) -> list[set[str]]:
    """The sets of modules that import each other, directly or through others."""
    reached: Graph = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[start] = seen
    found: list[set[str]] = []
    for name in graph:
        cycle = {other for other in reached[name] if name in reached[other]}
        if cycle and cycle not in found:
            found.append(cycle)
    return found
