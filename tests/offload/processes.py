"""Programs that tests run in processes of their own."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

JOINS = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
arguments = sys.argv[3:]
"""


def python(code: str, *arguments: str, timeout: float = 120, **kwargs):
    """Runs a program to its end."""
    process = popen(code, *arguments, **kwargs)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_two(code: str, *arguments: str, **kwargs):
    """Starts a program in two processes of two devices each, which know one another; `arguments` has its arguments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    before, os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", ""), flags
    try:
        return [popen(JOINS + code, str(i), port, *arguments, **kwargs) for i in range(2)]
    finally:
        os.environ["XLA_FLAGS"] = before


def two_processes(code: str, *arguments: str, timeout: float = 120):
    """Runs a program in two processes to its end, as `start_two` does.

    Returns:
        For each, what it wrote to its two streams.
    """
    both = start_two(code, *arguments)
    try:
        return [process.communicate(timeout=timeout) for process in both]
    finally:
        for process in both:
            process.kill()


def assert_two_are_fine(code: str, folder: Path) -> None:
    """Runs a program with a folder in two processes: both print "fine", and leave nothing in the folder."""
    ends = two_processes(code, str(folder))
    assert all("fine" in out for out, _ in ends), ends
    assert not list(folder.iterdir())


def popen(code: str, *arguments: str, interpreter_options: Sequence[str] = (), as_here: bool = False, **kwargs):
    """Starts a program, on the CPU, or with the devices and the precision of products that this process has."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if as_here and jax.default_backend() == "gpu":
        precision = jax.config.jax_default_matmul_precision
        environment |= {"JAX_PLATFORMS": "cuda,cpu", "JAX_DEFAULT_MATMUL_PRECISION": precision}
    return subprocess.Popen(
        [sys.executable, *interpreter_options, "-c", code, *arguments],
        env=environment, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **kwargs,
    )  # fmt: skip
