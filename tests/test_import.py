"""What importing dejax costs and loads."""

import os
import re
import statistics
import subprocess
import sys

import pytest

import dejax
from dejax import _native
from dejax._compat import JAX_VERSION, unsupported_jax

HEAVY = ("flax", "jraph", "rdflib", "matplotlib", "tensorstore", "optax", "orbax")


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, *flags, "-c", code], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran


@pytest.mark.parametrize("module", ["dejax", "dejax.rgnn", "dejax.pallas", "dejax.host_gather", "dejax.offload"])
def test_nothing_heavy_is_imported(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}} & set({HEAVY!r})))"
    assert python(code).stdout.split() == []


@pytest.mark.parametrize(
    ("package", "name"), [("rgnn", "nnx"), ("rgnn", "linen"), ("offload", "nnx"), ("offload", "linen")]
)
def test_faces_of_flax_are_imported_when_named(package: str, name: str) -> None:
    code = f"import sys, dejax.{package} as p; before = 'flax' in sys.modules; print(before, p.{name}.__name__)"
    assert python(code).stdout.split() == ["False", f"dejax.{package}.{name}"]


def test_import_of_dejax_loads_no_submodule() -> None:
    code = "import sys, dejax; print(*sorted(name for name in sys.modules if name.startswith('dejax')))"
    assert python(code).stdout.split() == ["dejax"]


def test_import_time_beside_jax() -> None:
    # The interpreter's own clock, on the import of dejax alone, with jax there: other work on the machine counts less
    # than in the difference of two whole processes. The median of three, since it still counts.
    times = []
    for _ in range(3):
        lines = python("import jax, dejax", "-X", "importtime").stderr.splitlines()
        (cumulative,) = [re.split(r"[:|]", line)[2] for line in lines if re.fullmatch(r".*\| dejax", line)]
        times.append(int(cumulative) / 1e6)
    assert statistics.median(times) < 0.3, times


def test_public_names_resolve() -> None:
    code = "import dejax; print(*[name for name in dejax.__all__ if getattr(dejax, name, None) is None])"
    assert python(code).stdout.split() == []
    assert set(dejax.__all__) <= set(dir(dejax))


def test_an_unknown_name_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'rgn'; it has .*rgnn"):
        _ = dejax.rgn


def test_without_the_extension_the_error_has_the_remedy() -> None:
    code = """
import sys
sys.modules["dejax._dejax_native"] = None
import dejax, dejax.rgnn
from dejax import _native
try:
    _native.row_gather([[1.0]], [0])
except _native.NativeExtensionError as error:
    print(error)
"""
    message = python(code).stdout
    assert message.startswith("row_gather needs dejax's native extension")
    assert "pip install ." in message


def test_an_extension_for_a_later_jaxlib_is_refused_before_it_stops_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    if _native.unavailable_reason():
        pytest.skip("no native extension")
    monkeypatch.setattr(_native, "_jaxlib_ffi_version", lambda: (0, 0))
    module, why = _native._load.__wrapped__()
    assert module is None
    assert "it was built for version 0." in why


def test_the_ffi_version_of_jaxlib_is_found() -> None:
    version = _native._jaxlib_ffi_version()
    assert version is not None and version >= (0, 3)


def test_the_installed_jax_is_supported() -> None:
    assert unsupported_jax() is None
    assert JAX_VERSION >= (0, 10, 2)
