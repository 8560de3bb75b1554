"""The curves of link prediction as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejax._optional import optional
from dejax.training.history import History


def draw(path: Path, results: dict[str, Any], histories: Sequence[History]) -> None:
    """Draws the loss, and the filtered MRR of validation edges, over epochs: one line for each seed.

    Args:
        path: path of the PNG.
        results: the results of the run, for the title.
        histories: one for each seed.
    """
    with optional("matplotlib", of="the plot of a training"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    settings, mrr = results["settings"], results["test"]["mrr"]["mean"]
    figure.suptitle(
        f"{results['dataset']}: {settings['layer']}, {settings['decoder']}; test MRR {mrr:.3f}", fontsize=12
    )
    left.set_title("loss", fontsize=10)
    right.set_title("filtered MRR, validation", fontsize=10)
    for seed, history in enumerate(histories):
        left.plot(history.epochs, history.loss, label=f"seed {seed}")
        values = np.array(history.accuracy.get("valid", []), float)
        there = np.isfinite(values)
        right.plot(np.array(history.epochs)[there], values[there], marker="o", markersize=3)
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.grid(True, color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    right.set_ylim(bottom=0)
    if len(histories) > 1:
        left.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
