"""The report of a run: its results as plain data for JSON, as a table, and its curves as a PNG."""

from __future__ import annotations

import datetime
import os
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejax._files import replacing
from dejax._optional import new_figure
from dejax._origin import versions, without_paths
from dejax._platform import default_device, on_gpu
from dejax.training.metrics import is_better
from dejax.training.state import History
from dejax.training.trainer import Trainer

FORMAT = 2
"""The version of the JSON. It increases when a field changes its meaning."""

MODEL_NAMES = {
    "rgcn": "R-GCN",
    "rgat": "RGAT",
    "hgt": "HGT",
    "sage": "GraphSAGE",
    "mlp": "MLP",
    "embeddings": "Embeddings",
    "relgt": "RelGT",
}
_PATH_OPTIONS = ("--data", "--out")
_SPLITS = {"test": "test", "valid": "validation", "train": "training nodes"}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (0 for one value) of the results of some seeds, and the results themselves."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": deviation, "runs": list(values)}


def summarise(
    trainer: Trainer,
    histories: Sequence[History],
    finals: Sequence[Mapping[str, float]],
    *,
    lost: Sequence[int],
    skipped: Sequence[int],
    inference: str | None = None,
    baseline: Sequence[float] = (),
    linear: Mapping[str, float] | None = None,
    total_seconds: float,
    argv: Sequence[str],
) -> dict[str, Any]:
    """The results of a run, for JSON.

    Args:
        trainer: the trainer of the run.
        histories: one for each seed.
        finals: the results of each seed, of `Trainer.final`.
        lost: nodes and edges of each seed that did not fit in samples.
        skipped: steps of each seed whose gradients were not finite.
        inference: how accuracies at the end were computed: "layers" or "sampled"; None: from the whole graph.
        baseline: test accuracies of the model without edges.
        linear: of tables, the test measures of `dejax.training.tables.linear.linear_baseline`.
        total_seconds: time of the whole job, with reading the data and compiling.
        argv: the arguments after the program's name.

    Returns:
        Plain data without paths of this machine. Accuracies and ranks are shares of 1: by split in "accuracy", or by
        measure in "test" for links and tables, whose errors are in the labels' unit. "measure" is that of the curves.
    """
    settings, task = trainer.settings, trainer.task
    steps = [s / n for h in histories for s, n in zip(h.seconds, h.steps, strict=True)]
    step_s = statistics.median(steps) if steps else None
    epoch_s = None if step_s is None else step_s * task.steps_per_epoch
    results = {name: spread([final[name] for final in finals]) for name in finals[0]}
    majority = task.majority()
    return {
        "format": FORMAT,
        "dataset": settings.dataset,
        "task": settings.task,
        "model": settings.model,
        "settings": settings.as_dict(),
        "graph": task.counts(),
        "parameters": trainer.num_params,
        "embedding_values": trainer.num_embedding_values,
        "inference": inference,
        "accuracy" if task.classes else "test": results,
        "measure": task.measure,
        "baselines": {
            "majority": majority,
            "no_edges": spread(baseline) if baseline else None,
            "linear": dict(linear) if linear else None,
        },
        "lost_nodes": list(lost),
        "skipped_steps": list(skipped),
        "time": {
            "step_ms": None if step_s is None else 1e3 * step_s,
            "epoch_ms": None if epoch_s is None else 1e3 * epoch_s,
            "seeds_per_s": task.seeds_per_epoch / epoch_s if epoch_s else None,
            "steps_per_call": trainer.steps_per_call,
            "compile_s": trainer.compile_seconds,
            "total_s": total_seconds,
        },
        **origin("dejax-train", argv, task.options.backend),
    }


def origin(program: str, argv: Sequence[str], backend: str) -> dict[str, Any]:
    """The fields of results that say where they come from: memory, machine, versions, date and command.

    Args:
        program: the command without its arguments.
        argv: the arguments.
        backend: the option of the layers.
    """
    return {
        "memory": peak_memory(),
        "machine": {"kind": machine_kind(), "backend": backend_name(backend)},
        "versions": versions("dejax", "jax", "jaxlib", "flax", "optax"),
        "date": datetime.date.today().isoformat(),
        "command": " ".join([program, *without_folders(argv)]),
    }


def machine_kind() -> str:
    """The machine of the run, e.g. "CPU, 2 cores" or "NVIDIA H200"."""
    device = default_device()
    if device.platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return f"CPU, {cores} cores"
    return device.device_kind


