"""Results say where they come from, and nothing about the machine's folders or its name."""

from __future__ import annotations

import ast
import json
import os
import platform
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import provenance
from dejax import __version__
from dejax._origin import without_paths

BENCHMARKS = provenance.ROOT / "benchmarks"


def test_a_result_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()  # with the flags of the tests, before they are others
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={Path.home()}/dump --xla_gpu_autotune_level=0")
    script = str(BENCHMARKS / "rgnn.py")
    monkeypatch.setattr(
        sys, "argv", [script, "--out", "/data/someone/results", f"--also={Path.home()}", "--graphs", "am"]
    )
    monkeypatch.delattr(sys.modules["__main__"], "__spec__", raising=False)
    found = provenance.provenance()
    assert found["command"] == "python benchmarks/rgnn.py --out PATH --also=PATH --graphs am"
    assert found["XLA_FLAGS"] == "--xla_dump_to=PATH --xla_gpu_autotune_level=0"
    assert found["versions"]["dejax"] == __version__
    assert {"python", "jax", "jaxlib", "numpy"} <= set(found["versions"])
    assert ("torch" in found["versions"]) == ("torch" in sys.modules)
    assert set(found) == set("date commit dirty versions architecture device driver cuda XLA_FLAGS command".split())
    text = json.dumps(found)
    assert str(Path.home()) not in text
    assert str(provenance.ROOT) not in text


def test_commit_is_of_this_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = provenance.provenance()
    assert found["commit"] is None or (len(found["commit"]) == 40 and found["dirty"] in (True, False))
    monkeypatch.setattr(provenance, "ROOT", tmp_path)  # no repository, as in an unpacked sdist
    found = provenance.provenance()
    assert (found["commit"], found["dirty"]) == (None, None)


def test_names_of_hosts_and_paths_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "box-7")
    given = f"--at box-7:80 --in /a/b,/c 'x y' ~/z {provenance.ROOT}{os.sep}benchmarks/results out/x.json"
    expected = "--at HOST:80 --in PATH,PATH 'x y' PATH benchmarks/results out/x.json"
    assert without_paths(given, provenance.ROOT) == expected


def test_results_are_saved_with_it(tmp_path: Path) -> None:
    for found in ([{"ms": 1.5}], {"results": [{"ms": 1.5}], "about": "of a run before"}):
        path = tmp_path / "deep" / "found.json"
        provenance.save(path, found, device=False)
        again = json.loads(path.read_text())
        assert again["results"] == [{"ms": 1.5}] and again["about"]["device"] is None
        assert again["about"]["versions"]["dejax"] == __version__


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_no_benchmark_writes_json_of_its_own(path: Path) -> None:
    """But parts of results, for another process."""
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    writes = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "write_text"]
    parts = {"offload_measuring", "provenance"}
    assert path.stem in parts or not any("json.dumps" in ast.unparse(call) for call in writes)
