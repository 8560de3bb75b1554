"""Contexts, pinned memory and kernels, with a fake driver of two devices that prints the calls it gets."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from dejax import _native
from dejax.host_gather import _kernels
from tests.native.test_cuda_driver import build


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"), "-DWITH_CONTEXTS")


def ran(driver: Path, code: str, **environment: str) -> tuple[list[str], str]:
    """The calls that the driver got, in order, and standard error."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), "JAX_PLATFORMS": "cpu", **environment}
    code = "from dejax import _dejax_native as module\n" + code  # alone: to import jax takes two seconds
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_memory_for_one_device_uses_no_other_device(driver: Path) -> None:
    calls, _ = ran(driver, "memory = module.HostMemory.allocate(4096, 1)\ndel memory")
    assert calls == ["retain 1", "alloc 1", "synchronize 1", "free 1"]
    calls, _ = ran(driver, "import numpy as np\nx = np.zeros(4096, np.uint8)\n"
                   "memory = module.HostMemory.adopt(x.ctypes.data, 4096, True, 0, x)\ndel memory")  # fmt: skip
    assert calls == ["retain 0", "register 0", "synchronize 0", "unregister 0"]


def test_memory_for_a_drive_is_registered_where_the_driver_can(driver: Path) -> None:
    code = "memory = module.HostMemory.allocate({}, 0, True)\nprint(memory.address % 4096)\ndel memory"
    for size in (4096, 5 << 20):  # pages of 4 KiB and of 2 MiB
        calls, _ = ran(driver, code.format(size))
        assert calls == ["retain 0", "register 0", "0", "synchronize 0", "unregister 0"]
    calls, _ = ran(driver, code.format(4096).replace("print(memory.address % 4096)\n", ""), FAKE_CUDA_FAILS="register")
    assert calls == ["retain 0", "register 0", "alloc 0", "synchronize 0", "free 0"]


def test_memory_is_freed_after_the_work_of_all_devices_in_use(driver: Path) -> None:
    calls, _ = ran(driver, "a, b = (module.HostMemory.allocate(64, k) for k in (0, 1))\ndel a, b")
    assert sorted(calls[4:]) == ["free 0", "free 1"] + ["synchronize 0"] * 2 + ["synchronize 1"] * 2


@pytest.mark.parametrize(
    ("fails", "call"),
    [("free", "cuMemFreeHost"), ("synchronize", "cuCtxSynchronize"), ("unregister", "cuMemHostUnregister")],
)
def test_memory_that_cannot_be_freed_is_kept_and_reported(driver: Path, fails: str, call: str) -> None:
    make = "module.HostMemory.allocate(4096, 0)"
    if fails == "unregister":
        make = "module.HostMemory.adopt(x.ctypes.data, 4096, True, 0, x)"
    code = "import sys, numpy as np\nx = np.zeros(4096, np.uint8)\nbefore = sys.getrefcount(x)\n" + (
        f"memory = {make}\ndel memory\nprint('held', sys.getrefcount(x) - before)"
    )
    calls, errors = ran(driver, code, FAKE_CUDA_FAILS=fails)
    assert f"dejax.host_gather: {call} failed when 4096 bytes of a table were released: CUDA error 999" in errors
    assert f"held {int(fails == 'unregister')}" in calls  # the owner lives as long as the driver may read its memory
    assert fails != "synchronize" or "free 0" not in calls


def test_memory_that_cannot_be_pinned(driver: Path) -> None:
    code = "try: module.HostMemory.allocate(4096, 0)\nexcept RuntimeError as error: print(error)"
    calls, _ = ran(driver, code, FAKE_CUDA_FAILS="alloc")
    assert calls[-1] == "cuMemHostAlloc of 4096 bytes failed: CUDA error 999"


def test_kernels_are_loaded_on_the_given_devices(driver: Path) -> None:
    code = """
print(module.has_kernel(5, [1]), repr(module.add_kernel(5, b"for one", "k", [1])))
print(module.has_kernel(5, [1]), module.has_kernel(5, [0]), module.has_kernel(5, [0, 1]), module.has_kernel(6, []))
print(repr(module.add_kernel(5, b"for zero", "k", [0])), module.has_kernel(5, [0, 1]))
"""
    calls, _ = ran(driver, code)
    asked = [call for call in calls if call.startswith(("retain", "for"))]
    assert asked == ["retain 1", "for one 1", "retain 0", "for zero 0"]
    assert [call for call in calls if call not in asked] == ["False ''", "True False False False", "'' True"]
    calls, _ = ran(
        driver, "print(module.add_kernel(5, b'bad', 'k', [0]), module.has_kernel(5, [0]))", FAKE_CUDA_FAILS="bad"
    )
    assert calls[-1] == "loading the kernel k failed: CUDA error 999 False"


def test_taking_an_error_does_not_start_the_driver(driver: Path) -> None:
    calls, _ = ran(driver, "print(module.take_gather_error())")
    assert calls == ["None"]


def test_memory_for_errors_is_allocated_once(driver: Path) -> None:
    code = "print(module.prepare_gather_errors(1), module.prepare_gather_errors(0), module.take_gather_error())"
    calls, _ = ran(driver, code)
    assert calls == ["retain 1", "alloc 1", "retain 0", "True True None"]
    calls, _ = ran(driver, code, FAKE_CUDA_FAILS="alloc")  # each call tries again
    assert calls == ["retain 1", "alloc 1", "retain 0", "alloc 0", "False False None"]


def test_each_compute_capability_gets_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has four devices; jax uses three of them, of two compute capabilities."""
    kinds = [SimpleNamespace(compute_capability=c) for c in ((8, 0), (9, 0), (9, 0), (8, 0))]
    used = [SimpleNamespace(local_hardware_id=k) for k in (1, 2, 3)]
    added: list[Any] = []
    module = SimpleNamespace(
        has_kernel=lambda key, ordinals: any(key == k and ordinals == o for k, _, o in added),
        add_kernel=lambda key, image, name, ordinals: added.append((key, image, ordinals)) or "",
    )
    monkeypatch.setattr(_native, "cuda_driver", lambda: (SimpleNamespace(devices=kinds), None))
    monkeypatch.setattr(_native, "extension", lambda what: module)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: used)
    monkeypatch.setattr(_kernels, "compiled", lambda name, source, definitions, capability: capability)
    _kernels._devices.cache_clear()
    try:
        for _ in range(2):
            key = _kernels.prepare("gather.cu", ID="int")
        assert added == [(key, (8, 0), [3]), (key, (9, 0), [1, 2])]
    finally:
        _kernels._devices.cache_clear()
