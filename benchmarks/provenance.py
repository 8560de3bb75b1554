"""Where a result comes from: commit, versions, device, flags, command.

`python -m benchmarks` writes results with `save`, so that a figure can be measured again. What cannot be found is
None. No path of the machine and no host name is written: a path outside the repository becomes `PATH`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dejax._origin import versions, without_paths

ROOT = Path(__file__).resolve().parents[1]
Save = Callable[[Any], None]
"""Writes what a benchmark has found so far."""
ALWAYS = ("dejax", "jax", "jaxlib", "numpy")
IF_IMPORTED = (
    "flax",
    "optax",
    "torch",
    "torch_geometric",
    "pyg_lib",
    "dgl",
    "jraph",
    "orbax.checkpoint",
    "tensorstore",
)


def save(path: Path, found: Any, *, device: bool = True) -> None:
    """Writes results as JSON, with where they come from under "about".

    Args:
        path: the file; its folder is made.
        found: a dict, to which "about" is added, or a list, which becomes "results". Other values become text.
        device: as of `provenance`.
    """
    named = found if isinstance(found, dict) else {"results": found}
    whole = {"about": provenance(device=device)} | {key: value for key, value in named.items() if key != "about"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1, default=str) + "\n", encoding="utf-8")


def provenance(*, device: bool = True) -> dict[str, Any]:
    """Commit, versions, device, driver, flags and command of this process, as plain values that `json.dumps` takes.

    It imports no package but `dejax` itself: the others count as they are loaded.

    Args:
        device: ask jax, else torch, for the device, if loaded. False where another process measures: asking starts
            the device here, and jax reserves most of its memory.
    """
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **_commit(),
        "versions": versions(*ALWAYS, *(name for name in IF_IMPORTED if name in sys.modules)),
        "architecture": platform.machine(),
        "device": _device() if device else None,
        "driver": _driver(),
        "cuda": _cuda() if device else None,
        "XLA_FLAGS": without_paths(os.environ.get("XLA_FLAGS", ""), ROOT),
        "command": _command(),
    }


def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def _commit() -> dict[str, Any]:
    """The commit of the repository, and whether tracked files differ from it; None without a repository here."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        return {"commit": None, "dirty": None}
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": _git("rev-parse", "HEAD"), "dirty": None if changed is None else bool(changed)}


def _device() -> str | None:
    """The device's name: jax's, else torch's."""
    if jax := sys.modules.get("jax"):
        return str(jax.devices()[0].device_kind)
    if torch := sys.modules.get("torch"):
        return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
    return None


def _driver() -> str | None:
    """The version of NVIDIA's driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"Kernel Module\D*?\s(\d+(?:\.\d+)+)", text)
    return found[1] if found else None


def _cuda() -> str | None:
    """The version of CUDA that jax, else torch, runs with."""
    if jax := sys.modules.get("jax"):
        found = re.search(r"cuda (\d+)", str(getattr(jax.devices()[0].client, "platform_version", "")))
        return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else None
    torch = sys.modules.get("torch")
    return torch.version.cuda if torch else None


def _command() -> str:
    module = getattr(sys.modules["__main__"], "__spec__", None)
    first = ["-m", module.name.removesuffix(".__main__")] if module else sys.argv[:1]
    return without_paths(shlex.join(["python", *first, *sys.argv[1:]]), ROOT)
