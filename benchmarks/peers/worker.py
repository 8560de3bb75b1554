"""Measures cells in a process of its own, so that PyTorch and JAX never hold the GPU at the same time.

    python worker.py jax|torch < job.json

The job has `cells`, `folder`, `limits`, `cache`, `known`. Each line of standard output that begins with `@@` is JSON:
first `{"versions"}`, then for each cell `{"start": i}` and `{"done": i, "result": ...}`.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def say(**message: Any) -> None:
    print("@@" + json.dumps(message), flush=True)


def main() -> None:
    if sys.argv[1] == "jax":
        from benchmarks.peers import run_jax as run
    else:
        from benchmarks.peers import run_torch as run  # type: ignore[no-redef]
    from benchmarks.peers.timing import Limits

    job = json.loads(sys.stdin.read())
    say(versions=run.prepare(job.get("cache")))
    limits, folder, known = Limits(**job["limits"]), Path(job["folder"]), job["known"]
    for i, cell in enumerate(job["cells"]):
        say(start=i)
        result = _result(run, cell, folder / cell["graph"], limits, known)
        run.clean_up()
        if result["status"] == "ok":
            known.append({**cell, **result})
        say(done=i, result=result)


def _result(run: Any, cell: dict[str, Any], folder: Path, limits: Any, known: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        if cell["implementation"] == "compiled":
            cell["base"] = _best(cell, known)
            if cell["base"] is None:
                return {"status": "does not apply", "message": "nothing of PyTorch's ran that could be compiled"}
        return {"status": "ok", **run.run_cell(cell, folder, limits)}
    except Exception as error:  # a failing cell is a result, too
        status = run.classify(error)
        if status == "error":
            traceback.print_exc(limit=-4)
        return {"status": status, "message": f"{type(error).__name__}: {str(error)[:300]}"}


def _best(cell: dict[str, Any], known: list[dict[str, Any]]) -> str | None:
    same = [k for k in known if all(k[key] == cell[key] for key in ("graph", "model", "settings")) and "training" in k]
    ours = [k for k in same if k["implementation"] in ("pyg", "pyg_fast", "grouped")]
    return min(ours, key=lambda k: k["training"]["ms"])["implementation"] if ours else None


if __name__ == "__main__":
    main()
