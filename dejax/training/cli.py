"""The command `dejax-train`: trains one model on one data set with several seeds.

It prints a table and writes results, a plot and checkpoints. With `--sampled` it trains on mini-batches
(`dejax.training.sampled`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejax.training.commands import SAVE_SECONDS, check_resume, write_run
from dejax.training.settings import MODELS, Settings, resolve

DEFAULT_DATASET = "stdlib"


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    p = argparse.ArgumentParser(
        description="Trains a relational graph neural network to classify the nodes of a graph. One jitted step "
        "sees the whole graph; several seeds are trained. Defaults come from dejax.training.settings: published for "
        "R-GCN on aifb, mutag, bgs and am; chosen on validation nodes for R-GCN on stdlib, and for RGAT and HGT on "
        "aifb; equal for all other cases.",
    )
    p.add_argument("--sampled", action="store_true", help="train on mini-batches; `--sampled --help` lists the options")
    p.add_argument("--dataset", default=None, help=f"a name of dejax.datasets.NAMES; default: {DEFAULT_DATASET}")
    p.add_argument(
        "--data", metavar="FOLDER", help="folder of the data set's files; default: $DEJAX_DATA, or a download"
    )
    p.add_argument("--model", choices=(*MODELS, "mlp"), help="default: rgcn")
    p.add_argument("--hidden", type=int, metavar="N", help="width of the hidden layers")
    p.add_argument("--layers", type=int, metavar="N", help="relational layers")
    p.add_argument("--heads", type=int, metavar="N", help="attention heads (rgat, hgt)")
    p.add_argument("--bases", type=int, metavar="N", help="basis matrices (rgcn); 0: one matrix per relation")
    p.add_argument(
        "--epochs", type=int, metavar="N", help="steps, each over the whole graph; default: 50 (rgcn on stdlib: 60)"
    )
    p.add_argument("--seeds", type=int, metavar="N", help="runs, with seeds 0 .. N-1; default: 10 (rgcn on stdlib: 5)")
    p.add_argument("--lr", type=float, help="Adam's learning rate")
    p.add_argument("--l2", type=float, help="weight of the L2 penalty on the first layer's matrices")
    p.add_argument("--dropout", type=float, metavar="SHARE", help="dropout, at the place that the model's paper gives")
    p.add_argument("--featureless", action="store_true", default=None, help="ignore the data set's node features")
    p.add_argument(
        "--holdout", type=float, metavar="SHARE", help="share of the training nodes to validate on, to choose settings"
    )
    p.add_argument(
        "--fold", type=int, metavar="K", help="number of the share to hold out, 0, 1, .., for cross-validation"
    )
    p.add_argument("--precision", choices=("f32", "tf32", "bf16"), help="precision of products of float32 matrices")
    p.add_argument("--eval-every", type=int, metavar="N", help="epochs between two points of the accuracy curves")
    p.add_argument(
        "--backend", choices=("auto", "pallas", "xla"), default="auto", help="backend of the compiler; default: auto"
    )
    p.add_argument(
        "--out", metavar="DIR", help="folder for results, plot and checkpoints; default: out/<dataset>-<model>"
    )
    p.add_argument(
        "--resume", action="store_true", help="continue the run in --out: unfinished seeds, more epochs or seeds"
    )
    p.add_argument(
        "--evaluate",
        metavar="CHECKPOINT",
        help="train nothing; print the accuracies of a run's folder, or of one seed in it",
    )
    p.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="epochs between two checkpoints; default: half a minute; always at the end of a seed",
    )
    p.add_argument("--no-checkpoints", action="store_true", help="write no checkpoints")
    p.add_argument("--no-baseline", action="store_true", help="skip the baseline, a model without edges")
    return p


_SETTINGS = "hidden layers heads bases epochs seeds lr l2 dropout featureless holdout fold precision eval_every".split()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` by default.

    Returns:
        The exit status: 0, or 2 with a message on stderr if an argument or a file is wrong.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    sampled = "--sampled" in argv
    args = None if sampled else parser().parse_args(argv)
    from dejax.datasets import DataUnavailableError

    try:
        if args is None:
            from dejax.training.sampled import cli

            cli.main([word for word in argv if word != "--sampled"])
        elif args.evaluate:
            _evaluate(args)
        else:
            _train(args, argv)
    except (ValueError, FileNotFoundError, DataUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    given = {name: getattr(args, name) for name in _SETTINGS}
    return resolve((args.dataset or DEFAULT_DATASET).lower(), args.model or "rgcn", **given)


def _train(args: argparse.Namespace, argv: Sequence[str]) -> None:
    start = time.perf_counter()
    settings = _settings(args)
    out = Path(args.out or f"out/{settings.dataset}-{settings.model}")
    from dejax.training import plot, report
    from dejax.training.checkpoint import Checkpoints
    from dejax.training.data import load_data
    from dejax.training.fit import Trainer

    check_resume(args)
    checkpoints = None if args.no_checkpoints else Checkpoints(out, ("epochs", "seeds", "eval_every"))
    data = load_data(settings.dataset, args.data)
    print(data.summary(rows=5), end="\n\n", flush=True)
    trainer = Trainer(settings, data, backend=args.backend)
    if checkpoints is not None:
        checkpoints.begin(settings.as_dict(), resume=args.resume)
    histories = _all_seeds(trainer, checkpoints, args, label=report.MODEL_NAMES[settings.model])
    baseline: list[Any] = []
    if not args.no_baseline and settings.model != "mlp":
        without_edges = Trainer(settings.replace(model="mlp", l2=0.0, dropout=0.0), data)
        baseline = _all_seeds(without_edges, None, args, label="no edges")
    results = report.summarise(
        trainer, histories, baseline=baseline, total_seconds=time.perf_counter() - start, argv=argv
    )
    write_run(out, results, lambda file: plot.draw_curves(file, results, histories), checkpoints, report.table)


def _all_seeds(trainer: Any, checkpoints: Any, args: argparse.Namespace, *, label: str) -> list[Any]:
    """Trains every seed and returns the curves of each. Draws a bar on a terminal, otherwise a line for each seed."""
    from dejax.datasets._progress import Progress as Bar

    settings, histories = trainer.settings, []
    with Bar(f"train {label}", settings.seeds * settings.epochs, unit="epochs") as bar:
        for seed in range(settings.seeds):
            histories.append(_one_seed(trainer, checkpoints, args, seed, bar))
            if checkpoints is not None and not sys.stderr.isatty():
                print(_seed_line(seed, histories[-1]), flush=True)
    return histories


def _seed_line(seed: int, history: Any) -> str:
    shares = ", ".join(f"{split} {100 * values[-1]:.1f} %" for split, values in history.accuracy.items())
    return f"seed {seed}: {history.epochs[-1]} epochs in {sum(history.seconds):.1f} s, accuracy {shares}"


def _one_seed(trainer: Any, checkpoints: Any, args: argparse.Namespace, seed: int, bar: Any) -> Any:
    from dejax.training.history import History

    settings, history = trainer.settings, History()
    if args.resume and checkpoints is not None and checkpoints.latest(seed) is not None:
        begin, curves = checkpoints.restore(seed, trainer.abstract_state())
        history = History(**curves)
        bar.update(int(begin.epoch))
    else:
        begin = trainer.init(seed)
    saved_at, saved_epoch = time.monotonic(), int(begin.epoch)
    for state, progress in trainer.run(begin, settings.epochs):
        history.add(progress)
        bar.update(len(progress.loss))
        if checkpoints is None or progress.epoch == saved_epoch:
            continue
        due = progress.epoch >= settings.epochs
        if args.checkpoint_every:
            due = due or progress.epoch - saved_epoch >= args.checkpoint_every
        else:
            due = due or time.monotonic() - saved_at >= SAVE_SECONDS
        if due:
            checkpoints.save(seed, progress.epoch, state, history.as_dict())
            saved_at, saved_epoch = time.monotonic(), progress.epoch
    return history


def _evaluate(args: argparse.Namespace) -> None:
    from dejax.training import report
    from dejax.training.checkpoint import Checkpoints, find_run, read_settings
    from dejax.training.data import load_data
    from dejax.training.fit import Trainer

    folder, seed = find_run(Path(args.evaluate))
    settings, checkpoints = Settings(**read_settings(folder)), Checkpoints(folder)
    seeds = checkpoints.seeds() if seed is None else [seed]
    if not seeds:
        raise FileNotFoundError(f"no checkpoint in {folder}; a run with --no-checkpoints leaves none")
    trainer = Trainer(settings, load_data(settings.dataset, args.data), backend=args.backend)
    like = trainer.abstract_state()
    found: dict[str, list[float]] = {}
    for number in seeds:
        state, _ = checkpoints.restore(number, like)
        shares = trainer.accuracy(state.params)
        for split, value in shares.items():
            found.setdefault(split, []).append(value)
        text = ", ".join(f"{split} {100 * value:.2f} %" for split, value in shares.items())
        print(f"seed {number}, epoch {int(state.epoch)}: accuracy {text}", flush=True)
    if len(seeds) > 1:
        for split, values in found.items():
            summary = report.spread(values)
            print(f"{split}: mean {100 * summary['mean']:.2f} %, standard deviation {100 * summary['std']:.2f}")
