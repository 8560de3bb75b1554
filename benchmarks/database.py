"""Training steps on a database: ours, and PyTorch Geometric's temporal loader with a model of the same size.

    python examples/flights.py --data FOLDER -- --epochs 0      # writes out/flights/data
    python -m benchmarks database --data out/flights/data
    python -m benchmarks database --data out/flights/data --python peers/bin/python --workers 16

Both take the same training examples, fan-outs (the latest edges before each example's cutoff), seeds of a step, layers
and widths. It prints seeds a second. The peer also says how many its loader gives without a model, and how many its
model takes from batches that are on the device already. `benchmarks/peers/database_pyg.py` says what it does less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import Save
from dejax.datasets import HeteroDataset
from dejax.training import Trainer, resolve
from dejax.training.tables.task import TableTask

PEER = Path(__file__).resolve().parent / "peers" / "database_pyg.py"


def measured(trainer: Trainer, seconds: float) -> dict[str, float]:
    """Our figures: seconds to compile, and seeds a second of the steps that follow."""
    task = trainer.task
    state, begin, first, last = trainer.init(seed=0), time.perf_counter(), 0, 0
    for now, _ in trainer.run(state, 1_000_000):  # a report at the end of an epoch would be timed with its steps
        steps = int(now.step)
        if not first:
            first, begin = steps, time.perf_counter()
            end = begin
        elif steps % task.steps_per_epoch == 0:
            break
        last, end = steps, time.perf_counter()
        if end - begin > seconds:
            break
    if end == begin:
        raise SystemExit(f"an epoch must have more than the {first} steps of one call, got {task.steps_per_epoch}")
    batch = task.seeds_per_epoch / task.steps_per_epoch
    return {
        "compile_s": round(trainer.compile_seconds, 1),
        "steps": last - first,
        "seeds_per_s": round((last - first) * batch / (end - begin), 1),
    }


def write_inputs(folder: Path, data: HeteroDataset, task: TableTask) -> dict[str, Any]:
    """What the peer reads, as .npy files, and a description of it for JSON."""
    examples = task.examples
    train = examples.splits["train"]
    arrays = {
        **{f"rows_{table}": rows for table, rows in task.packed.items()},
        **{
            f"ends_{n}": np.stack([np.asarray(e, np.int64) for e in ends]) for n, ends in enumerate(data.edges.values())
        },
        **{
            f"times_{n}": np.asarray(data.edge_times[name])
            for n, name in enumerate(data.edges)
            if name in data.edge_times
        },
        "seeds": examples.rows[train].astype(np.int64),
        "cutoffs": examples.times[train].astype(np.int64),
        "labels": examples.labels[train].astype(np.float32),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    settings = task.settings
    return {
        "tables": dict(data.num_nodes),
        "relations": [list(name) for name in data.edges],
        "entity": examples.entity,
        "fan_outs": list(settings.fan_outs),
        "recent": settings.recent,
        "batch": settings.batch_size,
        "hidden": settings.hidden,
        "lr": settings.lr,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder of a saved HeteroDataset with a binary task")
    parser.add_argument("--target", help="the task, where there are several")
    parser.add_argument("--batch-size", type=int, help="seeds of a step")
    parser.add_argument("--place", default="device", choices=("device", "host"), help="where our rows and edges lie")
    parser.add_argument("--python", help="the interpreter with torch, torch_geometric and pyg-lib; none: no peer")
    parser.add_argument("--workers", type=int, default=8, help="processes of the peer's loader")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds to measure each figure")


def run(args: argparse.Namespace, save: Save) -> None:
    data = HeteroDataset.open(args.data)
    given = {"target": args.target, "batch_size": args.batch_size, "place": args.place}
    trainer = Trainer(resolve(data.name, task="tables", **given), data)
    task = trainer.task
    assert isinstance(task, TableTask)
    if task.examples.kind != "binary":
        raise SystemExit(f"the task must be binary, got {task.examples.kind}")
    found: dict[str, Any] = {"settings": task.settings.as_dict(), "parameters": trainer.num_params}
    if args.python:  # first, while this process leaves the device free
        with tempfile.TemporaryDirectory() as folder:
            job = {**write_inputs(Path(folder), data, task), "workers": args.workers, "seconds": args.seconds}
            command = [args.python, str(PEER), folder, json.dumps(job)]
            found["peer"] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(f"PyTorch Geometric: {found['peer']}", flush=True)
    found["dejax"] = measured(trainer, args.seconds)
    print(f"dejax: {found['dejax']}", flush=True)
    if args.python:
        found["ratio"] = round(found["dejax"]["seeds_per_s"] / found["peer"]["seeds_per_s"], 2)
        print(f"{found['ratio']} times as many seeds a second")
    save(found)
