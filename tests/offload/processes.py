"""Programs that tests run in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def python(code: str, *arguments: str, timeout: float = 120, **kwargs):
    """Runs a program to its end."""
    process = popen(code, *arguments, **kwargs)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def popen(code: str, *arguments: str, interpreter_options: Sequence[str] = (), **kwargs):
    """Starts a program."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, *interpreter_options, "-c", code, *arguments],
        env=environment, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **kwargs,
    )  # fmt: skip
