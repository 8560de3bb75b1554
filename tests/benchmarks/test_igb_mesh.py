"""The benchmark of MLPerf's R-GAT on several devices runs on two CPU devices, and loses no node."""

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
    command = [sys.executable, "-m", "benchmarks", "igb_mesh", "--check", "--device-gb", "1e-5", "--out"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    subprocess.run([*command, str(tmp_path / "found.json")], cwd=ROOT, env=environment, check=True, timeout=600)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(case["case"], case["devices"]) for case in found["results"]] == [
        (place, devices) for place in ("host", "divided") for devices in (1, 2)
    ]
    assert all(case["lost"] == 0 for case in found["results"])
    (sample,) = found["sample"]
    assert sample["rows"]["host"] and not sample["rows"]["other"]
