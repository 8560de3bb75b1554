"""The lists of tests by what they are for name tests that exist, and the choice for the oldest jax covers all lines."""

from pathlib import Path

import pytest

from .choose_oldest import LIST, cover
from .conftest import LONG


@pytest.mark.parametrize("path", [LONG, LIST], ids=lambda path: path.name)
def test_a_list_names_tests_that_exist(path: Path) -> None:
    gone = []
    for node in path.read_text(encoding="utf-8").splitlines():
        file, *classes, function = node.partition("[")[0].split("::")
        module = Path(__file__).parents[1] / file
        text = module.read_text(encoding="utf-8") if module.exists() else ""
        if not all(f"class {name}" in text for name in classes) or f"def {function}(" not in text:
            gone.append(node)
    assert not gone, f"tests/{path.name} names tests that are gone; take them out: {gone}"


def test_chosen_tests_execute_every_line_in_little_time() -> None:
    lines = {"all": {1, 2, 3, 4}, "a": {1, 2}, "b": {3, 4}, "c": {2}, "nothing": set[int]()}
    assert cover(lines, {"all": 9.0, "a": 1.0, "b": 1.0, "c": 1.0, "nothing": 0.0}) == ["b", "a"]
    assert cover(lines, {"all": 1.0, "a": 1.0, "b": 1.0, "c": 1.0, "nothing": 0.0}) == ["all"]
