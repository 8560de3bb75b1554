"""The curves of a run as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejax._optional import optional
from dejax.training.report import MODEL_NAMES
from dejax.training.state import History

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = {"train": "#0072B2", "valid": "#E69F00", "test": "#D55E00"}
_GREY = "#555555"


def draw_curves(path: Path, results: dict[str, Any], histories: Sequence[History]) -> None:
    """Draws loss and measures over epochs: the mean over seeds, and the range from the lowest to the highest seed.

    Args:
        path: path of the PNG.
        results: the result of `dejax.training.report.summarise`, for the baselines and the title.
        histories: one for each seed.
    """
    with optional("matplotlib", of="the plot of a training"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    # Agg without pyplot needs no display and touches no global state.
    figure = Figure(figsize=(11.2, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    settings = results["settings"]
    seeds = f"{len(histories)} seeds" if len(histories) > 1 else "1 seed"
    decoder = f", {settings['decoder']}" if settings["task"] == "links" else ""
    figure.suptitle(
        f"{MODEL_NAMES[results['model']]}{decoder} on {results['dataset']}: {settings['layers']} layers, "
        f"{settings['hidden']} wide, {seeds}",
        fontsize=12,
    )
    _draw_loss(left, histories)
    _draw_measures(right, results, histories)
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.set_xlim(0, max(1, *(len(h.loss) for h in histories)))
        axes.grid(True, color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_loss(axes: Any, histories: Sequence[History]) -> None:
    axes.set_title("training loss", fontsize=10)
    length = min(len(h.loss) for h in histories)
    if not length:
        return
    losses = np.array([h.loss[:length] for h in histories])
    _band(axes, np.arange(1, length + 1), losses, _COLOURS["train"], None)
    axes.set_yscale("log")


def _draw_measures(axes: Any, results: dict[str, Any], histories: Sequence[History]) -> None:
    shares = "accuracy" in results
    scale = 100 if shares else 1
    what = {"links": "edges", "tables": "examples"}.get(results["task"], "nodes")
    axes.set_title("accuracy, %" if shares else results["measure"], fontsize=10)
    names = {"train": f"training {what}", "valid": f"validation {what}", "test": f"test {what}"}
    # A resumed seed has a point where it stopped. Other seeds may lack that point.
    epochs = sorted(set.intersection(*(set(h.epochs) for h in histories)))
    for split, colour in _COLOURS.items():
        if not epochs or not all(split in h.measures for h in histories):
            continue
        curves = [dict(zip(h.epochs, h.measures[split], strict=True)) for h in histories]
        values = scale * np.array([[curve[epoch] for epoch in epochs] for curve in curves])
        there = np.isfinite(values).all(0)  # a measure is nan where it was not due
        if there.any():
            last = values[:, there][:, -1].mean()
            _band(axes, np.array(epochs)[there], values[:, there], colour, f"{names[split]} ({last:.3g})")
    baselines = results["baselines"]
    if baselines["no_edges"]:
        mean = 100 * baselines["no_edges"]["mean"]
        axes.axhline(mean, color=_GREY, linewidth=1.2, linestyle="--", label=f"no edges, test ({mean:.1f})")
    if baselines["majority"] is not None:
        majority = 100 * baselines["majority"]
        axes.axhline(
            majority, color=_GREY, linewidth=1.2, linestyle=":", label=f"majority class, test ({majority:.1f})"
        )
        axes.set_ylim(0, 102)
    # Next to the plot, since lines may be anywhere in it.
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)


def _band(axes: Any, x: np.ndarray, values: np.ndarray, colour: str, label: str | None) -> None:
    dots = {"marker": "o", "markersize": 4, "clip_on": False} if len(x) <= 12 else {}  # one evaluation makes no line
    axes.plot(x, values.mean(0), color=colour, linewidth=1.8, label=label, **dots)
    if len(values) > 1:
        axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
