"""Chooses the tests that run on the oldest jax: together they execute each line of dejax that any test executes.

    pip install coverage pytest-cov
    pytest -n 2 -m "not slow and not full" --cov=dejax --cov-context=test --cov-report= --junitxml=times.xml tests
    python tests/choose_oldest.py .coverage times.xml

with the oldest jax. It writes tests/oldest_jax.txt. Several runs can be given, each as a pair of files.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path

LIST = Path(__file__).parent / "oldest_jax.txt"  # node ids, one a line


def cover(lines: Mapping[str, set[int]], seconds: Mapping[str, float]) -> list[str]:
    """Names of tests whose lines are all lines, in little time: greedy, most new lines a second first.

    Args:
        lines: the numbers of the lines that each test executes.
        seconds: that each test takes; at least a hundredth is counted.
    """
    left, chosen = {name: set(some) for name, some in lines.items() if some}, list[str]()
    while left:
        best = max(left, key=lambda name: (len(left[name]) / max(0.01, seconds[name]), name))
        new = left.pop(best)
        chosen.append(best)
        left = {name: rest for name, some in left.items() if (rest := some - new)}
    return chosen


def _times(path: str) -> dict[str, float]:
    """Seconds of each test by "tests.module.Class::name[case]"."""
    return {
        f"{case.get('classname')}::{case.get('name')}": float(case.get("time") or 0)
        for case in ElementTree.parse(path).iter("testcase")
    }


def _key(node: str) -> str:
    """The name that a report of times has for a test."""
    path, _, rest = node.partition("::")
    function, bracket, case = rest.partition("[")
    *classes, name = function.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *classes]) + f"::{name}{bracket}{case}"


def _lines(path: str, numbers: dict[tuple[str, int], int]) -> dict[str, set[int]]:
    """The lines that each test executes, numbered, without those that run on import."""
    import coverage

    data = coverage.CoverageData(path)
    data.read()
    found: dict[str, set[int]] = {}
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            if "" in contexts:
                continue
            number = numbers.setdefault((file, line), len(numbers))
            for context in contexts:
                found.setdefault(context.partition("|")[0], set()).add(number)
    return found


def main(arguments: Iterable[str]) -> None:
    paths = list(arguments)
    lines, seconds, numbers = dict[str, set[int]](), dict[str, float](), dict[tuple[str, int], int]()
    for data, times in zip(paths[::2], paths[1::2], strict=True):
        known = _times(times)
        for node, some in _lines(data, numbers).items():
            lines.setdefault(node, set()).update(some)
            seconds[node] = known.get(_key(node), 1.0)
    chosen = cover(lines, seconds)
    LIST.write_text("".join(f"{node}\n" for node in sorted(chosen)), encoding="utf-8")
    took, every = (sum(seconds[node] for node in some) for some in (chosen, lines))
    print(f"{len(chosen)} of {len(lines)} tests execute all {len(numbers)} lines, in {took:.0f} of {every:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
