"""The notebooks run, in order, and print what they show; `--update-golden` writes the outputs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def runner():
    spec = importlib.util.spec_from_file_location("notebook_runner", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNNER = runner()


QUICK = ("link_prediction",)


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[] if p.stem in QUICK else pytest.mark.slow, id=p.stem) for p in RUNNER.notebooks()],
)
def test_a_notebook_prints_what_it_shows(path, request) -> None:
    found = RUNNER.run(path)
    if request.config.getoption("--update-golden"):
        RUNNER.write(path, found)
        return
    assert found == json.loads(path.read_text(encoding="utf-8"))


def test_every_notebook_is_listed_and_has_small_outputs() -> None:
    assert sorted(FOLDER.glob("*.ipynb")) == sorted(RUNNER.notebooks())
    for path in RUNNER.notebooks():
        assert path.stat().st_size < 20_000
        assert "False" not in str([cell.get("outputs") for cell in json.loads(path.read_text())["cells"]])


def test_a_cell_gives_what_it_prints_and_its_last_expression() -> None:
    names: dict = {}
    assert RUNNER.run_cell("x = 3\nprint(x)", names, "a")[0]["text"] == ["3\n"]
    assert RUNNER.run_cell("x + 1", names, "b")[0]["data"] == {"text/plain": ["4"]}
    assert RUNNER.run_cell("x = 5", names, "c") == []
