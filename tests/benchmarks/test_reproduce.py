"""docs/performance/reproduce.md names every result and every table, and its commands are what scripts take."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance" / "reproduce.md").read_text(encoding="utf-8")
COMMANDS = sorted({c for c in re.findall(r"`(python [^`]+)`", PAGE) if "render_tables" not in c})


def tracked(*patterns: str) -> list[str]:
    """Files of the repository; of the sdist, which has no repository, the files that are there."""
    command = ["git", "ls-files", "--", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    return found or [str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)]


def script_of(words: list[str]) -> Path:
    """The file that a command runs."""
    if words[1] != "-m":
        return ROOT / words[1]
    path = ROOT / words[2].replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def options_of(script: Path) -> set[str]:
    """The options that a script adds to its parser; those of examples and of the package are in dejax/training."""
    places = [script] if script.parent.name == "benchmarks" else sorted((ROOT / "dejax" / "training").rglob("*.py"))
    calls = [
        node
        for place in places
        for node in ast.walk(ast.parse(place.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    strings = [a.value for call in calls for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return {string for string in strings if string.startswith("--")}


@pytest.mark.parametrize("name", [Path(name).name for name in tracked("benchmarks/results/*")])
def test_every_result_has_a_command(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_every_generated_table_has_a_command() -> None:
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = {name for page in pages for name in re.findall(r"<!-- (\w+): made by ", page.read_text(encoding="utf-8"))}
    assert names and not [name for name in names if f"`{name}`" not in PAGE]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_what_scripts_take(command: str) -> None:
    words = shlex.split(command)
    script = script_of(words)
    assert script.is_file()
    given = {word for word in words if word.startswith("--")}
    assert given <= options_of(script), f"{script} has no {sorted(given - options_of(script))}"


def test_every_benchmark_that_is_a_command_is_named() -> None:
    scripts = [
        name
        for name in tracked("benchmarks/*.py")
        if name.count("/") == 1 and '__name__ == "__main__"' in (ROOT / name).read_text(encoding="utf-8")
    ]
    known = {"benchmarks/render_tables.py", "benchmarks/offload_curves.py"}
    named = {str(script_of(shlex.split(command)).relative_to(ROOT)) for command in COMMANDS}
    assert not sorted(set(scripts) - named - known)


def test_every_benchmark_is_a_module() -> None:
    """`python -m benchmarks.NAME` finds what it imports; peers may need torch, which is not installed here."""
    names = [Path(name).stem for name in tracked("benchmarks/*.py") if name.count("/") == 1]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module('benchmarks.' + name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert error.name == 'torch', (name, error)\n"
    )
    command = [sys.executable, "-c", code, *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("name", ["benchmarks/requirements.txt", "benchmarks/peers/requirements.txt"])
def test_versions_are_pinned(name: str) -> None:
    assert name in PAGE
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith(("#", "--"))]
    assert wanted and all("==" in line for line in wanted)
