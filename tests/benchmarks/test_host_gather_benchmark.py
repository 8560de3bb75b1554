"""The benchmark runs and writes what its plot needs."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


@pytest.mark.slow
def test_quick(tmp_path: Path) -> None:
    main(["host_gather", "--quick", "--sections", "sizes,update", "--out", str(tmp_path), "--plot"])
    (written,) = tmp_path.glob("*.json")
    report = json.loads(written.read_text())
    assert report["copy_engine"] > 0 and report["notes"] == []
    for cell in report["sections"]["sizes"]:
        assert min(cell["given"], cell["sorted"], cell["auto"], cell["numpy"]) > 0
    assert list(tmp_path.glob("*.svg"))
    main(["host_gather", "--quick", "--sections", "small", "--out", str(tmp_path), "--keep"])
    kept = json.loads(written.read_text())
    assert kept["sections"]["sizes"] == report["sections"]["sizes"] and len(kept["sections"]["small"]) == 2
    assert kept["copy_engine_of"]["sizes"] == report["copy_engine"]


@pytest.mark.slow
def test_all_sections(tmp_path: Path) -> None:
    main(["host_gather", "--quick", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "host_gather.json").read_text())
    assert report["notes"] == [] and all(report["sections"].values())
