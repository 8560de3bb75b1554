"""The measurements of benchmarks/offload.py."""

import json

from benchmarks import offload_measuring


def test_results_of_an_unfinished_case_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("DEJAX_BENCHMARK_PART", str(tmp_path / "part.json"))
    offload_measuring.keep({"rows": [1]})
    assert json.loads((tmp_path / "part.json").read_text()) == {"rows": [1]}
