"""`python -m dejax.info`."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import dejax
import dejax.__main__ as greeting
from dejax import info


def run(*arguments: str, code: str | None = None, **environment: str) -> str:
    command = [sys.executable, *(["-c", code] if code else ["-m", "dejax.info"]), *arguments]
    ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def reasons(report: dict) -> dict[str, str]:
    return {entry["what"]: entry["why"] for entry in report["unavailable"]}


def test_json_describes_this_machine() -> None:
    report = json.loads(run("--json"))
    assert report["versions"]["dejax"] == dejax.__version__
    assert report["versions"]["python"] == platform.python_version()
    assert report["versions"]["jax"] == jax.__version__
    assert set(info.PACKAGES) <= set(report["versions"])
    assert report["default_backend"] == jax.default_backend()
    assert [device["platform"] for device in report["devices"]] == [device.platform for device in jax.devices()]
    for device in report["devices"]:
        assert device["default_memory_kind"] in device["memory_kinds"]
    assert all(set(entry) == {"what", "why", "remedy"} and all(entry.values()) for entry in report["unavailable"])
    assert (report["driver"] is None) == ("CUDA driver" in reasons(report))
    assert report["native"]["loaded"] == ("native extension" not in reasons(report))


def test_text_has_every_section() -> None:
    text = run(JAX_PLATFORMS="cpu")
    headings = [line for line in text.splitlines() if line and not line.startswith(" ")]
    names = [
        "dejax",
        "Versions",
        "Machine",
        "Devices",
        "CUDA driver",
        "Native extension",
        "Tuned tables",
        "Unavailable",
    ]
    assert [heading for heading, name in zip(headings, names, strict=True) if heading.startswith(name)] == headings
    assert ["jax", jax.__version__] in [line.split() for line in text.splitlines()]
    assert "default backend: cpu" in text
    assert "Pallas kernels run interpreted" in text
    lines = [line for line in text.splitlines() if "_dejax_native" not in line and "Linux" not in line]
    assert max(map(len, lines)) <= 120


def test_without_the_extension_it_says_so_and_dejax_imports() -> None:
    # None in sys.modules makes the import fail like a missing file.
    code = "import sys; sys.modules['dejax._dejax_native'] = None; import dejax.info; dejax.info.main(['--json'])"
    report = json.loads(run(code=code, JAX_PLATFORMS="cpu"))
    assert report["native"]["loaded"] is False
    assert "pip install ." in reasons(report)["native extension"]
    assert report["driver"] is None and "CUDA driver" in reasons(report)


def test_a_source_tree_that_hides_an_installed_dejax_says_so(tmp_path: Path) -> None:
    """As where a user installs dejax from the source tree, and then runs Python there."""
    without = shutil.ignore_patterns("*.so", "*.pyc")
    shutil.copytree(Path(dejax.__file__).parent, tmp_path / "tree/dejax", ignore=without)
    installed = tmp_path / "site/dejax"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    (installed / "_dejax_native.abi3.so").touch()
    path = [str(tmp_path / "tree"), str(tmp_path / "site")]
    hidden = "sys.modules['dejax._dejax_native'] = None"  # an editable installation would give it to any dejax
    code = f"import sys; sys.path[:0] = {path}; {hidden}; import dejax.info; dejax.info.main(['--json'])"
    report = json.loads(run(code=code, JAX_PLATFORMS="cpu"))
    assert str(installed) in reasons(report)["native extension"]
    assert "run Python in another folder" in [entry["remedy"] for entry in report["unavailable"]]
    assert "not at all: this folder hides the installed dejax" in [how for _, _, how in greeting.parts(report)]


def test_tuned_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAX_CACHE_DIR", str(tmp_path))
    text = '{"gemm": {"a": {"block_n": 64}, "b": {}}, "outer": {"c": {}}}'
    (tmp_path / "schedules_nvidia_h200.json").write_text(text)
    (tmp_path / "schedules_other.json").write_text("{")
    report = info.collect()
    assert report["tuned_tables"] == [{"file": "schedules_nvidia_h200.json", "entries": 3}]
    assert "cannot be read" in reasons(report)["tuned table schedules_other.json"]
    assert "schedules_nvidia_h200.json: 3 entries" in info.render(report)


@pytest.mark.parametrize(("version", "extra"), [((13, 0), "cuda13"), ((12, 8), "cuda12")])
def test_a_driver_that_jax_does_not_use(version: tuple[int, int], extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("jax uses the GPU of this machine")
    device = {
        "name": "Fake", "compute_capability": [9, 0], "total_memory": 2**36, "multiprocessors": 132,
        "l2_cache": 2**25, "can_map_host_memory": True,
    }  # fmt: skip
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(info, "_native", lambda missing: {"loaded": True, "file": "", "ffi_version": [0, 3],
                                                          "threads": 1, "handlers": []})  # fmt: skip
    monkeypatch.setattr(info, "_driver", lambda missing: {"version": list(version), "devices": [device]})
    report = info.collect()
    (remedy,) = [entry["remedy"] for entry in report["unavailable"] if entry["what"] == "GPU in jax"]
    assert remedy == f"pip install 'jax[{extra}]>=0.10.2,<0.13'"
    assert "Fake: compute capability 9.0, 64.0 GiB, 132 SMs, 32 MiB L2, can map host memory" in info.render(report)

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_PLATFORMS=cpu" in reasons(info.collect())["GPU in jax"]


def test_the_range_of_jax_is_that_of_the_package() -> None:
    declared = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"jax{info._JAX_RANGE}"' in declared and f'"jax[cuda13]{info._JAX_RANGE}"' in declared


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    report = json.loads(run("--json"))
    assert report["kernels"] == "compiled"
    assert "pinned_host" in report["devices"][0]["memory_kinds"]
    assert report["driver"]["devices"][0]["can_map_host_memory"] is True


def test_the_greeting_says_what_works_here_and_what_is_next() -> None:
    ran = subprocess.run([sys.executable, "-m", "dejax"], capture_output=True, text=True, check=True)
    assert f"dejax {dejax.__version__} with jax {jax.__version__}" in ran.stdout
    assert all(command in ran.stdout for command, _ in greeting.NEXT)
    assert len(ran.stdout.splitlines()) < 20


def test_the_greeting_on_a_gpu_and_on_a_machine_without_devices() -> None:
    report = info.collect()
    gpu = report | {"devices": [{"platform": "gpu", "kind": "NVIDIA H200"}], "default_backend": "gpu"}
    ways = {name: how for name, _, how in greeting.parts(gpu)}
    assert ways["dejax.rgnn"] == "by kernels on NVIDIA H200"
    nothing = report | {"devices": [], "default_backend": None}
    assert {how for _, _, how in greeting.parts(nothing)} == {"not at all: jax has no device"}
    no_jax = nothing | {"versions": report["versions"] | {"jax": None}}
    assert {how for _, _, how in greeting.parts(no_jax)} == {"not at all: jax is not installed"}
    without = report | {"native": {"loaded": False, "reason": "x"}}
    assert "native extension is missing" in {name: how for name, _, how in greeting.parts(without)}["dejax.offload"]
