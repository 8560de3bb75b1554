"""The command `dejax-train`: trains one model on one data set with several seeds.

It prints a table and writes results, a plot and checkpoints. By default it classifies nodes and a step sees the whole
graph. With `--sampled` it trains on mini-batches, with `--links` it predicts edges.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejax.training.settings import (
    DECODERS,
    FEATURE_DTYPES,
    LOSSES,
    MODELS,
    NEGATIVES,
    PLACES,
    PRECISIONS,
    Settings,
    resolve,
    tasks_of,
)

DEFAULT_DATASET = "stdlib"
SAVE_SECONDS = 30.0
"""Seconds between two checkpoints of a long run."""
_FLAGS = {"nodes": "without --sampled and --links", "samples": "with --sampled", "links": "with --links"}
# Settings that a resumed run may change: its length, and how steps are called; not the model.
_FREE = ("epochs", "seeds", "eval_every", "pipeline")


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    p = argparse.ArgumentParser(
        prog="dejax-train",
        description="Trains a relational graph neural network to classify the nodes of a graph, or to predict its "
        "edges; several seeds are trained. Defaults: published for R-GCN on aifb, mutag, bgs and am; chosen on "
        "validation nodes for R-GCN on stdlib, and for RGAT and HGT on aifb; starting points for all other cases.",
    )
    p.add_argument(
        "--sampled",
        action="store_true",
        help="mini-batches: a step samples neighbours of some nodes, and edges and features may lie in host memory. "
        "Types without features get trainable embeddings there",
    )
    p.add_argument(
        "--links", action="store_true", help="predict edges on mini-batches, without the edges of a batch in its sample"
    )
    _add_data_and_model(p)
    _add_training(p)
    _add_samples_and_links(p)
    _add_run(p)
    return p


def _add_data_and_model(p: argparse.ArgumentParser) -> None:
    data = p.add_argument_group("data")
    data.add_argument(
        "--dataset",
        metavar="NAME",
        help="a name of dejax.datasets.NAMES; --sampled: stdlib, aifb, mutag, bgs, am, ogbn-mag, igb-tiny .. igb-full, "
        "synthetic-igb; --links: stdlib, wn18rr, fb15k-237, wn18, fb15k, yago3-10, synthetic-triples, "
        f"synthetic-triples-0.1, ..; default: {DEFAULT_DATASET}, no download",
    )
    data.add_argument(
        "--data",
        metavar="FOLDER",
        help="folder of the data set's files; default: $DEJAX_DATA, or a download. --sampled and --links without "
        "--dataset: a folder of HeteroDataset.save, or of train.txt, valid.txt and test.txt",
    )
    data.add_argument("--featureless", action="store_true", default=None, help="ignore the data set's node features")
    data.add_argument(
        "--holdout", type=float, metavar="SHARE", help="share of the training nodes to validate on, to choose settings"
    )
    data.add_argument(
        "--fold", type=int, metavar="K", help="number of the share to hold out, 0, 1, .., for cross-validation"
    )
    data.add_argument("--no-reverse", dest="reverse", action="store_false", default=None, help="no reverse relations")
    data.add_argument("--typed-nodes", action="store_true", default=None, help="stdlib, RDF: keep the types of nodes")
    model = p.add_argument_group("model")
    model.add_argument(
        "--model",
        "--layer",
        choices=(*MODELS, "mlp", "embeddings"),
        default="rgcn",
        help="default: rgcn; --links: embeddings, which the decoder reads without layers",
    )
    model.add_argument("--hidden", type=int, metavar="N", help="width of the hidden layers, all heads together")
    model.add_argument("--layers", type=int, metavar="N", help="relational layers")
    model.add_argument("--heads", type=int, metavar="N", help="attention heads (rgat, hgt)")
    model.add_argument("--bases", type=int, metavar="N", help="basis matrices (rgcn); 0: one matrix per relation")
    model.add_argument(
        "--dropout", type=float, metavar="SHARE", help="dropout, at the place that the model's paper gives"
    )
    model.add_argument("--decoder", choices=DECODERS, help="of links; default: distmult")
    model.add_argument("--margin", type=float, help="rotate's margin")


def _add_training(p: argparse.ArgumentParser) -> None:
    run = p.add_argument_group("training")
    run.add_argument("--epochs", type=int, metavar="N", help="passes over the training data")
    run.add_argument("--seeds", type=int, metavar="N", help="runs, with seeds 0 .. N-1")
    run.add_argument("--lr", type=float, help="Adam's learning rate")
    run.add_argument("--l2", type=float, help="weight of the L2 penalty on the first layer's matrices")
    run.add_argument("--weight-decay", type=float, help="Adam's decoupled weight decay")
    run.add_argument("--precision", choices=PRECISIONS, help="of products of float32 matrices")
    run.add_argument("--backend", choices=("auto", "pallas", "xla"), default="auto", help="of the compiler")
    run.add_argument("--eval-every", type=int, metavar="N", help="epochs between two points of the curves")
    run.add_argument("--no-baseline", action="store_true", help="skip the baseline, a model without edges")


def _add_samples_and_links(p: argparse.ArgumentParser) -> None:
    some = p.add_argument_group("mini-batches: --sampled and --links")
    some.add_argument("--batch-size", type=int, metavar="N", help="seeds, or training edges, of a step")
    some.add_argument(
        "--fan-outs",
        metavar="K,K",
        help="neighbours that are drawn for each layer, the seeds' first; -1: all. From each relation (10,10), or over "
        "all relations together (--links 20,10; --joint 20,20)",
    )
    some.add_argument(
        "--full-batch", action="store_true", default=None, help="no sampling: a step sees the whole graph"
    )
    some.add_argument(
        "--pipeline",
        type=int,
        metavar="N",
        help="steps of one program: it reads features of the next batch and samples the one after it while layers run; "
        "default: 16 on a GPU, 1 elsewhere",
    )
    some.add_argument(
        "--joint",
        action="store_true",
        default=None,
        help="fan-outs over all relations together: graphs with one node type; default for stdlib and RDF",
    )
    some.add_argument("--place", choices=PLACES, help="of edges and features; split: the most used rows on the device")
    some.add_argument("--device-bytes", type=float, metavar="B", help="with --place split: bytes on the device")
    some.add_argument("--feature-dtype", choices=FEATURE_DTYPES, help="format of the feature tables")
    some.add_argument("--offload", action="store_true", default=None, help="layers' inputs lie in host memory")
    some.add_argument("--sigmas", type=float, help="room of a sample: mean + this many standard deviations; default 5")
    some.add_argument("--mesh", type=int, metavar="N", help="devices over which the seeds of a step are divided")
    some.add_argument("--parts", type=int, metavar="N", help="parts in which a step samples its seeds; default: --mesh")
    some.add_argument(
        "--inference",
        choices=("layers", "sampled"),
        help="accuracies at the end: layer by layer from all neighbours, or on samples (default where edges have times "
        "or weights)",
    )
    some.add_argument("--negatives", type=int, metavar="N", help="wrong ends of each edge; default: 128")
    some.add_argument("--negative-kind", choices=NEGATIVES, help="default: uniform")
    some.add_argument("--loss", choices=LOSSES, help="of links; default: softmax")
    some.add_argument(
        "--reciprocal", action=argparse.BooleanOptionalAction, help="a second vector of each relation, for heads"
    )
    some.add_argument("--n3", type=float, help="weight of the nuclear 3-norm of an edge's vectors")
    some.add_argument("--eval-edges", type=int, metavar="N", help="validation edges of an evaluation; 0: all")


def _add_run(p: argparse.ArgumentParser) -> None:
    out = p.add_argument_group("results")
    out.add_argument(
        "--out", metavar="DIR", help="folder for results, plot and checkpoints; default: out/<dataset>-<model>[-<task>]"
    )
    out.add_argument("--resume", action="store_true", help="continue the run in --out, to the same numbers")
    out.add_argument(
        "--evaluate",
        metavar="CHECKPOINT",
        help="train nothing; print the results of a run's folder, or of a seed in it",
    )
    out.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="steps between two checkpoints; default: half a minute; always at the end of a seed",
    )
    out.add_argument("--no-checkpoints", action="store_true", help="write no checkpoints")


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
        if args.evaluate:
            _evaluate(args)
        else:
            _train(args, argv)
    except (ValueError, FileNotFoundError, DataUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the arguments name.

    Raises:
        ValueError: a value out of range, or an option of another task.
    """
    if args.sampled and args.links:
        raise ValueError("--sampled must not stand with --links, which trains on mini-batches, too; leave one out")
    task = "samples" if args.sampled else "links" if args.links else "nodes"
    given = {name: getattr(args, name) for name in Settings.__dataclass_fields__ if hasattr(args, name)}
    name, model = given.pop("dataset"), given.pop("model")
    given["parts"] = args.parts or args.mesh
    given["device_bytes"] = None if args.device_bytes is None else int(args.device_bytes)
    if args.fan_outs is not None:
        try:
            given["fan_outs"] = tuple(int(k) for k in args.fan_outs.split(","))
        except ValueError:
            raise ValueError(f"--fan-outs must be integers with commas, as 10,5, got {args.fan_outs!r}") from None
    for option, value in {**given, "inference": args.inference}.items():
        tasks = ("samples",) if option == "inference" else tasks_of(option)
        if value is not None and task not in tasks:
            flag = "--no-reverse" if option == "reverse" else f"--{option.replace('_', '-')}"
            raise ValueError(f"{flag} must stand {' or '.join(_FLAGS[t] for t in tasks)}; leave it out")
    # A folder of somebody's own has the defaults of no data set.
    name = name or ("folder" if args.data and task != "nodes" else DEFAULT_DATASET)
    return resolve(name.lower(), model, task=task, **given)


