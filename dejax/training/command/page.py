"""The report of a run on tables as one HTML file: measures, curves, calibration or residuals, and what contributes."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from dejax._files import write_whole
from dejax._optional import new_figure
from dejax.datasets import Task
from dejax.reporting._page import page
from dejax.training.command.predictions import labels_of
from dejax.training.metrics import Ranking, interval, measure

_BLUE, _GREY = "#0072B2", "#555555"
_BINS = 10
_MOST_ROWS = 30


def write_page(
    path: Path,
    results: Mapping[str, Any],
    task: Task,
    predicted: Mapping[str, Any],
    importance: Mapping[str, Mapping[str, float]] | None,
) -> None:
    """Writes the report.

    Args:
        path: the path of the HTML file; `curves.png` lies beside it.
        results: the results of `dejax.training.command.report.summarise`.
        task: the examples.
        predicted: the first seed's predictions by split, as `TableTask.predict` gives them.
        importance: the result of `dejax.training.tables.importance.importance`; None: not computed.
    """
    parts = [
        f"<h1>{escape(task.name)} of {escape(task.entity)}</h1>",
        f'<p class="quiet">{escape(results["dataset"])}: {escape(results["command"])}</p>',
        f"<pre>{escape(task.summary())}</pre>",
        "<h2>Measures</h2><p>Of the first seed, with bootstrap intervals of 95 %; of the test also over all seeds, "
        "where there are several.</p>",
        _table(("", "value", "95 %", "mean of seeds", "deviation"), measures(results, task, predicted)),
        "<h2>Curves</h2>",
        _image((path.parent / "curves.png").read_bytes()),
    ]
    split = "test" if len(predicted.get("test", ())) else "valid"
    if len(predicted.get(split, ())):
        labels = labels_of(task, task.splits[split])
        parts += [f"<h2>{_HEADINGS[task.kind]}</h2>", _image(_figure(task, labels, predicted[split]))]
    if importance is not None:
        parts.append(
            "<h2>What contributes</h2>"
            "<p>By how much the first measure of validation examples becomes worse if a "
            "column's values are permuted among rows, or a relation's edges are taken out.</p>"
        )
        for what, found in importance.items():
            rows = [(name, f"{value:+.4f}") for name, value in found.items()]
            parts.append(_table((what, "worse by"), rows[:_MOST_ROWS]))
            parts.append(f'<p class="quiet">and {len(rows) - _MOST_ROWS} more</p>' if len(rows) > _MOST_ROWS else "")
    text = page(f"{task.name}: {results['dataset']}", f'<div class="dejax-report">{"".join(parts)}</div>')
    write_whole(path, text.encode())


_HEADINGS = {
    "binary": "ROC curve and calibration",
    "classes": "Confusion",
    "regression": "Residuals",
    "link": "Recall and ranks",
}


def measures(
    results: Mapping[str, Any], task: Task, predicted: Mapping[str, Any]
) -> list[tuple[str, str, str, str, str]]:
    """For each split and measure its value with an interval; of the test also mean and deviation over several seeds."""
    rows = []
    for split in ("valid", "test"):
        values = predicted.get(split, ())
        if not len(values):
            continue
        labels = labels_of(task, task.splits[split])
        if task.kind == "binary":  # so that no draw of the intervals has to sort them
            order = np.argsort(-values, kind="stable")
            labels, values = labels[order], values[order]
        found = measure(task.kind, labels, values)
        bounds = interval(lambda weights: measure(task.kind, labels, values, weights), len(labels))  # noqa: B023
        for name, value in found.items():
            low, high = bounds[name]
            of_seeds = results["test"].get(name, {"runs": []})
            several = split == "test" and len(of_seeds["runs"]) > 1
            more = (f"{of_seeds['mean']:.4f}", f"{of_seeds['std']:.4f}") if several else ("", "")
            rows.append((f"{name}, {split}", f"{value:.4f}", f"{low:.4f} .. {high:.4f}", *more))
    linear = results["baselines"].get("linear") or {}
    simple = "test, a linear model of counts and times"
    rows += [(f"{name}, {simple}", f"{value:.4f}", "", "", "") for name, value in linear.items()]
    return rows


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{' class=n' * bool(n)}>{escape(cell)}</{tag}>" for n, cell in enumerate(cells))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{line(header, 'th')}</tr>{body}</table>"


def _image(png: bytes) -> str:
    return f'<p><img style="max-width:100%" alt="" src="data:image/png;base64,{base64.b64encode(png).decode()}"></p>'


def _figure(task: Task, labels: np.ndarray, predicted: Any) -> bytes:
    figure = new_figure("the report of a training", (9.0, 4.0), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    if task.kind == "binary":
        _roc(left, labels, predicted)
        _calibration(right, labels, predicted)
    elif task.kind == "classes":
        _confusion(left, task, labels, predicted)
        right.set_visible(False)
    elif task.kind == "link":
        _ranks(left, right, labels, predicted)
    else:
        _residuals(left, right, task.unit, labels, predicted)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _roc(axes: Any, labels: np.ndarray, predicted: np.ndarray) -> None:
    order = np.argsort(-predicted, kind="stable")
    truth = labels[order].astype(bool)
    some = np.unique(np.linspace(0, max(0, len(truth) - 1), 500).astype(int))[: len(truth)]
    right, wrong = np.cumsum(truth)[some], np.cumsum(~truth)[some]
    axes.plot([0, *wrong / max(1, (~truth).sum())], [0, *right / max(1, truth.sum())], color=_BLUE)
    axes.plot([0, 1], [0, 1], color=_GREY, linewidth=0.8, linestyle=":")
    axes.set(xlabel="share of others above the threshold", ylabel="share of class 1 above it", title="ROC curve")


def calibration(labels: np.ndarray, predicted: np.ndarray) -> list[tuple[float, float, int]]:
    """Mean probability, share of class 1, and number of examples, in ten groups of like probability and equal size."""
    groups = np.array_split(np.argsort(predicted, kind="stable"), _BINS)
    return [(float(predicted[own].mean()), float(labels[own].mean()), len(own)) for own in groups if len(own)]


def _calibration(axes: Any, labels: np.ndarray, predicted: np.ndarray) -> None:
    points = calibration(labels, predicted)
    most = max(max(mean, share) for mean, share, _ in points)
    axes.plot([0, most], [0, most], color=_GREY, linewidth=0.8, linestyle=":")
    axes.plot([mean for mean, _, _ in points], [share for _, share, _ in points], "o-", color=_BLUE)
    axes.set(xlabel="mean predicted probability", ylabel="share of class 1", title="calibration, by tenths")


def _confusion(axes: Any, task: Task, labels: np.ndarray, predicted: np.ndarray) -> None:
    count = predicted.shape[1]
    counts = np.zeros((count, count), np.int64)
    np.add.at(counts, (labels, predicted.argmax(-1)), 1)
    axes.imshow(counts / np.maximum(counts.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="class", title="share of each class")
    if count <= 20:
        names = task.classes or tuple(map(str, range(count)))
        axes.set_xticks(range(count), names, rotation=90)
        axes.set_yticks(range(count), names)


def _ranks(left: Any, right: Any, counts: np.ndarray, found: Ranking) -> None:
    asked = counts > 0
    if not asked.any():
        return
    k = np.arange(1, found.rows.shape[1] + 1)
    recall = (np.cumsum(found.hits, axis=1)[asked] / counts[asked, None]).mean(0)
    left.plot(k, recall, "o-", color=_BLUE)
    left.set(xlabel="length of the list", ylabel="share of an example's links in it", title="recall", ylim=(0, None))
    first = np.sort(found.first[asked & np.isfinite(found.first)])
    right.plot(first, np.arange(1, len(first) + 1) / asked.sum(), color=_BLUE)
    right.set(xlabel="rank of the best link", ylabel="share of examples", title="ranks among all candidates")
    right.set_xscale("log")


def _residuals(left: Any, right: Any, unit: str, labels: np.ndarray, predicted: np.ndarray) -> None:
    some = np.random.default_rng(0).permutation(len(labels))[:3000]
    left.plot(predicted[some], labels[some], ".", markersize=2, color=_BLUE)
    ends = [float(labels[some].min()), float(labels[some].max())]
    left.plot(ends, ends, color=_GREY, linewidth=0.8, linestyle=":")
    of_unit = f", {unit}" if unit else ""
    left.set(xlabel=f"predicted{of_unit}", ylabel=f"label{of_unit}", title="labels")
    errors = predicted - labels
    low, high = np.percentile(errors, [1, 99])
    right.hist(np.clip(errors, low, high), bins=60, color=_BLUE)
    right.set(xlabel=f"predicted - label{of_unit}", title="residuals, without the outer hundredths")
