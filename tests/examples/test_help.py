"""Every option of every example, benchmark and command says what it does."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = [path for folder in ("examples", "benchmarks", "dejax") for path in sorted((ROOT / folder).rglob("*.py"))]


def bare_options(source: str) -> list[str]:
    """The options that `add_argument` gets without `help`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        ast.unparse(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument" and call.args
        # `**` may bring a help text.
        if not any(keyword.arg in ("help", None) for keyword in call.keywords)
    ]


def test_options_have_help() -> None:
    bare = {path.name: found for path in COMMANDS if (found := bare_options(path.read_text(encoding="utf-8")))}
    assert not bare


def test_an_option_without_help_is_found() -> None:
    assert bare_options('p.add_argument("--a"); p.add_argument("--b", help="b")') == ["'--a'"]
