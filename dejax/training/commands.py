"""What the three training commands share: some arguments, and the files of a finished run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAVE_SECONDS = 30.0
"""Seconds between two checkpoints of a long run."""


def check_resume(args: argparse.Namespace) -> None:
    """Raises ValueError where a run without checkpoints is to be continued."""
    if args.resume and args.no_checkpoints:
        raise ValueError("--resume must not stand with --no-checkpoints: it needs checkpoints; leave one of them out")


def fan_outs_of(text: str | None, example: str) -> tuple[int, ...] | None:
    """The numbers of `--fan-outs`; None where it was not given."""
    if text is None:
        return None
    try:
        return tuple(int(k) for k in text.split(","))
    except ValueError:
        raise ValueError(f"--fan-outs must be integers with commas, as {example}, got {text!r}") from None


def check_settings(settings: Any, at_least_1: tuple[str, ...], at_least_0: tuple[str, ...]) -> None:
    """Raises ValueError for settings of a run on mini-batches that are out of range."""
    if not settings.fan_outs or any(k < -1 or k == 0 for k in settings.fan_outs):
        raise ValueError(f"fan_outs must be numbers from 1, or -1 for all, one for each layer, got {settings.fan_outs}")
    for least, names in ((1, at_least_1), (0, at_least_0)):
        for name in names:
            if getattr(settings, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(settings, name)}")
    if not 0.0 <= settings.dropout < 1.0:
        raise ValueError(f"dropout must be a share in [0, 1), got {settings.dropout}")
    if settings.lr <= 0:
        raise ValueError(f"lr must be positive, got {settings.lr}")


def write_run(
    out: Path,
    results: dict[str, Any],
    draw: Callable[[Path], None],
    checkpoints: Any,
    table: Callable[[dict[str, Any], dict[str, str]], str],
) -> None:
    """Writes `results.json` and `curves.png`, and prints the table.

    Args:
        out: the folder of the run.
        results: plain values.
        draw: draws the curves to a file.
        checkpoints: the run's; None where it has none.
        table: (results, path of each written file by name) -> text.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(out / "curves.png")
    artifacts = {"results": str(out / "results.json"), "curves": str(out / "curves.png")}
    if checkpoints is not None:
        artifacts["checkpoints"] = str(out / "checkpoints")
    print(f"\n{table(results, artifacts)}", flush=True)
