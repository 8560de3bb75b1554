"""The command `dejax-train`: trains one model on one data set with several seeds.

It prints a table and writes results, a plot and checkpoints. By default it classifies nodes and a step sees the whole
graph. With `--sampled` it trains on mini-batches, with `--links` it predicts edges, and as `dejax-train tables CONFIG`
it predicts labels of rows of a database.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejax._files import is_full, keep_compiled_programs, replacing, write_whole
from dejax._optional import missing_packages
from dejax.training.command.arguments import parser, settings_of
from dejax.training.command.config import TablesConfig, read_config
from dejax.training.settings import Settings

_LAYOUT = "layout of data"  # among the settings in the folder of a run
# In the folder of a run: `TableTask.fitted`. It goes with the checkpoints, and is not there for another run to resume.
_FITTED = "checkpoints/fitted.json"
# Settings that a resumed run may change: its length, and how steps are called; not the model.
_FREE = ("epochs", "seeds", "eval_every", "pipeline")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` by default.

    Returns:
        The exit status: 0, or 2 with a message on stderr if an argument or a file is wrong.
    """
    argv = words = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["tables"]:  # as other commands have subcommands
        words = argv[1:] if {"-h", "--help"} & set(argv) else ["--tables", *argv[1:]]
    tasks = {"tables": "tables", "--tables": "tables", "--links": "links", "--sampled": "samples"}
    args = parser(next((task for word, task in tasks.items() if word in argv), None)).parse_args(words)
    keep_compiled_programs()
    from dejax.datasets import DataUnavailableError

    try:
        if args.evaluate:
            _evaluate(args)
        elif args.decoder and "," in args.decoder:
            _compare(args, argv)
        else:
            _train(args, argv)
    except (ValueError, OSError, DataUnavailableError) as error:
        print(f"error: {error}{', then go on with --resume' if is_full(error) else ''}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not missing_packages():
            raise
        print(f"error: {error}; for all of dejax-train: pip install {' '.join(missing_packages())}", file=sys.stderr)
        return 2
    return 0


def _compare(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Trains with each decoder, in a folder of its own, and prints their results side by side."""
    from dejax.training.command.report import aligned

    found = {}
    for decoder in dict.fromkeys(args.decoder.split(",")):
        own = argparse.Namespace(**{**vars(args), "decoder": decoder, "out": args.out and f"{args.out}/{decoder}"})
        found[decoder] = _train(own, argv)["test"]
    measures = list(next(iter(found.values())))
    rows = [(decoder, *(f"{test[name]['mean']:.4f}" for name in measures)) for decoder, test in found.items()]
    print("\nTest triples, means over seeds\n")
    print("\n".join(aligned(("decoder", *measures), rows)), flush=True)


def _train(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    started = time.perf_counter()
    configured = read_config(args.tables) if args.tables else None
    settings = settings_of(args, None if configured is None else configured.settings)
    if args.export and settings.task != "links":
        raise ValueError(
            "--export must be given only with --links, where entities and relations have vectors; leave it out"
        )
    if args.resume and args.no_checkpoints:
        raise ValueError(
            "--resume and --no-checkpoints must not be given together, because --resume reads checkpoints; leave one "
            "of them out"
        )
    from dejax.training.checkpoint import Checkpoints, claimed

    data, settings = _data(args, settings, configured)
    if configured is not None:
        from dejax.training.tables.prepared import training_examples

        examples = training_examples(data, settings.target)
        settings = settings_of(args, configured.settings, examples).replace(dataset=data.name)
    _check_inference(args, data)
    suffixes = {"nodes": "", "samples": "-sampled", "links": f"-{settings.decoder}", "tables": ""}
    out = Path(args.out or f"out/{settings.dataset}-{settings.model}{suffixes[settings.task]}")
    print(_shortened(data.summary(rows=5) if settings.task == "nodes" else data.summary()), end="\n\n", flush=True)
    trainer = _trainer(args, settings, data, _fitted(out) if args.resume else None)
    if trainer.world.features.types:
        print(f"\n{trainer.world.features}\n", flush=True)
    # A schedule depends on the number of epochs.
    free = [name for name in _FREE if name != "epochs" or settings.schedule == "constant"]
    checkpoints = None if args.no_checkpoints else Checkpoints(out, free)
    with claimed(out):
        if checkpoints is not None:
            checkpoints.begin({**settings.as_dict(), **_layout(trainer)}, resume=args.resume)
            if settings.task == "tables":
                write_whole(out / _FITTED, (json.dumps(trainer.task.fitted) + "\n").encode())
        return _train_into(out, checkpoints, trainer, data, args, argv, started)


def _train_into(
    out: Path,
    checkpoints: Any,
    trainer: Any,
    data: Any,
    args: argparse.Namespace,
    argv: Sequence[str],
    started: float,
) -> dict[str, Any]:
    """Trains all seeds and writes the results into a folder; returns what `results.json` has."""
    from dejax.training.command import report

    settings = trainer.settings
    out.mkdir(parents=True, exist_ok=True)
    runs = [_one_seed(trainer, checkpoints, args, seed, out) for seed in range(settings.seeds)]
    results = report.summarise(
        trainer,
        [run.history for run in runs],
        [run.final for run in runs],
        lost=[run.lost for run in runs],
        skipped=[run.skipped for run in runs],
        inference=_inference_of(args, trainer),
        baseline=_baseline(args, settings, data),
        linear={} if args.no_baseline or settings.task != "tables" else trainer.task.linear_measures(),
        total_seconds=time.perf_counter() - started,
        argv=argv,
    )
    write_whole(out / "results.json", (json.dumps(results, indent=2) + "\n").encode())
    report.draw_curves(out / "curves.png", results, [run.history for run in runs])
    artifacts = {"results": str(out / "results.json"), "curves": str(out / "curves.png")}
    if settings.task == "tables":
        from dejax.training.command.page import write_page

        artifacts |= {"predictions": str(out / "predictions*"), "report": str(out / "report.html")}
        write_page(out / "report.html", results, trainer.task.examples, runs[0].predicted, runs[0].importance)
    if args.export:
        artifacts["embeddings"] = str(out / "embeddings-seed*.npz")
    if checkpoints is not None:
        artifacts["checkpoints"] = str(out / "checkpoints")
    print(f"\n{report.table(results, artifacts)}", flush=True)
    return results


def _fitted(folder: Path) -> Any:
    """What the run in a folder fitted to its tables; None if it has none."""
    path = folder / _FITTED
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _layout(trainer: Any) -> dict[str, str]:
    """The description of the data in the folder of a run."""
    return {_LAYOUT: trainer.task.layout_of_data}


def _data(args: argparse.Namespace, settings: Settings, configured: TablesConfig | None) -> tuple[Any, Settings]:
    """The data set of a run, and the settings with its name."""
    from dejax.training.tasks.data import is_known, load

    if configured is not None:
        data = configured.dataset()
        return data, settings.replace(dataset=data.name)
    own = args.dataset is None and args.data and settings.task != "nodes"
    if args.evaluate:
        own = not is_known(settings.task, settings.dataset)
    data = load(settings.task, None if own else settings.dataset, args.data, typed_nodes=settings.typed_nodes)
    return data, settings.replace(dataset=data.name) if own else settings


def _check_inference(args: argparse.Namespace, data: Any) -> None:
    if args.inference == "layers" and (data.edge_times or data.edge_weights):
        raise ValueError("--inference must be sampled if edges have times or weights, got layers; leave it out")


def _inference_of(args: argparse.Namespace, trainer: Any) -> str | None:
    """How accuracies at the end are computed, for the report; None: from the whole graph."""
    settings = trainer.settings
    return args.inference or trainer.task.inference if settings.task == "samples" and not settings.full_batch else None


def _trainer(args: argparse.Namespace, settings: Settings, data: Any, fitted: Any = None) -> Any:
    from dejax.training.trainer import Trainer

    show = lambda text: print(_shortened(text))  # noqa: E731
    return Trainer(settings, data, backend=args.backend, devices=args.mesh, print_table=show, fitted=fitted)


@dataclasses.dataclass(frozen=True, slots=True)
class _SeedRun:
    """What the report says of a seed. Of tables: predictions by split, and what contributes, of the first seed."""

    history: Any
    final: dict[str, float]
    lost: int
    skipped: int
    predicted: dict[str, Any]
    importance: Any = None


def _one_seed(trainer: Any, checkpoints: Any, args: argparse.Namespace, seed: int, out: Path) -> _SeedRun:
    from dejax.training.fitting import fit

    fitted = fit(trainer, seed, checkpoints, resume=args.resume, every=args.checkpoint_every)
    state, history = fitted.state, fitted.history
    predicted, contributes = {}, None
    if trainer.settings.task == "tables":
        predicted = trainer.task.predicted(trainer, trainer.on_one_device(state))
        final = trainer.task.measures_of("test", predicted["test"])
        _write_predictions(trainer, out / f"predictions-seed{seed}.{args.predictions}", predicted)
        if seed == 0 and args.importance and len(predicted["valid"]):
            from dejax.training.tables.importance import importance

            contributes = importance(trainer, trainer.on_one_device(state), examples=args.importance)
    else:
        final = trainer.final(state, inference=args.inference)
    if args.export:
        with replacing(out / f"embeddings-seed{seed}.npz") as temporary, temporary.open("wb") as file:
            np.savez(file, **trainer.task.vectors(trainer, state))
    if checkpoints is not None and not sys.stderr.isatty():
        best = f", best epoch {fitted.best_epoch}" if trainer.settings.patience else ""
        steps = f"{sum(history.steps)} steps in {sum(history.seconds):.1f} s{best}"
        print(f"seed {seed}: {steps}, {_shown(trainer, final)}", flush=True)
    return _SeedRun(history, final, int(state.lost), int(state.skipped), predicted, contributes)


def _write_predictions(trainer: Any, path: Path, predicted: dict[str, Any]) -> None:
    """The predictions of validation and test examples."""
    from dejax.training.command import predictions
    from dejax.training.metrics import Ranking

    task = trainer.task
    there = [split for split in ("valid", "test") if len(predicted[split])]
    if there:
        places = np.concatenate([task.splits[split] for split in there])
        parts = [predicted[split] for split in there]
        values = Ranking.joined(parts) if isinstance(parts[0], Ranking) else np.concatenate(parts)
        predictions.write(path, predictions.as_columns(task.data, task.examples, values, places))


def _shown(trainer: Any, final: dict[str, float]) -> str:
    """The results of a seed on one line."""
    if trainer.task.classes:
        return "accuracy " + ", ".join(f"{split} {100 * value:.2f} %" for split, value in final.items())
    return "test " + ", ".join(f"{name} {value:.4f}" for name, value in final.items()) if final else "no test examples"


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
    from dejax.training.checkpoint import Checkpoints, find_run, read_settings
    from dejax.training.command import report

    folder, seed = find_run(Path(args.evaluate))
    given, checkpoints = read_settings(folder), Checkpoints(folder)
    layout = given.pop(_LAYOUT, None)
    settings = Settings(**given)
    seeds = checkpoints.seeds() if seed is None else [seed]
    if not seeds:
        raise FileNotFoundError(
            f"--evaluate must be a folder with checkpoints, got {folder}, which has none; train without "
            "--no-checkpoints"
        )
    if (settings.task == "tables") != bool(args.tables):
        raise ValueError(
            f"--evaluate {folder}, a run of the task {settings.task}, must be given {_with(settings.task)}"
        )
    data, _ = _data(args, settings, read_config(args.tables) if args.tables else None)
    trainer = _trainer(args, settings, data, _fitted(folder))
    if layout not in (None, trainer.task.layout_of_data):
        what = "types, relations or classes, other numbers of them, or other names of nodes"
        if settings.task == "tables":
            what = "relations, classes, training examples or last training cutoff"
            if target := trainer.task.examples.target:
                what += f", or rows of {target} that are not those of the training, with new ones only at the end"
        raise ValueError(
            f"--evaluate {folder} must be given the data that it was trained on, got other {what}; train again, or "
            "undo the change"
        )
    found: dict[str, list[float]] = {}
    for number in seeds:
        best = bool(settings.patience) and checkpoints.latest(number, best=True) is not None
        plain, _ = checkpoints.restore(number, trainer.exported(trainer.init(number)), best=best)
        state = trainer.imported(plain)
        if args.at is not None:
            _predict_at(args, trainer, state, folder, number)
            continue
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


def _with(task: str) -> str:
    return "with tables CONFIG" if task == "tables" else "without tables"


def _predict_at(args: argparse.Namespace, trainer: Any, state: Any, folder: Path, seed: int) -> None:
    """Writes predictions for all rows of the entity table that are known at a time."""
    from dejax.training.command import predictions

    task = trainer.task
    wanted = predictions.known_rows(task.data, task.examples, predictions.time_of(args.at, task.data.time_unit))
    values = task.predict(trainer, trainer.on_one_device(state), examples=wanted)
    path = folder / f"predictions-at-{args.at.replace(':', '')}-seed{seed}.{args.predictions}"
    predictions.write(path, predictions.as_columns(task.data, wanted, values, None))
    print(f"seed {seed}: {len(wanted):,} predictions in {path}", flush=True)


def _shortened(text: str, most: int = 40) -> str:
    lines = text.splitlines()
    return text if len(lines) <= most else "\n".join([*lines[: most - 1], f"  .. {len(lines) - most + 1} more lines"])
