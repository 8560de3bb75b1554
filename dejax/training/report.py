"""The report of a run: its results as plain data for JSON, and as a table."""

from __future__ import annotations

import datetime
import os
import resource
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dejax._origin import versions, without_paths
from dejax.datasets import EntityDataset
from dejax.training.fit import Trainer
from dejax.training.history import History

FORMAT = 1
"""The version of the JSON. It increases when a field changes its meaning."""

MODEL_NAMES = {"rgcn": "R-GCN", "rgat": "RGAT", "hgt": "HGT", "sage": "GraphSAGE", "mlp": "MLP"}
_PATH_OPTIONS = ("--data", "--out")


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (0 for one value) of accuracies, and the accuracies themselves."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": deviation, "runs": list(values)}


def summarise(
    trainer: Trainer,
    histories: Sequence[History],
    *,
    baseline: Sequence[History] = (),
    total_seconds: float,
    argv: Sequence[str],
) -> dict[str, Any]:
    """The results of a run, for JSON.

    Args:
        trainer: the trainer of the run.
        histories: one for each seed.
        baseline: histories of the model without edges.
        total_seconds: time of the whole job, with reading the data and compiling.
        argv: the arguments after the program's name.

    Returns:
        Plain data without paths of this machine. Accuracies are shares of 1.
    """
    data, graph = trainer.data, trainer.batch.graph
    splits = [name for name, values in histories[0].accuracy.items() if values]
    steps = [1e3 * s / n for h in histories for s, n in zip(h.seconds, h.steps, strict=True)]
    return {
        "format": FORMAT,
        "dataset": data.name,
        "model": trainer.settings.model,
        "settings": trainer.settings.as_dict(),
        "graph": {
            "nodes": graph.num_nodes,
            "edges": graph.num_edges,
            "edge_types": graph.num_edge_types,
            "node_types": graph.num_node_types,
            "features": 0 if trainer.batch.features is None else int(trainer.batch.features.shape[1]),
            "split_sizes": {name: int(nodes.shape[0]) for name, nodes in trainer.batch.nodes.items()},
        },
        "parameters": trainer.num_params,
        "accuracy": {name: spread([h.accuracy[name][-1] for h in histories]) for name in splits},
        "baselines": {
            "majority": majority_accuracy(trainer, data),
            "no_edges": spread([h.accuracy["test"][-1] for h in baseline]) if baseline and "test" in splits else None,
        },
        "time": {
            "epoch_ms": statistics.median(steps) if steps else None,
            "compile_s": trainer.compile_seconds,
            "total_s": total_seconds,
        },
        **origin("python examples/entity_classification.py", argv, trainer.options.backend),
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


def majority_accuracy(trainer: Trainer, data: EntityDataset) -> float:
    """Test accuracy of the most frequent class of the training nodes."""
    if not len(data.test_nodes):
        return float("nan")
    counts = np.bincount(np.asarray(trainer.batch.labels["train"]), minlength=data.num_classes)
    return float(np.mean(data.test_labels == counts.argmax()))


def machine_kind() -> str:
    """The machine of the run, e.g. "CPU, 2 cores" or "NVIDIA H200"."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return f"CPU, {cores} cores"
    return device.device_kind


def peak_memory() -> dict[str, Any]:
    """Peak memory so far: of the device's allocator, or of the process if there is no device."""
    statistics_of_device = jax.devices()[0].memory_stats() or {}
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
    settings, baselines, seconds = results["settings"], results["baselines"], results["time"]
    graph, memory = results["graph"], results["memory"]
    name = MODEL_NAMES[results["model"]]
    runs = len(results["accuracy"]["train"]["runs"])
    rows = [(f"{name}, test", *accuracies(results["accuracy"].get("test")))]
    if "valid" in results["accuracy"]:
        rows.append((f"{name}, validation", *accuracies(results["accuracy"]["valid"])))
    rows.append((f"{name}, training nodes", *accuracies(results["accuracy"]["train"])))
    if baselines["no_edges"]:
        rows.append(("no edges (MLP), test", *accuracies(baselines["no_edges"])))
    rows.append(("majority class, test", f"{100 * baselines['majority']:.1f}", "", ""))
    lines = [
        f"{results['dataset']}: {graph['nodes']:,} nodes, {graph['edges']:,} edges of {graph['edge_types']} types, "
        "reverse relations included",
        f"{name}: {settings['layers']} layers, {settings['hidden']} wide, {results['parameters']:,} parameters, "
        f"{settings['epochs']} epochs, {runs} seed{'s' * (runs != 1)}",
        "",
        *aligned(("accuracy, %", "mean", "± std", "min .. max"), rows if runs > 1 else [row[:2] for row in rows]),
        "",
        *aligned(
            None,
            [
                ("time per epoch", f"{seconds['epoch_ms']:.1f} ms" if seconds["epoch_ms"] is not None else "no step"),
                ("compilation", f"{seconds['compile_s']:.1f} s"),
                ("whole job", f"{seconds['total_s']:.1f} s"),
                ("peak memory", f"{memory['bytes'] / 2**20:,.0f} MiB of the {memory['of']}"),
                ("machine", f"{results['machine']['kind']}, backend {results['machine']['backend']}"),
                *artifacts.items(),
            ],
        ),
    ]
    return "\n".join(lines)


def accuracies(values: dict[str, Any] | None) -> tuple[str, str, str]:
    """The cells of a row: mean, deviation, and the range over seeds, of a result of `spread`."""
    if not values:
        return "-", "", ""
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
    return "pallas" if jax.default_backend() == "gpu" else "xla"


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