def _train(args: argparse.Namespace, argv: Sequence[str]) -> None:
    start = time.perf_counter()
    settings = settings_of(args)
    if args.resume and args.no_checkpoints:
        raise ValueError("--resume must not stand with --no-checkpoints: it needs checkpoints; leave one of them out")
    from dejax.training import plot, report
    from dejax.training.checkpoint import Checkpoints
    from dejax.training.data import load

    own = args.dataset is None and args.data and settings.task != "nodes"
    data = load(settings.task, None if own else settings.dataset, args.data, typed_nodes=settings.typed_nodes)
    settings = settings.replace(dataset=data.name) if own else settings
    _check_inference(args, data)
    suffix = {"nodes": "", "samples": "-sampled", "links": f"-{settings.decoder}"}[settings.task]
    out = Path(args.out or f"out/{settings.dataset}-{settings.model}{suffix}")
    print(_shortened(data.summary(rows=5) if settings.task == "nodes" else data.summary()), end="\n\n", flush=True)
    trainer = _trainer(args, settings, data)
    if trainer.world.features.types:
        print(f"\n{trainer.world.features}\n", flush=True)
    checkpoints = None if args.no_checkpoints else Checkpoints(out, _FREE)
    if checkpoints is not None:
        checkpoints.begin(settings.as_dict(), resume=args.resume)
    runs = [_one_seed(trainer, checkpoints, args, seed) for seed in range(settings.seeds)]
    histories, finals, lost, skipped = zip(*runs, strict=True)
    results = report.summarise(
        trainer,
        histories,
        finals,
        lost=lost,
        skipped=skipped,
        inference=_inference_of(args, trainer),
        baseline=_baseline(args, settings, data),
        total_seconds=time.perf_counter() - start,
        argv=argv,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot.draw_curves(out / "curves.png", results, histories)
    artifacts = {"results": str(out / "results.json"), "curves": str(out / "curves.png")}
    if checkpoints is not None:
        artifacts["checkpoints"] = str(out / "checkpoints")
    print(f"\n{report.table(results, artifacts)}", flush=True)


def _check_inference(args: argparse.Namespace, data: Any) -> None:
    if args.inference == "layers" and (data.edge_times or data.edge_weights):
        raise ValueError("--inference must be sampled where edges have times or weights, got layers; leave it out")


def _inference_of(args: argparse.Namespace, trainer: Any) -> str | None:
    """How accuracies at the end are computed, for the report; None: from the whole graph."""
    settings = trainer.settings
    return args.inference or trainer.task.inference if settings.task == "samples" and not settings.full_batch else None


def _trainer(args: argparse.Namespace, settings: Settings, data: Any) -> Any:
    from dejax.training.trainer import Trainer

    show = lambda text: print(_shortened(text))  # noqa: E731
    return Trainer(settings, data, backend=args.backend, devices=args.mesh, print_table=show)


def _one_seed(trainer: Any, checkpoints: Any, args: argparse.Namespace, seed: int) -> tuple[Any, Any, int, int]:
    """Curves, results, lost nodes and skipped steps of a seed. Draws a bar on a terminal, otherwise a line."""
    from dejax.datasets._progress import Progress
    from dejax.training.state import History

    epochs, per_epoch = trainer.settings.epochs, trainer.task.steps_per_epoch
    total, history, state = epochs * per_epoch, History(), trainer.init(seed)
    if args.resume and checkpoints is not None and checkpoints.latest(seed) is not None:
        plain, curves = checkpoints.restore(seed, trainer.exported(state))
        state, history = trainer.imported(plain), History(**curves)
    saved, saved_at = int(state.step), time.monotonic()
    done, was_saved = saved, checkpoints is not None and checkpoints.latest(seed) == saved

    with Progress(f"seed {seed}", total, unit="steps") as bar:
        bar.update(done)
        for now, found in trainer.run(state, epochs):
            state = now  # the one before is donated
            bar.update(int(state.step) - done)
            done = int(state.step)
            if found is not None:
                history.add(found, per_epoch)
            every = args.checkpoint_every
            due = done - saved >= every if every else time.monotonic() - saved_at >= SAVE_SECONDS
            if checkpoints is not None and (due or done >= total):
                checkpoints.save(seed, done, trainer.exported(state), history.as_dict())
                saved, saved_at, was_saved = done, time.monotonic(), True
    if checkpoints is not None and not was_saved:
        checkpoints.save(seed, done, trainer.exported(state), history.as_dict())
    final = trainer.final(state, inference=args.inference)
    if checkpoints is not None and not sys.stderr.isatty():
        print(f"seed {seed}: {done} steps in {sum(history.seconds):.1f} s, {_shown(trainer, final)}", flush=True)
    return history, final, int(state.lost), int(state.skipped)


def _shown(trainer: Any, final: dict[str, float]) -> str:
    """The results of a seed on one line."""
    if trainer.task.classes:
        return "accuracy " + ", ".join(f"{split} {100 * value:.2f} %" for split, value in final.items())
    return "test " + ", ".join(f"{name} {value:.4f}" for name, value in final.items())


def _baseline(args: argparse.Namespace, settings: Settings, data: Any) -> list[float]:
    """Test accuracies of the model without edges, of each seed."""
    if settings.task != "nodes" or settings.model == "mlp" or args.no_baseline or not len(data.test_nodes):
        return []
    trainer = _trainer(args, settings.replace(model="mlp", dropout=0.0), data)
    found = []
    for seed in range(settings.seeds):
        state = trainer.train(trainer.init(seed), settings.epochs)
        found.append(trainer.final(state)["test"])
    return found


def _evaluate(args: argparse.Namespace) -> None:
    from dejax.training import report
    from dejax.training.checkpoint import Checkpoints, find_run, read_settings
    from dejax.training.data import is_known, load

    folder, seed = find_run(Path(args.evaluate))
    settings, checkpoints = Settings(**read_settings(folder)), Checkpoints(folder)
    seeds = checkpoints.seeds() if seed is None else [seed]
    if not seeds:
        raise FileNotFoundError(f"no checkpoint in {folder}; a run with --no-checkpoints leaves none")
    name = settings.dataset if is_known(settings.task, settings.dataset) else None
    data = load(settings.task, name, args.data, typed_nodes=settings.typed_nodes)
    trainer = _trainer(args, settings, data)
    found: dict[str, list[float]] = {}
    for number in seeds:
        plain, _ = checkpoints.restore(number, trainer.exported(trainer.init(number)))
        state = trainer.imported(plain)
        final = trainer.final(state, inference=args.inference)
        for name, value in final.items():
            found.setdefault(name, []).append(value)
        print(
            f"seed {number}, epoch {int(state.step) // trainer.task.steps_per_epoch}: {_shown(trainer, final)}",
            flush=True,
        )
    if len(seeds) > 1:
        for name, values in found.items():
            summary = report.spread(values)
            scale, unit = (100, " %") if trainer.task.classes else (1, "")
            print(f"{name}: mean {scale * summary['mean']:.4g}{unit}, standard deviation {scale * summary['std']:.3g}")


def _shortened(text: str, most: int = 40) -> str:
    lines = text.splitlines()
    return text if len(lines) <= most else "\n".join([*lines[: most - 1], f"  .. {len(lines) - most + 1} more lines"])
