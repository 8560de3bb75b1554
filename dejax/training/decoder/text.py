"""Text as bytes, and random windows of it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np


def read_text(folder: Path | None = None, limit: int | None = None) -> bytes:
    """The files of a folder, joined in the order of their names; by default the standard library's modules.

    Args:
        folder: every file below it that holds no zero byte at its begin is read as text.
        limit: of the bytes that are read.

    Raises:
        FileNotFoundError: the folder is not there, or has no text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    if not root.is_dir():
        raise FileNotFoundError(f"{root} must be a folder of text; give another")
    if folder is None:
        files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts))
    else:
        files = sorted(p for p in root.rglob("*") if p.is_file())
    parts, total = [], 0
    for path in files:
        content = path.read_bytes()
        if b"\0" in content[:8192]:
            continue
        parts.append(content)
        total += len(content)
        if limit is not None and total >= limit:
            break
    if total == 0:
        raise FileNotFoundError(f"{root} must hold files of text, found none; give another folder")
    return b"".join(parts)[:limit]


def batch_at(text: bytes, step: int, *, seed: int, batch: int, sequence: int) -> np.ndarray:
    """Random windows, int32 [batch, sequence + 1]; they depend only on the seed and the step.

    Raises:
        ValueError: the text is shorter than a window.
    """
    data = np.frombuffer(text, np.uint8)
    if len(data) <= sequence:
        raise ValueError(f"batch_at: the text must have more than {sequence} bytes, got {len(data)}; give more text")
    begins = np.random.default_rng((seed, step)).integers(0, len(data) - sequence, batch)
    return np.stack([data[b : b + sequence + 1] for b in begins]).astype(np.int32)