def peak_memory() -> dict[str, Any]:
    """Peak memory so far: of the device's allocator, or of the process if there is no device."""
    statistics_of_device = default_device().memory_stats() or {}
    if "peak_bytes_in_use" in statistics_of_device:
        return {"bytes": statistics_of_device["peak_bytes_in_use"], "of": "device"}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "of": "process"}


def table(results: dict[str, Any], artifacts: dict[str, str]) -> str:
    """The table at the end of a run.

    Args:
        results: the result of `summarise`.
        artifacts: name -> path of each written file.
    """
    settings, graph, name = results["settings"], results["graph"], MODEL_NAMES[results["model"]]
    runs = len(results["lost_nodes"])
    rows, header = _accuracy_rows(results, name) if "accuracy" in results else _rank_rows(results)
    return "\n".join(
        [
            f"{results['dataset']}: {graph['nodes']:,} nodes of {graph['node_types']} types, "
            f"{graph['edges']:,} edges of {graph['edge_types']} relations",
            f"{name}: {settings['layers']} layers, {settings['hidden']} wide, {results['parameters']:,} parameters"
            + (f", {results['embedding_values']:,} values of embeddings" if results["embedding_values"] else "")
            + f"; {_seen(settings)}; {_counted(settings['epochs'], 'epoch')}, {_counted(runs, 'seed')}",
            *_how(results),
            "",
            *aligned(header, rows if runs > 1 else [row[:2] for row in rows]),
            *_warning(results),
            "",
            *aligned(None, _facts(results, artifacts)),
        ]
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _seen(settings: dict[str, Any]) -> str:
    """Text for the report: the part of the graph that a step sees."""
    if settings["task"] == "nodes" or settings["full_batch"]:
        return "a step sees the whole graph"
    if not settings["fan_outs"]:
        return "nodes have a vector each, without layers"
    return f"fan-outs {', '.join(map(str, settings['fan_outs']))}"


def _how(results: dict[str, Any]) -> list[str]:
    settings = results["settings"]
    if settings["task"] == "links":
        number, kind = settings["negatives"], settings["negative_kind"]
        negatives = "all other nodes are negatives" if kind == "all" else f"{number} negatives ({kind})"
        return [
            f"{settings['decoder']}, {negatives}; filtered ranks, "
            "heads and tails together, among all nodes of the right type"
        ]
    if settings["task"] == "tables":
        return [
            f"{'latest' if settings['recent'] else 'uniform'} edges before each cutoff; {settings['numbers']} numbers"
        ]
    return {
        "layers": ["accuracies: layer by layer, from all neighbours"],
        "sampled": ["accuracies: each node on one sampled neighbourhood"],
    }.get(results["inference"], [])


_Row = tuple[str, ...]


def _accuracy_rows(results: dict[str, Any], name: str) -> tuple[list[_Row], _Row]:
    baselines = results["baselines"]
    found = {split: results["accuracy"].get(split) for split in _SPLITS}
    rows: list[_Row] = [(f"{name}, {_SPLITS[split]}", *accuracies(values)) for split, values in found.items() if values]
    if baselines["no_edges"]:
        rows.append(("no edges (MLP), test", *accuracies(baselines["no_edges"])))
    rows.append(("majority class, test", f"{100 * baselines['majority']:.1f}", "", ""))
    return rows, ("accuracy, %", "mean", "± std", "min .. max")


def _rank_rows(results: dict[str, Any]) -> tuple[list[_Row], _Row]:
    linear = results["baselines"].get("linear") or {}
    rows: list[_Row] = []
    for name, values in results["test"].items():
        rows.append((f"{name}, test", f"{values['mean']:.4f}", f"± {values['std']:.4f}", f"{min(values['runs']):.4f}"))
        if name in linear and len(rows) == 1:
            rows.append((f"{name}, a linear model of counts and times", f"{linear[name]:.4f}", "", ""))
    return rows or [("no test examples", "", "", "")], ("", "mean", "± std", "lowest")


def _warning(results: dict[str, Any]) -> list[str]:
    """Lines that say so where a simpler model has a better first measure."""
    linear = results["baselines"].get("linear") or {}
    first = next((name for name in results.get("test", {}) if name in linear), None)
    if first is None or not is_better(first, linear[first], results["test"][first]["mean"]):
        return []
    train = results["graph"]["split_sizes"].get("train", 0)
    return [
        "",
        f"  The linear model is better: take it, or gradient boosting on such columns. {train:,} training examples",
        "  may be too few for the network. Leave out columns that only name a row (docs/tables.md: Is it good?).",
    ]


def _facts(results: dict[str, Any], artifacts: dict[str, str]) -> list[_Row]:
    seconds, memory, machine = results["time"], results["memory"], results["machine"]
    step, what = "no step", "training edges" if results["task"] == "links" else "seeds"
    if seconds["step_ms"] is not None:
        step = f"{seconds['step_ms']:.1f} ms, {seconds['seeds_per_s']:,.0f} {what} a second"
    facts = [("time per step", step)]
    if results["task"] != "nodes":
        facts.append(("steps of a call", str(seconds["steps_per_call"])))
    facts += [("compilation", f"{seconds['compile_s']:.1f} s"), ("whole job", f"{seconds['total_s']:.1f} s")]
    for name, counts in (("nodes that did not fit", "lost_nodes"), ("steps not finite, skipped", "skipped_steps")):
        if any(results[counts]) or (counts == "lost_nodes" and results["task"] != "nodes"):
            facts.append((name, ", ".join(map(str, results[counts]))))
    return [
        *facts,
        ("peak memory", f"{memory['bytes'] / 2**20:,.0f} MiB of the {memory['of']}"),
        ("machine", f"{machine['kind']}, backend {machine['backend']}"),
        *artifacts.items(),
    ]


def accuracies(values: dict[str, Any]) -> tuple[str, str, str]:
    """The cells of a row: mean, deviation, and the range over seeds, of a result of `spread`."""
    runs = values["runs"]
    return (
        f"{100 * values['mean']:.1f}",
        f"± {100 * values['std']:.1f}" if len(runs) > 1 else "",
        f"{100 * min(runs):.1f} .. {100 * max(runs):.1f}" if len(runs) > 1 else "",
    )


def aligned(header: tuple[str, ...] | None, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as aligned columns. With a header, all columns but the first are right-aligned numbers."""
    cells = [*([header[: len(rows[0])]] if header else []), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    numbers = header is not None
    lines = [
        "  "
        + "   ".join(
            f"{cell:>{width}}" if numbers and column else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return [lines[0], "  " + "-" * (sum(widths) + 3 * len(widths) - 3), *lines[1:]] if header else lines


def backend_name(backend: str) -> str:
    """The backend that "auto" stands for, or the given one."""
    if backend != "auto":
        return backend
    return "pallas" if on_gpu() else "xla"


def without_folders(argv: Sequence[str]) -> list[str]:
    """The arguments with a placeholder for each folder: results are published, folders of a machine are not.

    The folders that a user names go, relative ones too; of other arguments only what `without_paths` takes.
    """
    words = list(argv)
    for i, word in enumerate(words):
        option, equals, _ = word.partition("=")
        if option in _PATH_OPTIONS and equals:
            words[i] = f"{option}=FOLDER"
        elif i and words[i - 1] in _PATH_OPTIONS:
            words[i] = "FOLDER"
    return [without_paths(word) for word in words]


# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = {"train": "#0072B2", "valid": "#E69F00", "test": "#D55E00"}
_GREY = "#555555"


def draw_curves(path: Path, results: dict[str, Any], histories: Sequence[History]) -> None:
    """Draws loss and measures over epochs: the mean over seeds, and the range from the lowest to the highest seed.

    Args:
        path: path of the PNG.
        results: the result of `summarise`, for the baselines and the title.
        histories: one for each seed.
    """
    figure = new_figure("the plot of a training", (11.2, 4.0), dpi=150, layout="constrained")
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
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_loss(axes: Any, histories: Sequence[History]) -> None:
    axes.set_title("training loss", fontsize=10)
    length = min(len(h.loss) for h in histories)
    if not length:
        return
    losses = np.array([h.loss[:length] for h in histories])
    _band(axes, np.arange(1, length + 1), losses, _COLOURS["train"], None)
    if losses.max() > 3 * losses.min() > 0:  # else a logarithmic axis has no tick that is a round number
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
    if axes.get_legend_handles_labels()[0]:  # next to the plot, since lines may be anywhere in it
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)


def _band(axes: Any, x: np.ndarray, values: np.ndarray, colour: str, label: str | None) -> None:
    dots = {"marker": "o", "markersize": 4, "clip_on": False} if len(x) <= 12 else {}  # one evaluation makes no line
    axes.plot(x, values.mean(0), color=colour, linewidth=1.8, label=label, **dots)
    if len(values) > 1:
        axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
