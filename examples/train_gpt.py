"""Train a GPT on the source code of Python's standard library; one flag offloads its activations.

    python examples/train_gpt.py                                     # a small model, a few minutes on a CPU
    python examples/train_gpt.py --offload inputs --out out/inputs   # blocks' inputs in host memory
    python examples/train_gpt.py --offload all --out out/all         # all residuals in host memory
    python examples/train_gpt.py --offload all --out out/disk --store DIR --host-bytes 1000000000  # the rest on disk
    python examples/train_gpt.py --compare inputs --out out/compare  # with and without: the same losses, one plot

The text is the bytes of the library's modules, which every machine has. The model is Flax nnx with `jax.lax.scan` over
the blocks. A run writes OUT/losses.json, OUT/loss.svg, OUT/settings.json and checkpoints. `--resume` continues from the
last checkpoint; without it a run replaces the earlier one in OUT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

MODES = ("none", "remat", "inputs", "all")
# The run without offload that each mode is compared with.
COUNTERPART = {"inputs": "remat", "all": "none"}


def read_text(limit: int | None = None) -> bytes:
    """The bytes of the standard library's modules, concatenated."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts))
    text = b"".join(path.read_bytes() for path in files)
    if len(text) < 1 << 20:
        raise SystemExit(
            f"train_gpt: {root} must have 1 MiB of modules or more, got {len(text)} bytes; install Python's sources"
        )
    return text[:limit]


def make_model(options: argparse.Namespace) -> Any:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    dtype = jnp.dtype(options.dtype)
    width, heads = options.width, options.heads

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            linear = {"use_bias": False, "dtype": dtype, "rngs": rngs}
            self.norm_attention = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.qkv = nnx.Linear(width, 3 * width, **linear)
            self.out = nnx.Linear(width, width, **linear)
            self.norm_mlp = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, **linear)
            self.down = nnx.Linear(4 * width, width, **linear)

        def __call__(self, x: jax.Array) -> jax.Array:  # [batch, sequence, width]
            q, k, v = jnp.split(self.qkv(self.norm_attention(x)), 3, axis=-1)
            q, k, v = (part.reshape(*x.shape[:2], heads, width // heads) for part in (q, k, v))
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=options.attention)
            x = x + self.out(mixed.reshape(x.shape))
            return x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))

    class GPT(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(256, width, dtype=dtype, rngs=rngs)
            self.positions = nnx.Embed(options.sequence, width, dtype=dtype, rngs=rngs)
            self.blocks = nnx.split_rngs(splits=options.layers)(nnx.vmap(Block))(rngs)
            self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

        def __call__(self, tokens: jax.Array, call: Callable[..., jax.Array]) -> jax.Array:
            graph, stacked = nnx.split(self.blocks)
            x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
            x, _ = jax.lax.scan(lambda x, state: (call(nnx.merge(graph, state), x), None), x, stacked)
            return self.embed.attend(self.norm(x)).astype(jnp.float32)

    return GPT(nnx.Rngs(options.seed)), Block


def make_step(block: Any, mode: str, min_bytes: int) -> Callable[..., Any]:
    import jax
    import optax
    from flax import nnx

    from dejax.offload.nnx import offload

    call = block.__call__
    if mode in ("remat", "inputs"):
        call = nnx.remat(call)
    if mode in ("inputs", "all"):
        call = offload(call, min_bytes=min_bytes)  # the one line

    @nnx.jit
    def step(model: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
        def loss(model: Any) -> jax.Array:
            logits = model(tokens[:, :-1], call)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    return step


def batches(text: bytes, options: argparse.Namespace, first: int) -> Iterator[Any]:
    """Random windows. They depend only on the seed and the step, so that a resumed run draws the same."""
    import numpy as np

    data = np.frombuffer(text, np.uint8)
    for step in range(first, options.steps):
        rng = np.random.default_rng((options.seed, step))
        begins = rng.integers(0, len(data) - options.sequence - 1, options.batch)
        yield np.stack([data[b : b + options.sequence + 1] for b in begins]).astype(np.int32)


def prepare(out: Path, options: argparse.Namespace) -> None:
    """Makes the folder of a run. Without `--resume`, removes the checkpoints of an earlier run."""
    settings, checkpoints = out / "settings.json", out / "checkpoints"
    if checkpoints.exists() and not options.resume:
        if not settings.exists():  # perhaps not of this example
            raise SystemExit(
                f"train_gpt: --out must be a new folder or one of this example, got {out} with checkpoints and no "
                "settings.json; give --resume to continue from them, or another --out"
            )
        shutil.rmtree(checkpoints)
    out.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(vars(options), default=str, indent=2) + "\n")


def train(options: argparse.Namespace, mode: str, out: Path) -> list[float]:
    """Trains, and returns the loss of each step."""
    import jax
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx

    from dejax.offload import ActivationStore

    model, block = make_model(options)
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.rate, 20, max(21, options.steps))
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.1), wrt=nnx.Param)
    step = make_step(block, mode, options.min_bytes)
    losses: list[float] = []
    settings = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(ocp.CheckpointManager((out / "checkpoints").absolute(), options=settings))
        state = nnx.state((model, optimizer))
        if options.resume and (last := checkpoints.latest_step()) is not None:
            items = ocp.args.Composite(
                state=ocp.args.StandardRestore(nnx.to_pure_dict(state)), losses=ocp.args.JsonRestore()
            )
            found = checkpoints.restore(last, args=items)
            nnx.replace_by_pure_dict(state, found["state"])
            nnx.update((model, optimizer), state)
            losses = list(found["losses"])
            print(f"{mode:6} goes on after step {len(losses)}", flush=True)
        if mode in ("inputs", "all"):
            store = stack.enter_context(ActivationStore(options.store, host_bytes=options.host_bytes))
        pending: list[Any] = []
        begin = time.perf_counter()
        for tokens in batches(read_text(), options, len(losses)):
            pending.append(step(model, optimizer, tokens))
            done = len(losses) + len(pending)
            last_one = done == options.steps
            if done % options.report == 0 or last_one:
                losses += [float(value) for value in jax.device_get(pending)]
                rate = len(pending) * options.batch * options.sequence / (time.perf_counter() - begin)
                print(f"{mode:6} step {done:5}  loss {losses[-1]:.4f}  {rate:,.0f} tokens/s", flush=True)
                pending = []
                begin = time.perf_counter()
            if options.checkpoint and not pending and (done % options.checkpoint == 0 or last_one):
                state = nnx.to_pure_dict(nnx.state((model, optimizer)))
                items = ocp.args.Composite(state=ocp.args.StandardSave(state), losses=ocp.args.JsonSave(losses))
                checkpoints.save(done, args=items, force=True)
                begin = time.perf_counter()
        if mode in ("inputs", "all"):
            print(store.summary())
    (out / "losses.json").write_text(json.dumps({"mode": mode, "losses": losses}))
    return losses


