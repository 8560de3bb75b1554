"""Test configuration: virtual CPU devices, why a test cannot run here, golden texts, profiles of hypothesis."""

import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before jax starts its CPU client: four devices, for shard_map and meshes. A GPU, where jax has one, stays the default.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=4".strip()
# Two pytest workers and a GPU: neither may reserve three quarters of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import jax
import pytest

from dejax import _native

# dejax's commands turn jax's cache on disk on, for the whole process and with files in the user's folder.
jax.config.update("jax_enable_compilation_cache", False)

# Tracing makes many objects and few cycles, and jax has work of its own to do at each collection: a tenth of the time.
gc.set_threshold(100_000, 20, 50)

GOLDEN = Path(__file__).parent / "golden"

# deadline=None: the first example of a test compiles, which takes a hundred times as long as the second.
hypothesis.settings.register_profile(
    "dejax", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("dejax"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dejax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden texts under tests/golden from what the code gives",
    )
    parser.addoption(
        "--failures-at-once", action="store_true", help="print the traceback of each failed test when it ends"
    )


class _FailuresAtOnce:
    """Prints the traceback of a failed test when the test ends: a run that is cut short would lose it."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\n{report.when} of {report.nodeid} failed:\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)  # when pytest has its terminal reporter
def pytest_configure(config: pytest.Config) -> None:
    if reason := _native.unavailable_reason():
        raise pytest.UsageError(
            f"the tests need dejax's native extension ({reason}). Build it for this tree: pip install --editable ."
        )
    if config.getoption("--failures-at-once") and not hasattr(config, "workerinput"):
        terminal = config.pluginmanager.getplugin("terminalreporter")
        config.pluginmanager.register(_FailuresAtOnce(terminal), "failures at once")


def _why_not_here(item: pytest.Item) -> str | None:
    """Why a test cannot run on the devices that jax has; None if it can."""
    gpu, cpu_only, devices = map(item.get_closest_marker, ("gpu", "cpu_only", "devices"))
    if not (gpu or cpu_only or devices):
        return None
    on_gpu = jax.default_backend() == "gpu"
    if gpu and not on_gpu:
        return f"needs a GPU; jax's default backend is {jax.default_backend()!r}"
    if cpu_only and on_gpu:
        return f"on CPUs only: {cpu_only.args[0]}"
    if devices and jax.device_count() < devices.args[0]:
        return f"needs {devices.args[0]} devices, jax has {jax.device_count()}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := _why_not_here(item):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)  # before the fixtures of modules
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a GPU, products of float32 keep float32's digits, as on a CPU, where a test does not ask for fewer.

    A GPU's default is TF32, with which no program equals its reference to 1e-5. Tests marked `gpu` keep that default.
    """
    if jax.default_backend() == "gpu":
        jax.config.update("jax_default_matmul_precision", None if item.get_closest_marker("gpu") else "highest")


# A process has at most 65,530 mappings of memory (Linux's default), and each compiled program has about ten. XLA
# aborted a worker that had compiled for some thousand tests.
_MOST_MAPPINGS = 30_000
_ended = itertools.count(1)


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Frees compiled programs where a process has many of them."""
    maps = Path("/proc/self/maps")
    if next(_ended) % 25 or nextitem is None or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)`: compare `text` with tests/golden/name.txt, or write it under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(
                f"no golden text {path}; write it with `pytest --update-golden` and read it before you commit it"
            )
        assert text == path.read_text(encoding="utf-8"), (
            f"tests/golden/{name} differs; if the change is meant, run pytest --update-golden and read the diff"
        )

    return compare
