"""Contexts, pinned memory and kernels, with a driver of two devices that writes down what it is asked for."""

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
from tests.native.test_driver import build

pytestmark = pytest.mark.skipif(
    _native.unavailable_reason() is not None, reason=f"no native extension: {_native.unavailable_reason()}"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"), "-DWITH_CONTEXTS")


def ran(driver: Path, code: str, **environment: str) -> tuple[list[str], str]:
    """What the driver was asked for, in order, and standard error."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), "JAX_PLATFORMS": "cpu", **environment}
    code = "import gc\nfrom dejax import _native\nmodule = _native.extension('a test')\n" + code
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_memory_of_one_device_leaves_the_others_alone(driver: Path) -> None:
    calls, _ = ran(driver, "memory = module.HostMemory.allocate(4096, 1)\ndel memory")
    assert calls == ["retain 1", "alloc 1", "synchronize 1", "free 1"]
    calls, _ = ran(driver, "import numpy as np\nx = np.zeros(4096, np.uint8)\n"
                   "memory = module.HostMemory.adopt(x.ctypes.data, 4096, True, 0, x)\ndel memory")  # fmt: skip
    assert calls == ["retain 0", "register 0", "synchronize 0", "unregister 0"]


def test_devices_in_use_are_waited_for(driver: Path) -> None:
    calls, _ = ran(driver, "a, b = (module.HostMemory.allocate(64, k) for k in (0, 1))\ndel a, b")
    assert sorted(calls[4:]) == ["free 0", "free 1"] + ["synchronize 0"] * 2 + ["synchronize 1"] * 2


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("fails", "call"),
    [("free", "cuMemFreeHost"), ("synchronize", "cuCtxSynchronize"), ("unregister", "cuMemHostUnregister")],
)
def test_memory_that_cannot_be_given_back_is_kept_and_said(driver: Path, fails: str, call: str) -> None:
    make = "module.HostMemory.allocate(4096, 0)"
    if fails == "unregister":
        make = "module.HostMemory.adopt(x.ctypes.data, 4096, True, 0, x)"
    code = "import sys, numpy as np\nx = np.zeros(4096, np.uint8)\nbefore = sys.getrefcount(x)\n" + (
        f"memory = {make}\ndel memory\nprint('held', sys.getrefcount(x) - before)"
    )
    calls, said = ran(driver, code, FAKE_CUDA_FAILS=fails)
    assert f"dejax.host_gather: {call} failed when 4096 bytes of a table were given back: CUDA error 999" in said
    assert f"held {int(fails == 'unregister')}" in calls  # what the driver may still read stays with its owner
    assert fails != "synchronize" or "free 0" not in calls


def test_memory_that_cannot_be_had(driver: Path) -> None:
    code = "try: module.HostMemory.allocate(4096, 0)\nexcept RuntimeError as error: print(error)"
    calls, _ = ran(driver, code, FAKE_CUDA_FAILS="alloc")
    assert calls[-1] == "cuMemHostAlloc of 4096 bytes failed: CUDA error 999"


def test_kernels_are_loaded_on_the_devices_that_are_named(driver: Path) -> None:
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


def test_nobody_is_asked_before_there_is_a_table(driver: Path) -> None:
    calls, _ = ran(driver, "print(module.take_gather_error())")
    assert calls == ["None"]


@pytest.mark.full
def test_words_for_errors_are_made_once(driver: Path) -> None:
    code = "print(module.prepare_gather_errors(1), module.prepare_gather_errors(0), module.take_gather_error())"
    calls, _ = ran(driver, code)
    assert calls == ["retain 1", "alloc 1", "retain 0", "True True None"]
    calls, _ = ran(driver, code, FAKE_CUDA_FAILS="alloc")  # each call tries again
    assert calls == ["retain 1", "alloc 1", "retain 0", "alloc 0", "False False None"]


def test_each_kind_of_device_has_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four devices that the driver shows jax uses three, of two kinds."""
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
    monkeypatch.setattr(_kernels, "_compiled", lambda file, definitions, capability: capability)
    _kernels._devices.cache_clear()
    try:
        for _ in range(2):
            key = _kernels.prepare("gather.cu", ID="int")
        assert added == [(key, (8, 0), [3]), (key, (9, 0), [1, 2])]
    finally:
        _kernels._devices.cache_clear()
