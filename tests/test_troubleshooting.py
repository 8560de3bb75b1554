"""docs/troubleshooting.md shows messages that the code has."""

import ast
import functools
import re
from pathlib import Path

from tests.imports import modules, tree_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `") and line.count(" | ") >= 2]
TEXTS = (ast.Constant, ast.JoinedStr, ast.BinOp)


def text_of(node: ast.expr) -> str:
    """A message with NUL in place of what is filled in; "" for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return ""


@functools.cache
def messages() -> str:
    """All texts of some length in the code, docstrings included."""
    trees = (tree_of(path) for path in modules().values())
    texts = {text_of(node) for tree in trees for node in ast.walk(tree) if isinstance(node, TEXTS)}
    return "\1".join(sorted(text for text in texts if len(text) > 20))


def is_in_the_code(shown: str) -> bool:
    """Whether a message has the parts of the shown one, with anything in place of three dots."""
    parts, code = re.split(r"\.\.\.+", shown), messages()
    longest = max(parts, key=len)
    pattern = re.compile("[^\1]*".join(map(re.escape, parts)))
    at = code.find(longest)
    while at >= 0:
        begin, end = code.rfind("\1", 0, at) + 1, code.find("\1", at)
        end = len(code) if end < 0 else end
        if pattern.search(code, begin, end):
            return True
        at = code.find(longest, end)
    return False


def test_every_message_shown_is_in_the_code() -> None:
    shown = [
        text.replace("\\|", "|") for row in ROWS for text in re.findall(r"`([^`]+)`", re.split(r"(?<!\\) \| ", row)[0])
    ]
    shown = [text for text in shown if len(text.replace(".", "")) > 12]
    unknown = [text for text in shown if not is_in_the_code(text)]
    assert not unknown
    assert len(shown) >= 40


def test_every_row_says_why_and_what_to_do() -> None:
    for row in ROWS:
        cells = [cell.strip(" |") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 3 and all(cells), row


def test_a_message_that_is_not_in_the_code_is_found() -> None:
    assert not is_in_the_code("the moon must be full, got ...")
