"""The arguments of `dejax-train`, and the settings that they name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from dejax.training.settings import (
    CLASS_WEIGHTS,
    DECODERS,
    FEATURE_DTYPES,
    LOSSES,
    MODELS,
    NEGATIVES,
    NUMBERS,
    PLACES,
    PRECISIONS,
    SCHEDULES,
    Settings,
    resolve,
    tasks_of,
)

DEFAULT_DATASET = "stdlib"
_FLAGS = {
    "nodes": "without --sampled, --links and tables",
    "samples": "with --sampled",
    "links": "with --links",
    "tables": "with tables",
}
_NO_SETTINGS = {
    "data": ("nodes", "samples", "links"),
    "inference": ("samples",),
    "at": ("tables",),
    "importance": ("tables",),
    "predictions": ("tables",),
    "export": ("links",),
}
"""The tasks that read an option which is no field of `Settings`; other such options are for all tasks."""


def _tasks(option: str) -> tuple[str, ...]:
    return _NO_SETTINGS.get(option) or tasks_of(option)


_USAGE = """
  dejax-train [options]                  classify nodes of a graph; a step sees the whole graph
  dejax-train --sampled [options]        classify nodes on mini-batches
  dejax-train --links [options]          predict edges on mini-batches
  dejax-train tables CONFIG [options]    predict labels of rows of a database"""
_DESCRIPTION = """\
Trains a relational graph neural network with several seeds, and prints and writes its results.

