"""The benchmark's checks pass, and it writes what it prints."""

import json
from pathlib import Path

import pytest

from benchmarks.mini_batch import main


@pytest.mark.slow
def test_checks(tmp_path: Path) -> None:
    main(["--only", "correctness", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [result["section"] for result in found] == ["sample"] * 2 + ["layer"] * 3
    assert max(result["largest_error"] for result in found[2:]) < 1e-4
