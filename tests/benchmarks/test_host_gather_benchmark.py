"""The benchmark runs and writes what its plot needs."""

import json
from pathlib import Path

import pytest

from benchmarks import host_gather_overlap
from benchmarks.host_gather import main
from dejax.pallas.profile import Record


def test_quick(tmp_path: Path) -> None:
    main(["--quick", "--sections", "sizes,update", "--out", str(tmp_path), "--plot"])
    (written,) = tmp_path.glob("*.json")
    report = json.loads(written.read_text())
    assert report["copy_engine"] > 0 and report["notes"] == []
    for cell in report["sections"]["sizes"]:
        assert min(cell["given"], cell["sorted"], cell["auto"], cell["numpy"]) > 0
    assert list(tmp_path.glob("*.png"))
    main(["--quick", "--sections", "small", "--out", str(tmp_path), "--keep"])
    kept = json.loads(written.read_text())
    assert kept["sections"]["sizes"] == report["sections"]["sizes"] and len(kept["sections"]["small"]) == 2
    assert kept["copy_engine_of"]["sizes"] == report["copy_engine"]


def test_overlap_of_gathers_and_kernels_in_a_profile() -> None:
    product = [Record("product", start, 500e3, "regs:168") for start in (100e3, 1200e3)]
    found = host_gather_overlap.overlap_of([Record("dejax_gather", 0.0, 1000e3, "grid:4"), *product])
    assert (found["span_ms"], found["gather_microseconds"], found["gathers_alongside_others"]) == (1.7, 1000.0, 0.5)
    (kernel,) = found["kernels"]
    assert (kernel["calls"], kernel["details"]) == (2, "regs:168")
    assert kernel["alone_microseconds"] == kernel["alongside_microseconds"] == 500.0
    product[0] = Record("product", 100e3, 800e3, "regs:168")
    (kernel,) = host_gather_overlap.overlap_of([Record("dejax_gather", 0.0, 1000e3, "grid:4"), *product])["kernels"]
    assert (kernel["alone_microseconds"], kernel["alongside_microseconds"]) == (500.0, 800.0)


@pytest.mark.slow
def test_all_sections() -> None:
    report = main(["--quick"])
    assert report["notes"] == [] and all(report["sections"].values())
    steps = {cell["pipeline"]: cell["loss"] for cell in report["sections"]["epoch"]}
    first, ahead, *_ = steps.values()
    assert ahead == pytest.approx(first, rel=1e-3)  # the same samples, the same training