def plot(curves: dict[str, Sequence[float]], path: Path) -> None:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--offload",
        choices=MODES,
        default="none",
        help="none: keep residuals; remat: recompute; inputs: store blocks' inputs; all: store all",
    )
    parser.add_argument(
        "--compare", choices=tuple(COUNTERPART), help="train with and without offload, and compare each loss"
    )
    parser.add_argument("--store", type=Path, help="a folder for a disk tier; by default host memory only")
    parser.add_argument("--host-bytes", type=int, help="limit of host memory for activations")
    parser.add_argument("--min-bytes", type=int, default=1 << 14, help="smaller tensors stay on the device")
    sizes = {"layers": 4, "width": 128, "heads": 4, "sequence": 128, "batch": 8, "steps": 200, "seed": 0}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--dtype", default="float32", help="dtype of the arithmetic; parameters are float32")
    parser.add_argument("--attention", choices=("xla", "cudnn"), default="xla")
    parser.add_argument("--out", type=Path, default=Path("out/gpt"))
    parser.add_argument("--report", type=int, default=20, help="steps between lines")
    parser.add_argument(
        "--checkpoint", type=int, default=100, help="steps between checkpoints, a multiple of --report; 0: none"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} must be a multiple of --heads {options.heads}")
    if options.checkpoint % options.report:
        parser.error(f"--checkpoint {options.checkpoint} must be a multiple of --report {options.report}")
    stores = options.offload in ("inputs", "all") or options.compare is not None
    if (options.store or options.host_bytes) and not stores:
        parser.error("--store and --host-bytes need --offload inputs or --offload all")
    if options.store and not options.store.is_dir():
        parser.error(f"--store must be a folder, got {options.store}; create it")
    if options.compare is None:
        prepare(options.out, options)
        losses = train(options, options.offload, options.out)
        plot({options.offload: losses}, options.out / "loss.svg")
        return 0
    # Both programs must use the same kernels and round in the same places: offload changes where fusions end.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true --xla_allow_excess_precision=false"
    )
    names = {COUNTERPART[options.compare]: "without offload", options.compare: "with offload"}
    for mode in names:
        prepare(options.out / mode, options)
    curves = {name: train(options, mode, options.out / mode) for mode, name in names.items()}
    plot(curves, options.out / "loss.svg")
    without, with_offload = curves.values()
    different = [i for i, (a, b) in enumerate(zip(without, with_offload, strict=True)) if a != b]
    print(
        f"{len(without)} steps, losses that differ: {len(different)}"
        + (f", first at {different[0]}" if different else "")
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
