"""The decoder's training with its state on the device and in host memory: losses on the same batches, time of a step.

    python -m benchmarks offload_curves --size 350m --batch 8 --sequence 2048 --steps 200 --out out/curves.json
    python -m benchmarks offload_curves --ways device freed:20      # a way for fewer steps: its time alone
    python -m benchmarks offload_curves --size tiny --batch 4 --sequence 64 --steps 8      # also on a CPU

device  plain autodiff, `optax.clip_by_global_norm`, everything on the device
freed   `stack_step`, moments in host memory, each layer updated in backward, the norm taken from the last step
exact   the same, gradients kept on the device until their norm is known
host    the same, gradients kept in host memory
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import Save

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")  # staging memory is outside of XLA's pool
os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "104")

WAYS: dict[str, dict[str, Any]] = {
    "device": {"state": "device", "offload": "remat"},
    "freed": {"state": "moments"},
    "exact": {"state": "moments", "gradients": "device"},
    "host": {"state": "moments", "gradients": "host"},
}
NAMES = {
    "device": "all on the device",
    "freed": "moments in host memory, last step's norm",
    "exact": "moments in host memory, exact norm",
    "host": "moments and gradients in host memory",
}


def curve(options: argparse.Namespace, way: str, steps: int, text: bytes) -> dict[str, Any]:
    """Losses and times of a way."""
    import jax

    from examples.train_gpt import SIZES, Recipe, batch_at, make_trainer

    recipe = Recipe(batch=options.batch, sequence=options.sequence, steps=options.steps, rate=options.rate, **WAYS[way])
    config = SIZES[options.size]
    trainer = make_trainer(config, recipe)
    begin = time.perf_counter()
    state = jax.block_until_ready(trainer.init(jax.random.key(0)))
    found: dict[str, Any] = {"init_s": time.perf_counter() - begin}
    losses, times = [], []
    for at in range(steps):
        tokens = trainer.put(batch_at(text, at, seed=0, batch=recipe.batch, sequence=recipe.sequence))
        begin = time.perf_counter()
        state, loss = trainer.step(state, tokens)
        losses.append(float(loss))
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[2:] or times)
    flops = config.flops_per_token(recipe.sequence) * recipe.batch * recipe.sequence
    found |= {"ms": 1e3 * seconds, "tflops": flops / seconds / 1e12, "first_s": times[0], "losses": losses}
    stats = jax.devices()[0].memory_stats() or {}
    found["peak_device_gb"] = stats.get("peak_bytes_in_use", 0) / 1e9
    return found


def plot(found: dict[str, Any], path: Path) -> None:
    """Draws the losses of ways that ran all steps, as means of 5 steps, and how far each way is from the first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (above, below) = plt.subplots(2, 1, figsize=(6, 5), sharex=True, height_ratios=(2, 1))
    first, longest = None, max(len(way["losses"]) for way in found.values())
    for (name, way), style in zip(found.items(), ("-", "--", ":", "-."), strict=False):
        if len(losses := np.asarray(way["losses"])) < longest:
            continue
        smooth = np.convolve(losses, np.full(5, 0.2), "valid")
        steps, first = np.arange(3, len(losses) - 1), smooth if first is None else first
        (line,) = above.plot(steps, smooth, style, label=NAMES[name])
        if smooth is not first:
            below.plot(steps, smooth - first[: len(smooth)], style, color=line.get_color())
    above.set_ylabel("loss, nats a byte")
    above.set_ylim(bottom=0)
    above.legend()
    below.axhline(0, color="grey", linewidth=0.5)
    below.set_ylabel("difference")
    below.set_xlabel("step")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="350m", help="size of the model, as in examples/train_gpt.py")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=200, help="steps of each curve")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), help="names, each with :STEPS if it runs fewer")
    parser.add_argument("--plot", type=Path, help="draws the losses")


def run(args: argparse.Namespace, save: Save) -> None:

    import jax

    from examples.train_gpt import read_text

    text = read_text(limit=32 << 20)
    found: dict[str, Any] = {}
    for name in args.ways:
        way, _, steps = name.partition(":")
        try:
            found[way] = curve(args, way, int(steps or args.steps), text)
        except Exception as error:
            found[way] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            print(way, found[way], flush=True)
            continue
        first = next((x for x in found.values() if "losses" in x), found[way])
        pairs = list(zip(found[way]["losses"], first["losses"], strict=False))
        found[way]["largest_difference"] = max(abs(a - b) for a, b in pairs)
        found[way]["over_first"] = found[way]["ms"] / first["ms"]
        last = found[way]["losses"][-1]
        shown = {key: round(value, 4) for key, value in found[way].items() if key != "losses"}
        print(f"{way}: loss {found[way]['losses'][0]:.4f} to {last:.4f}, {shown}", flush=True)
        save({"ways": found})
        jax.clear_caches()
        gc.collect()
    if args.plot:
        plot({name: way for name, way in found.items() if "losses" in way}, args.plot)
