"""Markers of tests: those that commands choose by exist, and tests for CPUs only say why."""

import ast
import re
import tomllib
from pathlib import Path


def test_tests_for_cpus_only_are_few_and_say_why() -> None:
    count = 0
    for path in Path(__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "mark.cpu_only" not in text:
            continue
        nodes = list(ast.walk(ast.parse(text)))
        marks = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "cpu_only"]
        uses = [node for node in nodes if isinstance(node, ast.Call) and node.func in marks]
        assert len(uses) == len(marks), f"{path}: write cpu_only(why)"
        for use in uses:
            assert len(use.args) == 1 and isinstance(use.args[0], ast.Constant), f"{path}:{use.lineno}"
            assert len(str(use.args[0].value).split()) > 3, f"{path}:{use.lineno}: say why"
        count += text.count("\ndef test_") if "pytestmark = pytest.mark.cpu_only" in text else len(uses)
    assert 0 < count < 60


def test_commands_choose_by_markers_that_exist() -> None:
    """A marker that is gone stops pytest; the workflow has no choice of its own: it runs `make`, most by `.ci/run`."""
    root = Path(__file__).parents[1]
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    known = {re.match(r"\w+", line)[0] for line in settings["tool"]["pytest"]["ini_options"]["markers"]}
    make = (root / "Makefile").read_text(encoding="utf-8")
    chosen = [*re.findall(r'-m ("[^"]+"|slow)', make), *re.findall(r"^MARK \?= (.+)$", make, re.MULTILINE)]
    assert len(chosen) > 4 and set(re.findall(r"\w+", " ".join(chosen))) - {"not", "and", "or", "MARK"} <= known
    workflow = root / ".github/workflows/test.yml"
    if workflow.exists():  # a source distribution has none
        commands = re.findall(r"run: (.*)", workflow.read_text(encoding="utf-8"))
        assert commands == [".ci/run", "make lowering"]  # the second one has another package and blocks another one
        assert "\nmake test-all" in (root / ".ci/run").read_text(encoding="utf-8")
