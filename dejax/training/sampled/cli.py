"""`dejax-train --sampled`: trains on mini-batches of a graph with node types and relations."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejax.training.commands import check_resume, fan_outs_of, write_run
from dejax.training.sampled.settings import FEATURE_DTYPES, LAYERS, PLACES, SampledSettings, resolve


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    p = argparse.ArgumentParser(
        prog="dejax-train --sampled",
        description="Trains a graph neural network to classify nodes, on mini-batches. One jitted step samples "
        "neighbours, reads their features, runs the layers and updates the parameters. Edges and features may lie in "
        "host memory. Types without features get trainable embeddings in host memory.",
    )
    data = p.add_argument_group("data")
    data.add_argument(
        "--dataset",
        metavar="NAME",
        help="stdlib (default, no download), aifb, mutag, bgs, am, ogbn-mag, igb-tiny .. igb-full, synthetic-igb",
    )
    data.add_argument(
        "--data",
        metavar="FOLDER",
        help="folder of the data set's files; without --dataset: a folder of HeteroDataset.save",
    )
    data.add_argument("--no-reverse", action="store_true", default=None, help="add no reverse relations")
    data.add_argument("--typed-nodes", action="store_true", default=None, help="stdlib, RDF: keep the types of nodes")
    model = p.add_argument_group("model")
    model.add_argument("--layer", "--model", choices=LAYERS, default="rgcn", help="default: rgcn")
    model.add_argument(
        "--fan-outs",
        metavar="K,K",
        help="neighbours that are drawn from each relation, for each layer, the seeds' first; -1: all. Default: 10,10",
    )
    model.add_argument(
        "--joint",
        action="store_true",
        default=None,
        help="fan-outs over all relations together: graphs with one node type; default for stdlib and RDF, 20,20",
    )
    model.add_argument("--hidden", type=int, metavar="N", help="width of the layers, all heads together; default: 64")
    model.add_argument("--heads", type=int, metavar="N", help="attention heads (rgat, hgt)")
    model.add_argument("--bases", type=int, metavar="N", help="basis matrices (rgcn); 0: one matrix per relation")
    model.add_argument("--dropout", type=float, metavar="SHARE", help="share of features dropped")
    model.add_argument("--precision", choices=("f32", "tf32", "bf16"), help="of products of float32 matrices")
    model.add_argument("--backend", choices=("auto", "pallas", "xla"), default="auto", help="of the compiler")
    run = p.add_argument_group("training")
    run.add_argument("--batch-size", type=int, metavar="N", help="seeds of a step")
    run.add_argument("--mesh", type=int, metavar="N", help="devices over which the seeds of a step are divided")
    run.add_argument("--parts", type=int, metavar="N", help="parts in which a step samples its seeds; default: --mesh")
    run.add_argument("--full-batch", action="store_true", default=None, help="no sampling: a step sees the whole graph")
    run.add_argument("--epochs", type=int, metavar="N", help="passes over the training nodes")
    run.add_argument("--seeds", type=int, metavar="N", help="runs, with seeds 0 .. N-1")
    run.add_argument("--lr", type=float, help="Adam's learning rate")
    run.add_argument("--weight-decay", type=float, help="Adam's decoupled weight decay")
    run.add_argument(
        "--inference",
        choices=("layers", "sampled"),
        help="accuracies at the end: layer by layer from all neighbours, or on samples (default where edges have times "
        "or weights)",
    )
    memory = p.add_argument_group("memory")
    memory.add_argument(
        "--place", choices=PLACES, help="of edges and features; split: the most used rows on the device"
    )
    memory.add_argument("--device-bytes", type=float, metavar="B", help="with --place split: bytes on the device")
    memory.add_argument("--feature-dtype", choices=FEATURE_DTYPES, help="format of the feature tables")
    memory.add_argument("--offload", action="store_true", default=None, help="layers' inputs lie in host memory")
    memory.add_argument(
        "--sigmas", type=float, help="room of a sample: mean + this many standard deviations; default 5"
    )
    out = p.add_argument_group("results")
    out.add_argument("--out", metavar="DIR", help="default: out/<dataset>-<layer>-sampled")
    out.add_argument("--resume", action="store_true", help="continue the run in --out, to the same numbers")
    out.add_argument("--checkpoint-every", type=int, metavar="N", help="steps between checkpoints; default: 30 seconds")
    out.add_argument("--no-checkpoints", action="store_true", help="write no checkpoints")
    return p


_SETTINGS = (
    "full_batch batch_size hidden heads bases dropout epochs seeds lr weight_decay place feature_dtype offload sigmas "
    "precision typed_nodes joint"
).split()


def main(argv: Sequence[str]) -> int:
    """Runs the command; `argv` has the arguments without `--sampled`. Returns the exit status.

    Raises:
        ValueError, FileNotFoundError: a wrong argument or file; the caller prints it.
    """
    args = parser().parse_args(list(argv))
    start = time.perf_counter()
    from dejax.training import plot
    from dejax.training.checkpoint import Checkpoints
    from dejax.training.sampled import report
    from dejax.training.sampled.data import load, only_sampled
    from dejax.training.sampled.trainer import SampledTrainer

    settings = _settings(args)
    check_resume(args)
    name = None if args.dataset is None and args.data else settings.dataset
    data = load(name, args.data, typed_nodes=settings.typed_nodes)
    if name is None:
        settings = settings.replace(dataset=data.name)
    if args.inference == "layers" and only_sampled(data):
        raise ValueError("--inference must be sampled where edges have times or weights, got layers; leave it out")
    args.inference = args.inference or ("sampled" if only_sampled(data) else "layers")
    out = Path(args.out or f"out/{settings.dataset}-{settings.layer}-sampled")
    print(_shortened(data.summary()), end="\n\n", flush=True)
    options = {"backend": args.backend, "print_table": lambda text: print(_shortened(text))}
    if settings.parts > 1 or args.mesh is not None:
        from dejax.training.sampled.mesh import MeshTrainer

        trainer: SampledTrainer = MeshTrainer(settings, data, devices=args.mesh or 1, **options)
    else:
        trainer = SampledTrainer(settings, data, **options)
    print(f"\n{trainer.prepared.features}\n", flush=True)
    checkpoints = None if args.no_checkpoints else Checkpoints(out, ("epochs", "seeds", "eval_every"))
    if checkpoints is not None:
        checkpoints.begin(settings.as_dict(), resume=args.resume)
    runs = [_one_seed(trainer, checkpoints, args, seed) for seed in range(settings.seeds)]
    results = report.summarise(trainer, runs, args.inference, time.perf_counter() - start, argv)
    histories = [history for history, _, _ in runs]
    write_run(out, results, lambda file: plot.draw_curves(file, results, histories), checkpoints, report.table)
    return 0


def _settings(args: argparse.Namespace) -> SampledSettings:
    given = {name: getattr(args, name) for name in _SETTINGS}
    given["reverse"] = False if args.no_reverse else None
    given["parts"] = args.parts or args.mesh
    given["device_bytes"] = None if args.device_bytes is None else int(args.device_bytes)
    given["fan_outs"] = fan_outs_of(args.fan_outs, "10,5")
    # A folder of somebody's own has the defaults of no data set.
    name = args.dataset or ("folder" if args.data else "stdlib")
    return resolve(name.lower(), args.layer, **given)


def _one_seed(trainer: Any, checkpoints: Any, args: argparse.Namespace, seed: int) -> tuple[Any, dict[str, float], int]:
    """Curves, accuracies at the end and lost nodes of a seed. Draws a bar on a terminal, otherwise a line."""
    from dejax.training.mini_batch import run_seed

    state, history = run_seed(trainer, checkpoints, seed, resume=args.resume, every=args.checkpoint_every)
    if args.inference == "layers" and not trainer.settings.full_batch:
        accuracy = trainer.accuracy(state)
    else:
        accuracy = trainer.sampled_accuracy(state, [name for name, ids in trainer.splits.items() if ids])
    if not sys.stderr.isatty():
        shares = ", ".join(f"{split} {100 * value:.1f} %" for split, value in accuracy.items())
        print(f"seed {seed}: {int(state.step)} steps in {sum(history.seconds):.1f} s, accuracy {shares}", flush=True)
    return history, accuracy, int(state.lost)


def _shortened(text: str, most: int = 40) -> str:
    lines = text.splitlines()
    return text if len(lines) <= most else "\n".join([*lines[: most - 1], f"  .. {len(lines) - most + 1} more lines"])
