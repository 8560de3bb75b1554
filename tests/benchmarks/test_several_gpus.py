"""The sections of the benchmark run on two CPU devices and two processes, and give the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_check(tmp_path: Path) -> None:
    flags = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "benchmarks", "several_gpus", "--check", "--out", str(tmp_path / "found.json")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [len(found[section]) for section in ("mini_batch", "full_graph", "tables", "decoder")] == [4, 6, 2, 2]
    assert all(case["lost"] == 0 for case in found["mini_batch"])
    differences = ("loss_difference", "peer_copies_loss_difference")
    assert all(case.get(name, 0.0) < 1e-6 for case in found["full_graph"] for name in differences)
    bounds = {"peer_copies_ms", "part_ms", "exchange_ms", "exchange_gb_s", "rest_ms"}
    assert all(bounds.issubset(case) == (case["devices"] > 1) for case in found["full_graph"])
    remat, inputs = found["decoder"]
    assert remat["collectives"] == inputs["collectives"] and remat["losses"] == inputs["losses"]
