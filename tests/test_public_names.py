"""Every public name has a docstring, as have its public methods; names without a test or an example are listed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.newest_jax

ROOT = Path(__file__).parents[1]
LISTED = Path(__file__).with_name("public_names_without_example.json")


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


def test_new_names_have_an_example(request: pytest.FixtureRequest) -> None:
    """The list only gets shorter: a new public name needs a doctest, or a use in a page, a notebook or an example."""
    found = without_example()
    if request.config.getoption("--update-golden"):
        LISTED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    assert sorted(set(found) - set(json.loads(LISTED.read_text(encoding="utf-8")))) == []
