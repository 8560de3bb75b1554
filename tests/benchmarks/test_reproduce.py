"""docs/performance/reproduce.md names every result and every table, and its commands are what benchmarks take."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import benchmarks, parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance" / "reproduce.md").read_text(encoding="utf-8")
COMMANDS = sorted({c for c in re.findall(r"`(python [^`]+)`", PAGE) if "render_tables" not in c})


def tracked(*patterns: str) -> list[str]:
    """Files of the repository; of the sdist, which has no repository, the files that are there."""
    command = ["git", "ls-files", "--", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    return found or [str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)]


def options_of_training() -> set[str]:
    """The options of `dejax-train`, which examples take, too."""
    found = set[str]()
    for place in sorted((ROOT / "dejax" / "training").rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(place.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        found |= {str(a.value) for call in calls for a in call.args if isinstance(a, ast.Constant)}
    return {string for string in found if string.startswith("--")}


@pytest.mark.parametrize("name", [Path(name).name for name in tracked("benchmarks/results/*")])
def test_every_result_has_a_command(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_every_generated_table_has_a_command() -> None:
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = {name for page in pages for name in re.findall(r"<!-- (\w+): made by ", page.read_text(encoding="utf-8"))}
    assert names and not [name for name in names if f"`{name}`" not in PAGE]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m benchmarks " not in c])
def test_commands_of_examples_are_what_they_take(command: str) -> None:
    words = shlex.split(command)
    assert words[1] == "-m" or (ROOT / words[1]).is_file()
    assert {word for word in words if word.startswith("--")} <= options_of_training()


def test_every_benchmark_is_named_and_takes_its_commands() -> None:
    commands = [
        shlex.split(command)[3:] for command in COMMANDS if "-m benchmarks " in command and "NAME" not in command
    ]
    assert {name for name, *_ in commands} == set(benchmarks())
    for name, *options in commands:
        assert parse(importlib.import_module(f"benchmarks.{name}"), name, options).out.suffix == ".json"


@pytest.mark.parametrize("name", ["benchmarks/requirements.txt", "benchmarks/peers/requirements.txt"])
def test_versions_are_pinned(name: str) -> None:
    assert name in PAGE
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith(("#", "--"))]
    assert wanted and all("==" in line for line in wanted)
