"""The probe of the CUDA driver: with a fake driver, without one, and with the machine's own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dejax import _native

PROBE = "from dejax import _native; print(*_native.cuda_driver(), sep='\\n')"
# Without Python's layer, since importing jax takes two seconds.
REASON = "from dejax import _dejax_native as module; print(module.probe_cuda_driver().unavailable)"


def probe(library_path: Path, code: str = PROBE, **environment: str) -> list[str]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(library_path), "JAX_PLATFORMS": "cpu", **environment}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def build(folder: Path, *flags: str) -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler to build the fake driver")
    source = Path(__file__).with_name("fake_libcuda.cc")
    command = [compiler, "-shared", "-fPIC", *flags, str(source), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


def test_devices_of_a_driver(fake_driver: Path) -> None:
    driver, why = probe(fake_driver)
    assert why == "None"
    assert driver.startswith("CudaDriver(version=(13, 2), devices=(CudaDevice(name='Fake A', compute_capability=(9, 0)")
    assert f"total_memory={1 << 36}, multiprocessors=132, l2_cache={60 << 20}, can_map_host_memory=True" in driver
    assert "pageable_memory_access=False" in driver  # an attribute that the driver does not know
    assert f"name='Fake B', compute_capability=(9, 0), total_memory={1 << 33}" in driver


@pytest.mark.parametrize(("code", "name"), [("100", "CUDA_ERROR_NO_DEVICE"), ("999", "CUDA error 999")])
def test_a_driver_that_does_not_start(fake_driver: Path, code: str, name: str) -> None:
    assert probe(fake_driver, REASON, FAKE_CUDA_INIT=code) == [f"cuInit failed: {name}"]


def test_a_driver_that_lacks_a_function(tmp_path: Path) -> None:
    (why,) = probe(build(tmp_path, "-DWITHOUT_STREAM_GET_CTX"), REASON)
    assert why == "libcuda.so.1 has no cuStreamGetCtx; the driver is too old for dejax"


def test_a_broken_driver_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"not a library")
    driver, why = probe(tmp_path)
    assert driver == "None"
    assert why.startswith("no CUDA driver: ")


def test_this_machine() -> None:
    driver, why = _native.cuda_driver()
    assert (driver is None) != (why is None)
    if any(device.platform == "gpu" for device in jax.devices()):
        assert driver is not None and driver.devices


def test_handlers_of_both_platforms_are_there() -> None:
    handlers = {(name, platform) for name, platform, _ in _native.extension("test").handlers()}
    assert handlers >= {("dejax_table_gather", "cpu"), ("dejax_table_gather", "CUDA")}


@pytest.mark.gpu
def test_the_driver_sees_what_jax_sees() -> None:
    driver, why = _native.cuda_driver()
    assert driver is not None, why
    assert len(driver.devices) == len(jax.devices("cuda"))
    assert driver.devices[0].can_map_host_memory
    assert driver.devices[0].name == jax.devices("cuda")[0].device_kind
