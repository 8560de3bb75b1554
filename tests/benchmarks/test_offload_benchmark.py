"""The measurements of benchmarks/offload.py."""

import json

import pytest

from benchmarks import offload_measuring
from dejax.pallas import profile

MS = 1e6


def test_time_of_overlapping_copies_and_compute(monkeypatch):
    records = [("MemcpyH2D", 0, 4), ("MemcpyH2D", 3, 3), ("MemcpyD2H", 5, 5), ("fusion", 2, 1), ("MemcpyD2D", 9, 3)]
    monkeypatch.setattr(profile, "record", lambda run: [profile.Record(n, b * MS, d * MS) for n, b, d in records])
    found = offload_measuring.overlap(lambda: None)
    assert found == pytest.approx(
        {
            "in_ms": 6,
            "out_ms": 5,
            "kernels_ms": 4,
            "in_and_out_ms": 1,
            "in_and_kernels_ms": 1,
            "out_and_kernels_ms": 1,
            "span_ms": 12,
        }
    )
    monkeypatch.setattr(profile, "record", lambda run: [])
    assert offload_measuring.overlap(lambda: None) == {}


def test_results_of_an_unfinished_case_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("DEJAX_BENCHMARK_PART", str(tmp_path / "part.json"))
    offload_measuring.keep({"rows": [1]})
    assert json.loads((tmp_path / "part.json").read_text()) == {"rows": [1]}
