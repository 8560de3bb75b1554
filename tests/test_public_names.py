"""Every public name has a docstring, as have its public methods; names without a test or an example are listed."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def site() -> Any:
    spec = importlib.util.spec_from_file_location("site_build", ROOT / "docs" / "site" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = site()
NAMES = {
    f"{module}.{name}": getattr(importlib.import_module(module), name)
    for module in SITE.PUBLIC
    for name in SITE.public_names(importlib.import_module(module))
    if not inspect.ismodule(getattr(importlib.import_module(module), name))
}


def words_of_examples() -> set[str]:
    """All words in code blocks of pages, in notebooks and in examples."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*.md")]
    texts = [
        block for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ]
    texts += [path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")]
    for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return set(re.findall(r"\w+", "\n".join(texts)))


def without_example() -> list[str]:
    words = words_of_examples()
    bare = [name for name, value in NAMES.items() if ">>>" not in (getattr(value, "__doc__", None) or "")]
    return sorted(name for name in bare if name.rpartition(".")[2] not in words)


def test_functions_and_classes_have_docstrings() -> None:
    assert not [n for n, value in NAMES.items() if callable(value) and not (inspect.getdoc(value) or "").strip()]


def test_docstrings_are_sentences() -> None:
    """The first line of a docstring is what the reference and editors show."""
    lines = {n: (inspect.getdoc(v) or "").strip().splitlines()[0] for n, v in NAMES.items() if callable(v)}
    assert not [name for name, line in lines.items() if len(line) < 10]


def test_every_name_has_an_example() -> None:
    """A doctest, or a use in a code block of a page, in a notebook, or in an example."""
    assert without_example() == []


@functools.cache
def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def strings_of(text: str) -> list[str]:
    return [node.value for node in nodes_of(text) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def aliases_of(text: str) -> dict[str, str]:
    """What the imported names of a file stand for, as far as they are ours."""
    found: dict[str, str] = {}
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.partition(".")[0] == "dejax"]
            found |= {alias.asname or "dejax": alias.name if alias.asname else "dejax" for alias in ours}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dejax":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def used_in(text: str, cases: frozenset[str] = frozenset()) -> set[str]:
    """The names of ours that a test file uses, as "module.name".

    A use is an imported name, an attribute of an imported module, either of them in a string (random programs are
    text), or an attribute that `getattr` reads of a module: then all of `cases` are used, which are the words in the
    strings of the file's folder.
    """
    aliases = aliases_of(text)
    found: set[str] = set()
    for node in nodes_of(text):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in aliases:
            found.add(aliases[node.id])
        elif isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in aliases:
                found.add(f"{aliases[first]}.{rest}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            if (module := ast.unparse(node.args[0])) in aliases:
                found |= {f"{aliases[module]}.{word}" for word in cases}
    for string in strings_of(text):
        for first, rest in re.findall(r"\b(\w+)\.([\w.]+)\(", string):
            if first in aliases:
                found.add(f"{aliases[first]}.{rest}")
    return found


def without_test() -> list[str]:
    """Public names that no test imports and uses.

    A name counts under any path that gives the same object: `dejax.rgnn.RelGraph` is also
    `dejax.rgnn.graphs.rel_graph.RelGraph`.
    """
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    texts = {path: path.read_text("utf-8") for path in files}
    words: dict[Path, set[str]] = {}
    for path, text in texts.items():
        words.setdefault(path.parent, set()).update(re.findall(r"\w+", " ".join(strings_of(text))))
    names = set().union(*(used_in(text, frozenset(words[path.parent])) for path, text in texts.items()))
    used: set[int] = set()
    for full in names:
        module, _, name = full.rpartition(".")
        try:
            used.add(id(getattr(importlib.import_module(module), name)))
        except (ImportError, AttributeError, ValueError):
            continue
    return sorted(name for name, value in NAMES.items() if id(value) not in used)


def test_every_name_is_used_by_a_test() -> None:
    assert without_test() == []


def test_uses_are_found() -> None:
    text = "import dejax\nfrom dejax import rgnn as r\nfrom dejax.offload import region\n"
    text += "r.exp(dejax.info.collect(), eval('r.log(x)'), getattr(r, name))"
    found = used_in(text, frozenset({"tanh"}))
    assert {"dejax.rgnn.exp", "dejax.rgnn.log", "dejax.rgnn.tanh", "dejax.info.collect"} <= found
    assert "dejax.offload.region" not in found  # imported, and not used
