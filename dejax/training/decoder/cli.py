"""The command behind `examples/train_gpt.py`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejax._optional import optional
from dejax.training.decoder.config import SIZES, DecoderConfig

# The run without offload that each mode is compared with.
COUNTERPART = {"inputs": "remat", "all": "none"}
_SHAPES = ("layers", "width", "heads", "kv_heads", "head_dim", "hidden")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a GPT on text as bytes, with offload by one flag.")
    group = parser.add_argument_group("model")
    names = ", ".join(f"{name} ({config.num_params / 1e6:,.0f} M)" for name, config in SIZES.items())
    group.add_argument("--size", choices=tuple(SIZES), default="tiny", help=f"parameters: {names}")
    for name in _SHAPES:
        group.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of that of --size")
    group.add_argument("--dtype", help="of the arithmetic: bfloat16, float32; parameters are float32")
    group.add_argument("--attention", choices=("xla", "cudnn"), help="by default cudnn where it works")
    group = parser.add_argument_group("training")
    group.add_argument("--text", type=Path, help="a folder of text; by default the standard library's sources")
    group.add_argument("--batch", type=int, default=8, help="sequences in a step")
    group.add_argument("--sequence", type=int, default=128, help="bytes in a sequence")
    group.add_argument("--steps", type=int, default=200, help="training steps")
    group.add_argument("--accumulate", type=int, default=1, help="parts of a batch, one after the other")
    group.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    group.add_argument("--warmup", type=int, default=20, help="steps of warm-up; a cosine follows")
    group.add_argument("--weight-decay", type=float, default=0.1, help="of AdamW")
    group.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients; 0: no limit")
    group.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--offload",
        choices=("none", "remat", "inputs", "all"),
        default="none",
        help="none: keep residuals; remat: recompute; inputs: store blocks' inputs; all: store all",
    )
    group.add_argument(
        "--state",
        choices=("device", "moments", "all"),
        default="device",
        help="moments, all: Adam's moments, or parameters too, in host memory; each layer is updated in backward",
    )
    group.add_argument(
        "--gradients",
        choices=("freed", "device", "host"),
        default="freed",
        help="with --state moments or all. freed: --clip takes the last step's norm; device, host: kept there, exact",
    )
    group.add_argument("--mesh", type=int, help="devices over which parameters and batches are divided (FSDP)")
    group.add_argument("--store", type=Path, help="a folder for a disk tier of activations")
    group.add_argument("--host-bytes", type=int, help="limit of host memory for activations")
    group.add_argument("--min-bytes", type=int, default=1 << 14, help="smaller tensors stay on the device")
    group.add_argument("--endurance", type=float, help="bytes that the drive of --store is rated for (its TBW)")
    group = parser.add_argument_group("run")
    group.add_argument(
        "--compare", choices=tuple(COUNTERPART), help="train with and without offload, and compare each loss"
    )
    group.add_argument("--out", type=Path, default=Path("out/gpt"), help="folder of checkpoints, curves and plots")
    group.add_argument("--report", type=int, default=20, help="steps between lines")
    group.add_argument("--checkpoint", type=int, default=100, help="steps between checkpoints, a multiple of --report")
    group.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    group.add_argument("--plot-store", action="store_true", help="draw where stored tensors were, to OUT/store.svg")
    group.add_argument("--sample", metavar="PROMPT", help="no training: continue this text from the last checkpoint")
    group.add_argument("--length", type=int, default=200, help="bytes to sample")
    group.add_argument("--temperature", type=float, default=0.8, help="of sampling; 0: the likeliest byte")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in ("batch", "sequence", "accumulate", "report", "checkpoint"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if options.steps < 0:
        parser.error(f"--steps must be at least 0, got {options.steps}")
    if options.checkpoint % options.report:
        parser.error(f"--checkpoint {options.checkpoint} must be a multiple of --report {options.report}")
    stores = options.offload in ("inputs", "all") or options.compare is not None
    if (options.store or options.host_bytes or options.plot_store) and not stores:
        parser.error("--store, --host-bytes and --plot-store need --offload inputs or --offload all")
    if options.store and not options.store.is_dir():
        parser.error(f"--store must be a folder, got {options.store}; create it")
    if options.compare and options.state != "device":
        parser.error(f"--compare must be used with --state device, got {options.state}")
    if options.sample == "":
        parser.error("--sample must be a text of at least one byte, got an empty one")


def config_of(options: argparse.Namespace) -> DecoderConfig:
    """The shapes: those of `--size`, changed by other options.

    Raises:
        ValueError: the shapes do not fit.
    """
    config = SIZES[options.size]
    changes: dict[str, Any] = {name: getattr(options, name) for name in (*_SHAPES, "dtype") if getattr(options, name)}
    if "width" in changes and "head_dim" not in changes:
        heads = changes.get("heads", config.heads)
        if changes["width"] % heads:
            raise ValueError(f"--width {changes['width']} must be a multiple of --heads {heads}, or give --head-dim")
        changes["head_dim"] = changes["width"] // heads
    if "width" in changes and "hidden" not in changes:
        changes["hidden"] = 3 * changes["width"]
    if "heads" in changes and "kv_heads" not in changes and changes["heads"] % config.kv_heads:
        changes["kv_heads"] = changes["heads"]
    return config.replace(**changes)


def plot(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draws losses by step."""
    with optional("matplotlib", of="the plot of a training"):
        import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _train(options: argparse.Namespace, config: DecoderConfig, mode: str, out: Path) -> list[float]:
    from dejax.training.decoder import run, step
    from dejax.training.decoder.text import read_text

    recipe = step.Recipe(
        batch=options.batch,
        sequence=options.sequence,
        steps=options.steps,
        accumulate=options.accumulate,
        rate=options.rate,
        warmup=options.warmup,
        weight_decay=options.weight_decay,
        clip=options.clip,
        offload=mode,
        state=options.state,
        gradients=options.gradients,
        attention=options.attention,
        min_bytes=options.min_bytes,
    )
    mesh = None if options.mesh is None else step.make_mesh(options.mesh)
    where = run.RunOptions(
        out=out,
        report=options.report,
        checkpoint=options.checkpoint,
        resume=options.resume,
        seed=options.seed,
        store=options.store,
        host_bytes=options.host_bytes,
        endurance_bytes=options.endurance,
        plot=options.plot_store,
    )
    trainer = step.make_trainer(config, recipe, mesh=mesh)
    if options.sample is not None:
        params = run.read_params(out, config, trainer)
        how = {"length": options.length, "seed": options.seed, "temperature": options.temperature}
        text = run.sample(params, config, options.sample.encode(), **how)
        print(text.decode("utf-8", errors="replace"))
        return []
    run.prepare(where, config, recipe, vars(options))
    print(run.describe(config, recipe), flush=True)
    return run.train(trainer, where, read_text(options.text), name=mode)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    try:
        config = config_of(options)
        if options.compare is None:
            losses = _train(options, config, options.offload, options.out)
            if losses:
                plot({options.offload: losses}, options.out / "loss.svg")
            return 0
        return _compare(options, config)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


def _compare(options: argparse.Namespace, config: DecoderConfig) -> int:
    # Both programs must use the same kernels and round in the same places: offload changes where fusions end.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true --xla_allow_excess_precision=false"
    )
    names = {COUNTERPART[options.compare]: "without offload", options.compare: "with offload"}
    curves = {name: _train(options, config, mode, options.out / mode) for mode, name in names.items()}
    plot(curves, options.out / "loss.svg")
    without, with_offload = curves.values()
    different = [i for i, (a, b) in enumerate(zip(without, with_offload, strict=True)) if a != b]
    print(
        f"{len(without)} steps, losses that differ: {len(different)}"
        + (f", first at {different[0]}" if different else "")
    )
    return 1 if different else 0