Defaults of the model and of training are the published ones for R-GCN on aifb, mutag, bgs and am. For R-GCN on stdlib,
and for RGAT and HGT on aifb, they were chosen on validation nodes. For all other cases they are starting points."""
_ONE_TASK = "These are the options that can be given {}; `dejax-train --help` lists the options of all tasks."
_EXAMPLE = """\
CONFIG is a folder of HeteroDataset.save, or a TOML file such as

  [database]
  path = "shop"                             # a folder of CSV or Parquet files, or a SQLite file
  primary_keys = {customers = "id"}
  foreign_keys = [["orders", "customer", "customers"]]
  time_columns = {orders = "placed"}        # when a row came to be
  [database.known_at]                       # columns that are known later than their rows
  orders = {returned = "decided"}

  [tasks.returns]                           # the arguments of a function of dejax.datasets: task_of_rows,
  table = "orders"                          # task_of_events (with `events`), task_from_columns (with `examples`)
  label = "returned"
  valid_from = "2024-09-01"
  test_from = "2024-11-01"

  [settings]                                # options of this command, with _ in place of -: fan_outs = [20, 10]
  epochs = 3"""


def parser(task: str | None = None) -> argparse.ArgumentParser:
    """The arguments of the command; its help lists the options of one task, or with None those of all tasks."""
    p = argparse.ArgumentParser(
        prog="dejax-train",
        usage=_USAGE,
        description=_DESCRIPTION if task is None else f"{_DESCRIPTION}\n\n{_ONE_TASK.format(_FLAGS[task])}",
        epilog=_EXAMPLE if task in (None, "tables") else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    p.add_argument(
        "--tables",
        metavar="CONFIG",
        help="the same as `dejax-train tables CONFIG`: CONFIG, shown below, names tables, keys, times and tasks",
    )
    _add_data_and_model(p)
    _add_training(p)
    _add_samples_and_links(p)
    _add_tables(p)
    _add_run(p)
    by_words = ("sampled", "links", "tables", *(("dataset",) if task == "tables" else ()))  # before all options
    for option in p._actions:
        if task is not None and (option.dest in by_words or task not in _tasks(option.dest)):
            option.help = argparse.SUPPRESS
    return p


def _decoders(text: str) -> str:
    wrong = [name for name in text.split(",") if name not in DECODERS]
    if wrong:
        raise argparse.ArgumentTypeError(f"the decoder must be one of {', '.join(DECODERS)}, got {wrong[0]!r}")
    return text


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
        "--fold",
        type=int,
        metavar="K",
        help="which share of the training nodes --holdout takes: 0, 1, .., for cross-validation",
    )
    data.add_argument(
        "--no-reverse", dest="reverse", action="store_false", default=None, help="add no reverse relations"
    )
    data.add_argument("--typed-nodes", action="store_true", default=None, help="stdlib, RDF: keep the types of nodes")
    model = p.add_argument_group("model")
    model.add_argument(
        "--model",
        "--layer",
        choices=(*MODELS, "mlp", "embeddings", "relgt"),
        help="default: rgcn; --links: embeddings, which the decoder reads without layers; tables: also relgt, "
        "attention over a row's sampled tree",
    )
    model.add_argument("--hidden", type=int, metavar="N", help="width of the hidden layers, all heads together")
    model.add_argument("--layers", type=int, metavar="N", help="number of relational layers")
    model.add_argument("--heads", type=int, metavar="N", help="number of attention heads (rgat, hgt, relgt)")
    model.add_argument("--bases", type=int, metavar="N", help="basis matrices (rgcn); 0: a matrix for each relation")
    model.add_argument(
        "--dropout", type=float, metavar="SHARE", help="dropout, at the place that the model's paper gives"
    )
    model.add_argument(
        "--decoder",
        type=_decoders,
        metavar="NAME",
        help=f"decoder: {', '.join(DECODERS)}; default: distmult. Several with commas are trained one after the other "
        "and compared",
    )
    model.add_argument("--margin", type=float, help="margin of the decoder rotate")


def _add_training(p: argparse.ArgumentParser) -> None:
    run = p.add_argument_group("training")
    run.add_argument("--epochs", type=int, metavar="N", help="number of passes over the training data")
    run.add_argument("--seeds", type=int, metavar="N", help="number of runs, with the random seeds 0 .. N-1")
    run.add_argument("--lr", type=float, help="Adam's learning rate")
    run.add_argument("--schedule", choices=SCHEDULES, help="how the learning rate of parameters changes over the steps")
    run.add_argument("--warmup", type=int, metavar="N", help="steps in which the learning rate rises from 0")
    run.add_argument("--clip", type=float, metavar="NORM", help="clip gradients to this global norm; 0: do not clip")
    run.add_argument(
        "--patience",
        type=int,
        metavar="N",
        help="stop after N evaluations without a better validation measure, and report the best state; 0: never",
    )
    run.add_argument("--l2", type=float, help="weight of the L2 penalty on the first layer's matrices")
    run.add_argument("--weight-decay", type=float, help="Adam's decoupled weight decay")
    run.add_argument("--precision", choices=PRECISIONS, help="precision of products of float32 matrices")
    run.add_argument("--backend", choices=("auto", "pallas", "xla"), default="auto", help="backend of the compiler")
    run.add_argument("--eval-every", type=int, metavar="N", help="number of epochs between two evaluations")
    run.add_argument(
        "--no-baseline", action="store_true", help="skip the baseline: a model without edges; tables: a linear model"
    )


def _add_samples_and_links(p: argparse.ArgumentParser) -> None:
    some = p.add_argument_group("mini-batches")
    some.add_argument("--batch-size", type=int, metavar="N", help="training nodes, or training edges, in a step")
    some.add_argument(
        "--fan-outs",
        metavar="K,K",
        help="neighbours that each hop draws, the first hop first; -1: all. From each relation (10,10), or over "
        "all relations together (--links 20,10; --joint 20,20)",
    )
    some.add_argument(
        "--full-batch", action="store_true", default=None, help="no sampling: a step sees the whole graph"
    )
    some.add_argument(
        "--pipeline",
        type=int,
        metavar="N",
        help="number of steps in one program, which reads and samples the next batches while layers run; "
        "default: 16 on a GPU, 1 elsewhere",
    )
    some.add_argument(
        "--joint",
        action="store_true",
        default=None,
        help="--fan-outs count over all relations together, for graphs with one node type; default for stdlib and RDF",
    )
    some.add_argument("--place", choices=PLACES, help="place of edges and features; split: most used rows on device")
    some.add_argument("--device-bytes", type=float, metavar="B", help="with --place split: bytes on the device")
    some.add_argument("--feature-dtype", choices=FEATURE_DTYPES, help="dtype of the feature tables")
    some.add_argument(
        "--offload",
        action="store_true",
        default=None,
        help="keep layers' inputs in host memory until backward",
    )
    some.add_argument(
        "--sigmas",
        type=float,
        help="arrays of a sample hold the mean number of nodes plus SIGMAS standard deviations; default: 5",
    )
    some.add_argument("--mesh", type=int, metavar="N", help="devices over which the nodes of a step are divided")
    some.add_argument("--parts", type=int, metavar="N", help="number of parts in which a step samples; default: --mesh")
    some.add_argument(
        "--inference",
        choices=("layers", "sampled"),
        help="final evaluation: layer by layer from all neighbours, or on samples (default if edges have times "
        "or weights)",
    )
    some.add_argument(
        "--negatives",
        type=int,
        metavar="N",
        help="wrong ends (negatives) of an edge; default: 128, tables: 4",
    )
    some.add_argument("--negative-kind", choices=NEGATIVES, help="how negatives are drawn; default: uniform")
    some.add_argument("--loss", choices=LOSSES, help="loss of link prediction; default: softmax")
    some.add_argument(
        "--reciprocal",
        action=argparse.BooleanOptionalAction,
        help="predict heads by a second vector of a relation",
    )
    some.add_argument("--n3", type=float, help="weight of the nuclear 3-norm of an edge's vectors in the loss")
    some.add_argument("--eval-edges", type=int, metavar="N", help="number of validation edges in an evaluation; 0: all")


def _add_tables(p: argparse.ArgumentParser) -> None:
    some = p.add_argument_group("tables")
    some.add_argument("--target", metavar="TASK", help="name of the task in the configuration; default: the only one")
    some.add_argument(
        "--uniform",
        dest="recent",
        action="store_false",
        default=None,
        help="sample at random from all edges before the cutoff, instead of the latest ones",
    )
    some.add_argument("--numbers", choices=NUMBERS, help="encoding of numbers; default: piecewise")
    some.add_argument("--bins", type=int, metavar="N", help="quantiles of the encoding piecewise; default: 16")
    some.add_argument("--class-weights", choices=CLASS_WEIGHTS, help="weights of classes in the loss; default: none")
    some.add_argument(
        "--eval-rows", type=int, metavar="N", help="number of validation examples in an evaluation; 0: all"
    )
    some.add_argument(
        "--top",
        type=int,
        metavar="K",
        help="link tasks: number of candidates that predictions list for each example; default: 10",
    )
    some.add_argument(
        "--importance",
        type=int,
        default=2000,
        metavar="N",
        help="number of validation examples for the importance of columns and relations in the report; 0: none; "
        "default: 2000",
    )
    some.add_argument(
        "--predictions", choices=("csv", "parquet"), default="csv", help="format of predictions; default: csv"
    )
    some.add_argument(
        "--at",
        metavar="TIME",
        help="with --evaluate: write predictions for all rows of the entity table that are known at this time",
    )


def _add_run(p: argparse.ArgumentParser) -> None:
    out = p.add_argument_group("results")
    out.add_argument(
        "--out", metavar="DIR", help="folder for results, plot and checkpoints; default: out/<dataset>-<model>[-<task>]"
    )
    out.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out; its results are those of a run without a break",
    )
    out.add_argument(
        "--evaluate",
        metavar="CHECKPOINT",
        help="train nothing; print the results of a run's folder, or of a seed in it",
    )
    out.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="number of steps between two checkpoints; default: one every half minute; a seed ends with one, too",
    )
    out.add_argument(
        "--export",
        action="store_true",
        help="--links: write the vectors of entities and relations, with their names, to embeddings-seed*.npz",
    )
    out.add_argument("--no-checkpoints", action="store_true", help="write no checkpoints")


def settings_of(
    args: argparse.Namespace, configured: Mapping[str, Any] | None = None, examples: int | None = None
) -> Settings:
    """The settings that the arguments name; those of a configuration where they say nothing.

    Args:
        args: the arguments that `parser` has parsed.
        configured: fields of `Settings`, "dataset" among them.
        examples: as `resolve`.

    Raises:
        ValueError: a value out of range, an option of another task, or a configured name that is no setting.
    """
    flags = [flag for flag in ("sampled", "links", "tables") if getattr(args, flag)]
    if len(flags) > 1:
        raise ValueError(
            f"--{flags[0]} and --{flags[1]} must not be given together, because both train on mini-batches, got both; "
            "leave one of them out"
        )
    task = {"sampled": "samples"}.get(flags[0], flags[0]) if flags else "nodes"
    given = {name: getattr(args, name) for name in Settings.__dataclass_fields__ if hasattr(args, name)}
    given["parts"] = args.parts or args.mesh
    given["device_bytes"] = None if args.device_bytes is None else int(args.device_bytes)
    if args.fan_outs is not None:
        try:
            given["fan_outs"] = tuple(int(k) for k in args.fan_outs.split(","))
        except ValueError:
            raise ValueError(f"--fan-outs must be integers with commas, as 10,5, got {args.fan_outs!r}") from None
    named = {**given, "inference": args.inference, "at": args.at}
    for option, value in named.items():
        tasks = _tasks(option)
        if value is not None and task not in tasks:
            flag = {"reverse": "--no-reverse", "recent": "--uniform"}.get(option, f"--{option.replace('_', '-')}")
            raise ValueError(f"{flag} must be given only {' or '.join(_FLAGS[t] for t in tasks)}; leave it out")
    for option in configured or ():
        if option not in Settings.__dataclass_fields__ or task not in tasks_of(option):
            raise ValueError(
                f"settings of a configuration must be those of the task {task!r}, got {option!r}; leave it out"
            )
    given = {**(configured or {}), **{option: value for option, value in given.items() if value is not None}}
    name, model = given.pop("dataset", None), given.pop("model", "rgcn")
    # A folder of somebody's own has the defaults of no data set.
    name = name or ("folder" if args.data and task != "nodes" else DEFAULT_DATASET)
    return resolve(name.lower(), model, task=task, examples=examples, **given)
