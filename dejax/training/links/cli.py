"""The command of link prediction: trains an encoder and a decoder, and ranks test edges."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejax.training.commands import check_resume, fan_outs_of, write_run
from dejax.training.links.settings import DECODERS, LAYERS, NEGATIVES, LinkSettings, resolve


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    p = argparse.ArgumentParser(
        prog="link_prediction.py",
        description="Trains a graph neural network to predict edges, on mini-batches: a relational encoder, a decoder, "
        "negatives, and filtered ranks of the test edges. A batch's own edges and their reverses are left out of its "
        "sample. By default it predicts the calls in the standard library's code: no download.",
    )
    p.add_argument(
        "--dataset",
        metavar="NAME",
        help="stdlib (default), wn18rr, fb15k-237, wn18, fb15k, yago3-10, synthetic-triples, synthetic-triples-0.1, ..",
    )
    p.add_argument(
        "--data",
        metavar="FOLDER",
        help="the data set's files; without --dataset: a folder of train.txt, valid.txt, test.txt or of "
        "HeteroDataset.save",
    )
    p.add_argument("--layer", choices=LAYERS, help="of the encoder; default: rgcn")
    p.add_argument("--decoder", choices=DECODERS, help="default: distmult")
    p.add_argument("--fan-outs", metavar="K,K", help="neighbours by layer, the seeds' first; -1: all; default: 20,10")
    p.add_argument("--full-batch", action="store_true", default=None, help="the encoder sees the whole graph each step")
    p.add_argument("--hidden", type=int, metavar="N", help="width of the layers")
    p.add_argument("--heads", type=int, metavar="N", help="attention heads (rgat)")
    p.add_argument("--bases", type=int, metavar="N", help="basis matrices (rgcn); 0: one matrix per relation")
    p.add_argument("--batch-size", type=int, metavar="N", help="training edges of a step")
    p.add_argument("--negatives", type=int, metavar="N", help="wrong ends of each edge")
    p.add_argument("--negative-kind", choices=NEGATIVES, help="default: uniform")
    p.add_argument("--loss", choices=("softmax", "binary"), help="default: softmax")
    p.add_argument("--margin", type=float, help="rotate's margin")
    p.add_argument("--dropout", type=float, metavar="SHARE", help="share of features dropped")
    p.add_argument("--epochs", type=int, metavar="N", help="passes over the training edges")
    p.add_argument("--seeds", type=int, metavar="N", help="runs, with seeds 0 .. N-1")
    p.add_argument("--lr", type=float, help="learning rate")
    p.add_argument("--eval-every", type=int, metavar="N", help="epochs between two evaluations on validation edges")
    p.add_argument("--eval-edges", type=int, metavar="N", help="validation edges of these; 0: all")
    p.add_argument("--precision", choices=("f32", "tf32", "bf16"), help="of products of float32 matrices")
    p.add_argument("--backend", choices=("auto", "pallas", "xla"), default="auto", help="of the compiler")
    p.add_argument("--out", metavar="DIR", help="default: out/<dataset>-<layer>-<decoder>")
    p.add_argument("--resume", action="store_true", help="continue the run in --out, to the same numbers")
    p.add_argument("--checkpoint-every", type=int, metavar="N", help="steps between checkpoints; default: 30 seconds")
    p.add_argument("--no-checkpoints", action="store_true", help="write no checkpoints")
    return p


_SETTINGS = (
    "layer decoder full_batch hidden heads bases batch_size negatives negative_kind loss margin dropout epochs seeds "
    "lr eval_every eval_edges precision"
).split()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` by default.

    Returns:
        The exit status: 0, or 2 with a message on stderr if an argument or a file is wrong.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(argv)
    from dejax.datasets import DataUnavailableError

    try:
        _train(args, argv)
    except (ValueError, FileNotFoundError, DataUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _settings(args: argparse.Namespace) -> LinkSettings:
    given = {name: getattr(args, name) for name in _SETTINGS}
    given["fan_outs"] = fan_outs_of(args.fan_outs, "20,10")
    return resolve((args.dataset or "stdlib").lower(), **given)


def _train(args: argparse.Namespace, argv: Sequence[str]) -> None:
    start = time.perf_counter()
    from dejax.training.checkpoint import Checkpoints
    from dejax.training.links import plot
    from dejax.training.links.data import LinkGraph, load
    from dejax.training.links.trainer import LinkTrainer

    settings = _settings(args)
    check_resume(args)
    name = None if args.dataset is None and args.data else settings.dataset
    data = load(name, args.data)
    settings = settings.replace(dataset=data.name) if name is None else settings
    out = Path(args.out or f"out/{settings.dataset}-{settings.layer}-{settings.decoder}")
    graph = LinkGraph.of(data)
    valid, test = (len(graph.splits[split]) for split in ("valid", "test"))
    print(
        f"{data.name}: {graph.num_nodes:,} nodes, {len(graph.senders) // 2:,} edges of {graph.num_relations} "
        "relations\n"
        f"to predict: {len(graph.train):,} training, {valid:,} validation, {test:,} test edges\n",
        flush=True,
    )
    trainer = LinkTrainer(settings, graph, backend=args.backend, print_table=print)
    checkpoints = None if args.no_checkpoints else Checkpoints(out, ("epochs", "seeds", "eval_every"))
    if checkpoints is not None:
        checkpoints.begin(settings.as_dict(), resume=args.resume)
    runs = [_one_seed(trainer, checkpoints, args, seed) for seed in range(settings.seeds)]
    results = _summary(trainer, runs, time.perf_counter() - start, argv)
    histories = [history for history, _, _ in runs]
    write_run(out, results, lambda file: plot.draw(file, results, histories), checkpoints, table)


def _one_seed(trainer: Any, checkpoints: Any, args: argparse.Namespace, seed: int) -> tuple[Any, Any, int]:
    """Curves, ranks of the test edges and lost nodes of a seed."""
    from dejax.training.mini_batch import run_seed

    state, history = run_seed(trainer, checkpoints, seed, resume=args.resume, every=args.checkpoint_every)
    ranks = trainer.ranks(state, "test")
    if not sys.stderr.isatty():
        print(f"seed {seed}: {int(state.step)} steps in {sum(history.seconds):.1f} s, test {ranks}", flush=True)
    return history, ranks, int(state.lost)


def _summary(trainer: Any, runs: Sequence[Any], total_seconds: float, argv: Sequence[str]) -> dict[str, Any]:
    from dejax.training import report

    settings, graph = trainer.settings, trainer.graph
    seconds = [s / n for history, _, _ in runs for s, n in zip(history.seconds, history.steps, strict=True)]
    epoch_s = statistics.median(seconds) if seconds else None
    measures = {"mrr": [ranks.mrr for _, ranks, _ in runs]}
    measures |= {f"hits@{k}": [ranks.hits(k) for _, ranks, _ in runs] for k in (1, 3, 10)}
    return {
        "format": report.FORMAT,
        "dataset": settings.dataset,
        "settings": {**settings.as_dict(), "layers": settings.layers},
        "graph": {
            "nodes": graph.num_nodes,
            "edges": len(graph.senders) // 2,
            "relations": graph.num_relations,
            "split_sizes": {"train": len(graph.train), **{name: len(rows) for name, rows in graph.splits.items()}},
        },
        "parameters": trainer.num_params,
        "test": {name: report.spread(values) for name, values in measures.items()},
        "lost_nodes": [lost for _, _, lost in runs],
        "time": {
            "epoch_s": epoch_s,
            "edges_per_s": len(graph.train) / epoch_s if epoch_s else None,
            "compile_s": trainer.compile_seconds,
            "total_s": total_seconds,
        },
        **report.origin("python examples/link_prediction.py", argv, trainer.options.backend),
    }


def table(results: dict[str, Any], artifacts: dict[str, str]) -> str:
    """The table at the end of a run.

    Args:
        results: plain results of a run.
        artifacts: name -> path of each written file.
    """
    from dejax.training import report

    settings, seconds = results["settings"], results["time"]
    runs = len(results["lost_nodes"])
    rows = [
        (f"{name}, test", f"{values['mean']:.4f}", f"± {values['std']:.4f}", f"{min(values['runs']):.4f}")
        for name, values in results["test"].items()
    ]
    seen = "the whole graph" if settings["full_batch"] else f"fan-outs {', '.join(map(str, settings['fan_outs']))}"
    rate = "" if seconds["edges_per_s"] is None else f"{seconds['edges_per_s']:,.0f} training edges a second"
    facts = [
        ("rate", rate),
        ("compilation of a step", f"{seconds['compile_s']:.1f} s"),
        ("whole job", f"{seconds['total_s']:.1f} s"),
        ("nodes that did not fit", ", ".join(map(str, results["lost_nodes"]))),
        ("peak memory", f"{results['memory']['bytes'] / 2**20:,.0f} MiB of the {results['memory']['of']}"),
        ("machine", f"{results['machine']['kind']}, backend {results['machine']['backend']}"),
        *artifacts.items(),
    ]
    return "\n".join(
        [
            f"{results['dataset']}: {report.MODEL_NAMES[settings['layer']]} encoder of {settings['layers']} layers, "
            f"{settings['hidden']} wide, {settings['decoder']}; {seen}; {settings['negatives']} negatives "
            f"({settings['negative_kind']}), {settings['epochs']} epochs, {runs} seed{'s' * (runs != 1)}",
            "filtered ranks, heads and tails together, among all nodes of the right type",
            "",
            *report.aligned(("", "mean", "± std", "lowest"), rows if runs > 1 else [row[:2] for row in rows]),
            "",
            *report.aligned(None, facts),
        ]
    )
