"""The report of a run on mini-batches: its results as plain data for JSON, and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from dejax.training import report as common
from dejax.training.history import History
from dejax.training.sampled.trainer import SampledTrainer

Run = tuple[History, dict[str, float], int]
"""Curves, accuracies at the end, lost nodes."""


def summarise(
    trainer: SampledTrainer, runs: Sequence[Run], inference: str, total_seconds: float, argv: Sequence[str]
) -> dict[str, Any]:
    """The results of a run, for JSON.

    Args:
        trainer: the trainer of the run.
        runs: one for each seed.
        inference: how accuracies at the end were computed: "layers" or "sampled".
        total_seconds: time of the whole job, with reading the data and compiling.
        argv: the arguments after the program's name.

    Returns:
        Plain data without paths of this machine. Accuracies are shares of 1.
    """
    settings, topology = trainer.settings, trainer.prepared.topology
    splits = [name for name, ids in trainer.splits.items() if ids]
    seconds = [s / n for history, _, _ in runs for s, n in zip(history.seconds, history.steps, strict=True)]
    step_s = statistics.median(seconds) / trainer.steps_per_epoch if seconds else None
    seeds = sum(len(ids) for ids in trainer.splits["train"].values())
    return {
        "format": common.FORMAT,
        "dataset": settings.dataset,
        "model": settings.layer,
        "settings": {**settings.as_dict(), "layers": settings.layers},
        "graph": {
            "nodes": sum(topology.num_nodes.values()),
            "edges": sum(topology.num_edges.values()),
            "edge_types": len(trainer.prepared.edge_types),
            "node_types": len(topology.node_types),
            "features": trainer.prepared.widths,
            "split_sizes": {name: sum(map(len, trainer.splits[name].values())) for name in splits},
        },
        "parameters": trainer.num_params,
        "embedding_values": trainer.num_embedding_values,
        "inference": "full batch" if settings.full_batch else inference,
        "accuracy": {name: common.spread([accuracy[name] for _, accuracy, _ in runs]) for name in splits},
        "baselines": {"majority": majority(trainer), "no_edges": None},
        "lost_nodes": [lost for _, _, lost in runs],
        "time": {
            "step_ms": None if step_s is None else 1e3 * step_s,
            "epoch_s": statistics.median(seconds) if seconds else None,
            "seeds_per_s": statistics.median([seeds / s for s in seconds]) if seconds else None,
            "compile_s": trainer.compile_seconds,
            "total_s": total_seconds,
        },
        **common.origin("dejax-train --sampled", argv, trainer.options.backend),
    }


def majority(trainer: SampledTrainer) -> float:
    """Test accuracy of the most frequent class of the training nodes."""
    if not trainer.splits["test"]:
        return float("nan")
    labels = {kind: np.asarray(trainer.prepared.data.labels[kind]) for kind in trainer.prepared.data.labels}
    train, test = (
        np.concatenate([labels[kind][ids] for kind, ids in trainer.splits[name].items()]) for name in ("train", "test")
    )
    return float(np.mean(test == np.bincount(train, minlength=trainer.prepared.num_classes).argmax()))


def table(results: dict[str, Any], artifacts: dict[str, str]) -> str:
    """The table at the end of a run.

    Args:
        results: the result of `summarise`.
        artifacts: name -> path of each written file.
    """
    settings, seconds, graph = results["settings"], results["time"], results["graph"]
    name = common.MODEL_NAMES[results["model"]]
    runs = len(results["lost_nodes"])
    names = {"test": "test", "valid": "validation", "train": "training nodes"}
    rows = [
        (f"{name}, {names[split]}", *common.accuracies(results["accuracy"][split]))
        for split in names
        if split in results["accuracy"]
    ]
    rows.append(("majority class, test", f"{100 * results['baselines']['majority']:.1f}", "", ""))
    seen = "the whole graph" if settings["full_batch"] else f"fan-outs {', '.join(map(str, settings['fan_outs']))}"
    step = "no step" if seconds["step_ms"] is None else f"{seconds['step_ms']:.1f} ms"
    per_second = "" if seconds["seeds_per_s"] is None else f", {seconds['seeds_per_s']:,.0f} seeds a second"
    facts = [
        ("time per step", step + per_second),
        ("compilation of a step", f"{seconds['compile_s']:.1f} s"),
        ("whole job", f"{seconds['total_s']:.1f} s"),
        ("nodes that did not fit", ", ".join(map(str, results["lost_nodes"]))),
        ("peak memory", f"{results['memory']['bytes'] / 2**20:,.0f} MiB of the {results['memory']['of']}"),
        ("machine", f"{results['machine']['kind']}, backend {results['machine']['backend']}"),
        *artifacts.items(),
    ]
    return "\n".join(
        [
            f"{results['dataset']}: {graph['nodes']:,} nodes of {graph['node_types']} types, {graph['edges']:,} edges "
            f"of {graph['edge_types']} relations",
            f"{name}: {settings['layers']} layers, {settings['hidden']} wide, {results['parameters']:,} parameters, "
            f"{results['embedding_values']:,} values of embeddings; {seen}, {settings['epochs']} epochs, "
            f"{runs} seed{'s' * (runs != 1)}",
            f"accuracies: {_INFERENCE[results['inference']]}",
            "",
            *common.aligned(
                ("accuracy, %", "mean", "± std", "min .. max"), rows if runs > 1 else [r[:2] for r in rows]
            ),
            "",
            *common.aligned(None, facts),
        ]
    )


_INFERENCE = {
    "layers": "layer by layer, from all neighbours",
    "sampled": "each node on one sampled neighbourhood",
    "full batch": "from the whole graph",
}
