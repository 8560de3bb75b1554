"""Entity classification on a real graph: R-GCN of `dejax-train`, and PyTorch Geometric's R-GCN, from data to accuracy.

    python -m benchmarks entity --data FOLDER                               # with the files of AIFB
    python -m benchmarks entity --data FOLDER --python peers/bin/python --out benchmarks/results/entity_cpu.json

Both train the published model (two layers, 16 wide, no node features, Adam with 0.01, 50 epochs of the whole graph) on
the same nodes, edges and reverse relations, with several seeds. Clocks start when the data are in the process: the
first seed includes tracing and compilation, the later ones do not. Seconds of CPU time are for machines that do other
work, too. Accuracies are those of the last epoch. The peer's
variants are in `benchmarks/peers/entity_pyg.py`; each runs in a process of its own, as ours does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import Save

PEER = Path(__file__).resolve().parent / "peers" / "entity_pyg.py"
IN_OTHER_PROCESSES = True


def ours(data: Any, settings: Any) -> dict[str, Any]:
    """Seconds and test accuracy of each seed of our training."""
    import jax

    from dejax.training import Trainer
    from dejax.training.fitting import fit

    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # the device is ready
    seconds, of_cpu, accuracies = [], [], []
    begin, cpu = time.perf_counter(), time.process_time()
    trainer = Trainer(settings, data)
    for seed in range(settings.seeds):
        fitted = fit(trainer, seed)
        accuracies.append(trainer.final(fitted.state)["test"])
        seconds.append(time.perf_counter() - begin)
        of_cpu.append(time.process_time() - cpu)
        begin, cpu = time.perf_counter(), time.process_time()
    device = jax.devices()[0].device_kind
    found = {"parameters": trainer.num_params, "seconds": seconds, "cpu_seconds": of_cpu}
    return found | {"test": accuracies, "device": device}


def write_inputs(folder: Path, data: Any) -> None:
    """The graph with a reverse relation for each relation, and the split, as .npy files for the peer."""
    graph = data.graph()
    arrays = {
        "edge_index": np.stack([np.asarray(graph.senders), np.asarray(graph.receivers)]),
        "edge_type": np.asarray(graph.edge_type),
        "train_nodes": data.train_nodes,
        "train_labels": data.train_labels,
        "test_nodes": data.test_nodes,
        "test_labels": data.test_labels,
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(array, np.int64))


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """With the mean accuracy, and the seconds of the first seed and the median of the others."""
    means: dict[str, Any] = {"test_mean": round(statistics.mean(found["test"]), 4)}
    for clock, name in (("seconds", "s"), ("cpu_seconds", "cpu_s")):
        first, *later = found[clock]
        means |= {f"first_{name}": round(first, 3), f"later_{name}": round(statistics.median(later or [first]), 3)}
    return found | means


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="aifb", help="aifb, mutag, bgs or am")
    parser.add_argument("--data", help="folder with its files; without it, $DEJAX_DATA or a download")
    parser.add_argument("--seeds", type=int, default=10, help="trainings of each variant")
    parser.add_argument("--variants", default="rgcn,fast,fast-30", help="variants of the peer, with commas")
    parser.add_argument("--python", help="the interpreter with torch and torch_geometric; none: no peer")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, save: Save) -> None:
    from dejax.datasets import load
    from dejax.training import resolve

    data, settings = load(args.dataset, args.data), resolve(args.dataset, model="rgcn", seeds=args.seeds)
    if args.child:
        print(json.dumps(ours(data, settings)))
        return

    def of_process(command: list[str]) -> dict[str, Any]:
        return summary(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))

    found: dict[str, Any] = {"dataset": args.dataset, "settings": settings.as_dict(), "peers": {}}
    own = [sys.executable, "-m", "benchmarks", "entity", "--child", "--dataset", args.dataset]
    own += ["--seeds", str(args.seeds), *(["--data", args.data] if args.data else [])]
    found["dejax"] = of_process(own)
    print(_line("dejax", found["dejax"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), data)
        for variant in args.variants.split(",") if args.python else ():
            job = {name: getattr(settings, name) for name in ("hidden", "lr", "epochs", "l2")}
            job |= {"variant": variant, "classes": data.num_classes, "nodes": data.num_nodes, "seeds": args.seeds}
            found["peers"][variant] = of_process([args.python, str(PEER), folder, json.dumps(job)])
            print(_line(f"PyTorch Geometric, {variant}", found["peers"][variant]), flush=True)
            save(found)
    save(found)


def _line(name: str, found: dict[str, Any]) -> str:
    times = f"first seed {found['first_s']} s, later ones {found['later_s']} s"
    return f"{name}: {times}, test accuracy {100 * found['test_mean']:.2f} %, {found['parameters']:,} parameters"
