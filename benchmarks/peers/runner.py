"""Starts workers, follows them, and stops workers that take too long."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.timing import Limits

FRAMEWORKS = {
    "dejax": "jax",
    "jax_ragged": "jax",
    "jax_dense": "jax",
    "tokamax": "jax",
    "pyg": "torch",
    "pyg_fast": "torch",
    "grouped": "torch",
    "grouped_bf16": "torch",
    "compiled": "torch",
}
_WORKER = Path(__file__).with_name("worker.py")
# CUDA graphs also for fewer than five kernels, and while profiling; see device_time.py.
GRAPHS_IN_PROFILES = "--xla_enable_command_buffers_during_profiling=true --xla_gpu_graph_min_graph_size=1"
_START_S = 180.0  # time for imports and the device's start
Cell = dict[str, Any]


def run(
    framework: str,
    cells: list[Cell],
    folder: Path,
    limits: Limits,
    report: Callable[[Cell, dict[str, Any]], None],
    cache: str | None = None,
    python: str = sys.executable,
) -> dict[str, str]:
    """Measures the cells in a worker. If a cell hangs or kills it, that is its result, and a new worker does the rest.

    A cell that kills a JAX worker is tried once more without CUDA graphs in the profiles.

    Args:
        framework: `"jax"` or `"torch"`.
        cells: the cells to measure.
        folder: the folder of the graphs.
        limits: limits of time.
        report: called with each cell and its result.
        cache: folder of jax's persistent compilation cache.
        python: the interpreter with the framework.

    Returns:
        Versions of the worker's packages.
    """
    versions: dict[str, str] = {}
    known: list[dict[str, Any]] = []

    def done(cell: Cell, result: dict[str, Any]) -> None:
        if result["status"] == "ok":
            known.append({**cell, **result})
        report(cell, result)

    flags = GRAPHS_IN_PROFILES if framework == "jax" else ""
    while cells:
        environment = {
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94",
            **os.environ,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
            "PYTHONUNBUFFERED": "1",
        }
        job = {"cells": cells, "folder": str(folder), "limits": asdict(limits), "cache": cache, "known": known}
        count, dead = _follow([python, str(_WORKER), framework], job, environment, limits, versions, done)
        cells = cells[count:]
        if dead and flags:
            flags = ""
        elif dead:
            done(cells[0], {"status": "error", "message": dead})
            cells = cells[1:]
    return versions


def _follow(
    command: list[str],
    job: dict[str, Any],
    environment: dict[str, str],
    limits: Limits,
    versions: dict[str, str],
    done: Callable[[Cell, dict[str, Any]], None],
) -> tuple[int, str]:
    """One worker's life: the number of settled cells, and the reason why it ended in the next one."""
    cells = job["cells"]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError), worker.stdin:
        worker.stdin.write(json.dumps(job))
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(worker, lines), daemon=True)
    reader.start()
    settled, started, alive = 0, False, False
    deadline = time.monotonic() + _START_S
    try:
        while settled < len(cells):
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                what = "the cell" if started else "the worker's start"
                done(cells[settled], {"status": "timeout", "message": f"{what} took more than its time"})
                return settled + 1, ""
            if line is None:
                message = f"the worker {' '.join(command[2:])} ended with status {worker.wait()}"
                if alive:
                    return settled, message
                for cell in cells[settled:]:  # another worker would not start either
                    done(cell, {"status": "error", "message": message})
                return len(cells), ""
            if not line.startswith("@@"):
                print(line, end="", file=sys.stderr)
                continue
            message = json.loads(line[2:])
            if "versions" in message:
                alive = True
                versions |= message["versions"]
            if "start" in message:
                started, deadline = True, time.monotonic() + limits.cell_s
            if "done" in message:
                done(cells[settled], message["result"])
                settled, started = settled + 1, False
                deadline = time.monotonic() + _START_S
        return settled, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)  # torch.compile leaves child processes
        worker.wait()
        reader.join(timeout=10.0)


def _read(worker: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert worker.stdout is not None
    with worker.stdout as stream:
        for line in stream:
            lines.put(line)
    lines.put(None)
