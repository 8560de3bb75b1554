"""Starts workers, follows them, stops those that take too long."""

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

from peers.timing import Limits

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
_START_S = 180.0  # imports and the device's start
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
    """Measures the cells in a worker; a cell that hangs or kills it is a result, and a new worker does the others.

    Args:
        framework: `"jax"` or `"torch"`.
        cells: what to measure.
        folder: of the graphs.
        limits: how long.
        report: called with each cell and its result, as soon as it is there.
        cache: folder of jax's persistent compilation cache.
        python: the interpreter that has the framework.

    Returns:
        Versions of what the worker ran.
    """
    versions: dict[str, str] = {}
    known: list[dict[str, Any]] = []

    def done(cell: Cell, result: dict[str, Any]) -> None:
        if result["status"] == "ok":
            known.append({**cell, **result})
        report(cell, result)

    while cells:
        count = _follow(framework, cells, folder, limits, known, cache, python, versions, done)
        cells = cells[count:]
    return versions


def _follow(
    framework: str,
    cells: list[Cell],
    folder: Path,
    limits: Limits,
    known: list[dict[str, Any]],
    cache: str | None,
    python: str,
    versions: dict[str, str],
    done: Callable[[Cell, dict[str, Any]], None],
) -> int:
    """One worker's life; how many cells are settled, at least one."""
    job = {"cells": cells, "folder": str(folder), "limits": asdict(limits), "cache": cache, "known": known}
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94", **os.environ, "PYTHONUNBUFFERED": "1"}
    worker = subprocess.Popen(
        [python, str(_WORKER), framework], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(job))
    worker.stdin.close()
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(worker, lines), daemon=True)
    reader.start()
    settled, started, alive = 0, False, False
    deadline = time.monotonic() + _START_S
    try:
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                what = "the cell" if started else f"the {framework} worker's start"
                done(cells[settled], {"status": "timeout", "message": f"{what} took more than its time"})
                return settled + 1
            if line is None:
                message = f"the {framework} worker ended with status {worker.wait()}"
                lost = cells[settled : settled + 1] if alive else cells[settled:]  # another would not start either
                for cell in lost:
                    done(cell, {"status": "error", "message": message})
                return settled + len(lost)
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
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)  # torch.compile leaves processes of its own
        worker.wait()
        reader.join()


def _read(worker: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert worker.stdout is not None
    with worker.stdout as stream:
        for line in stream:
            lines.put(line)
    lines.put(None)
