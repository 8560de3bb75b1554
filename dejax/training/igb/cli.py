"""The command behind `examples/igb_rgat.py`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejax.training.igb.data import NUM_CLASSES, IGBData, folder_data, random_data
from dejax.training.igb.model import RGATConfig
from dejax.training.igb.run import RESULTS, Recipe, RunOptions, Trainer, check_resume, draw, results, table, train


def _fan_outs(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train MLPerf's R-GAT on IGB's heterogeneous graph, in mini-batches.")
    group = parser.add_argument_group("data")
    group.add_argument("--data", type=Path, help="IGB's folder, which has processed/; by default a random graph")
    group.add_argument("--size", help="sub-folder of --data: tiny, small, medium, large or full")
    group.add_argument("--cache", type=Path, help="a folder for the sorted lists of --data")
    group.add_argument("--classes", type=int, choices=(19, NUM_CLASSES), default=NUM_CLASSES, help="labels of --data")
    group.add_argument("--scale", type=float, default=1e-5, help="of the random graph: 1 has 5.5e8 nodes")
    group.add_argument("--width", type=int, default=1024, help="elements of a random row")
    group.add_argument(
        "--dtype",
        choices=("float8_e4m3fn", "int8", "bfloat16", "float32"),
        default="float8_e4m3fn",
        help="of the features' tables",
    )
    group.add_argument("--device-gb", type=float, default=0.0, help="of features on the device: the most visited rows")
    group = parser.add_argument_group("model")
    group.add_argument("--hidden", type=int, default=512, help="width of the layers")
    group.add_argument("--heads", type=int, default=4, help="heads of attention")
    group.add_argument("--dropout", type=float, default=0.2, help="share of features dropped")
    group.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the arithmetic")
    group = parser.add_argument_group("training")
    group.add_argument("--batch", type=int, default=128, help="seeds of a step; MLPerf takes 1,024 a GPU")
    group.add_argument("--fan-outs", type=_fan_outs, default=(15, 10, 5), help="for each relation, by hop")
    group.add_argument("--steps", type=int, default=20, help="training steps")
    group.add_argument("--rate", type=float, default=1e-3, help="learning rate of Adam")
    group.add_argument("--pipeline", type=int, default=0, help="steps of one program whose parts overlap; 0: single")
    group.add_argument("--sigmas", type=float, default=5.0, help="room of samples above the mean size")
    group.add_argument("--offload", action="store_true", help="keep the layers' residuals in host memory")
    group.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    group = parser.add_argument_group("run")
    group.add_argument("--report", type=int, default=10, help="steps between two lines")
    group.add_argument("--eval-batches", type=int, default=1, help="validation batches at each line; 0: none")
    group.add_argument("--out", type=Path, default=Path("out/igb-rgat"), help="results, plot, checkpoint")
    group.add_argument("--checkpoint", type=int, default=0, help="steps between checkpoints; 0: at the end")
    group.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser


def config_of(options: argparse.Namespace, data: IGBData) -> RGATConfig:
    """The model's sizes."""
    return RGATConfig(
        edge_types=data.topology.edge_types,
        node_types=data.topology.node_types,
        in_features=data.width,
        hidden=options.hidden,
        heads=options.heads,
        layers=len(options.fan_outs),
        classes=data.num_classes,
        dropout=options.dropout,
        dtype=options.compute,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = _parser()
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    recipe = Recipe(
        batch=options.batch,
        fan_outs=options.fan_outs,
        rate=options.rate,
        pipeline=options.pipeline,
        seed=options.seed,
        sigmas=options.sigmas,
        offload=options.offload,
    )
    run = RunOptions(
        steps=options.steps,
        out=options.out,
        checkpoint=options.checkpoint,
        resume=options.resume,
        eval_batches=options.eval_batches,
        report=options.report,
    )
    shared: dict[str, Any] = {
        "dtype": options.dtype,
        "device_bytes": int(options.device_gb * 1e9),
        "batch": options.batch,
        "fan_outs": options.fan_outs,
    }
    try:
        if options.data is None:
            data = random_data(options.scale, width=options.width, seed=options.seed, **shared)
        else:
            data = folder_data(
                options.data, size=options.size, num_classes=options.classes, cache=options.cache, **shared
            )
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    print(f"{data.name}: {time.perf_counter() - began:.1f} s to prepare\n{data.features}", flush=True)
    trainer = Trainer(data, config_of(options, data), recipe)
    if options.resume:
        try:
            check_resume(options.out, trainer)
        except (FileNotFoundError, ValueError) as error:
            parser.error(str(error))
    _, curves = train(trainer, run)
    total = time.perf_counter() - began
    print(table(trainer, curves, total))
    (options.out / RESULTS).write_text(json.dumps(results(trainer, curves, total), indent=1) + "\n", encoding="utf-8")
    draw(options.out / "curves.png", curves)
    print(f"  {'files':<15}{options.out}/{RESULTS}, curves.png, checkpoint.npz")
    return 0
