"""A run: steps in pipelined programs, progress, evaluation, checkpoints, and the same numbers after a resume."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._optional import optional
from dejax.minibatch import (
    HeteroTopology,
    MiniBatch,
    SampledBlocks,
    find_capacities,
    pipelined_steps,
    sample_blocks,
    sampled_step,
    seed_batches,
    step_keys,
)
from dejax.offload import offload
from dejax.training.igb import model
from dejax.training.igb.data import IGBData
from dejax.training.igb.model import SEED_TYPE, RGATConfig

with optional("optax", of="dejax.training"):
    import optax

CHECKPOINT, SETTINGS, RESULTS = "checkpoint.npz", "settings.json", "results.json"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run does; two runs of one recipe and data give the same losses.

    Attributes:
        batch: seeds of a step.
        fan_outs: of each hop and relation.
        rate: learning rate of Adam.
        pipeline: steps of one program; 0 for single steps.
        seed: of parameters, order and samples.
        sigmas: standard deviations that arrays of samples have above the mean.
        offload: whether residuals of the layers lie in host memory between forward and backward.
    """

    batch: int = 1024
    fan_outs: tuple[int, ...] = (15, 10, 5)
    rate: float = 1e-3
    pipeline: int = 32
    seed: int = 0
    sigmas: float = 5.0
    offload: bool = False


@dataclass(slots=True)
class Curves:
    """Loss of each step; validation accuracy after some; seconds of the steps that were measured."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    measured: int = 0


class Trainer:
    """The jitted functions of a run.

    Args:
        data: the graph.
        config: the model.
        recipe: the run.

    Attributes:
        capacities: the bounds of samples.
        steps: the training function of one step, or of `recipe.pipeline`.
        one: the training function of one step.
    """

    def __init__(self, data: IGBData, config: RGATConfig, recipe: Recipe) -> None:
        self.data, self.config, self.recipe = data, config, recipe
        self.optimizer = optax.adam(recipe.rate)
        rng = np.random.default_rng([recipe.seed, 11])
        batches = [(SEED_TYPE, rng.choice(data.train, recipe.batch).astype(np.int32)) for _ in range(20)]
        self.capacities = find_capacities(
            jax.random.key(recipe.seed),
            data.topology,
            batches,
            list(recipe.fan_outs),
            sigmas=recipe.sigmas,
            print_table=None,
        )
        dtype = config.dtype
        self.one = sampled_step(self.update, self.sample, dtype=dtype, joined=True)
        pipelined = pipelined_steps(self.update, self.sample, dtype=dtype, joined=True)
        self.steps = pipelined if recipe.pipeline else self.one
        self._correct = jax.jit(self._num_correct)

    def init(self) -> dict[str, Any]:
        """The state before the first step."""
        params = jax.jit(lambda key: model.init(key, self.config))(jax.random.key(self.recipe.seed))
        return {"params": params, "moments": self.optimizer.init(params)}

    def sample(self, key: Array, topology: HeteroTopology, seeds: Array) -> SampledBlocks:
        fan_outs = list(self.recipe.fan_outs)
        return sample_blocks(key, topology, (SEED_TYPE, seeds), fan_outs, capacities=self.capacities)

    def logits(self, params: Any, batch: MiniBatch, key: Array | None) -> Array:
        blocks = batch.blocks

        def of(params: Any, x: Any) -> Array:
            positions = batch.sample.seed_positions[SEED_TYPE]
            return model.logits(self.config, params, blocks, x, positions, key)

        return (offload(of) if self.recipe.offload else of)(params, batch.x)

    def update(self, state: dict[str, Any], batch: MiniBatch, labels: Array) -> tuple[dict[str, Any], dict[str, Array]]:
        """A step: loss, gradient, Adam."""
        own = labels[jnp.maximum(batch.seeds, 0)]
        valid = (batch.seeds >= 0) & (own >= 0)

        def loss_of(params: Any) -> Array:
            return model.loss_of(self.logits(params, batch, batch.key), own, valid)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        changes, moments = self.optimizer.update(gradients, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], changes)
        return {"params": params, "moments": moments}, {"loss": loss, "lost": batch.sample.lost.sum()}

    def seeds(self, first: int, count: int) -> np.ndarray:
        """The seeds of some steps: int32[count, batch]. Each epoch has an order of its own."""
        recipe, found, parts = self.recipe, 0, []
        per_epoch = -(-len(self.data.train) // recipe.batch)
        while found < count:
            epoch, at = divmod(first + found, per_epoch)
            batches = seed_batches(self.data.train, recipe.batch, seed=recipe.seed, epoch=epoch)
            parts.append(batches[at : at + count - found])
            found += len(parts[-1])
        return np.concatenate(parts)

    def run(self, state: dict[str, Any], first: int, count: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """`count` steps from step `first` on; results are not waited for."""
        data, key = self.data, jax.random.key(self.recipe.seed + 1)
        keys, seeds = step_keys(key, first, count), jnp.asarray(self.seeds(first, count))
        if self.recipe.pipeline and count == self.recipe.pipeline:
            return self.steps(state, data.topology, data.features, keys, seeds, data.labels)
        outs = []
        for n in range(count):
            state, out = self.one(state, data.topology, data.features, keys[n], seeds[n], data.labels)
            outs.append(out)
        return state, jax.tree.map(lambda *some: jnp.stack(some), *outs)

    def accuracy(self, params: Any, batches: int) -> float:
        """The share of correct validation papers in some sampled batches."""
        data = self.data
        seeds = seed_batches(data.valid, self.recipe.batch, seed=self.recipe.seed)[:batches]
        found = [self._correct(params, data.topology, data.features, jax.random.key(n), jnp.asarray(some), data.labels)
                 for n, some in enumerate(seeds)]  # fmt: skip
        right, valid = (sum(int(x[side]) for x in found) for side in (0, 1))
        return right / max(1, valid)

    def _num_correct(
        self, params: Any, topology: Any, features: Any, key: Array, seeds: Array, labels: Array
    ) -> tuple[Array, Array]:
        sample = self.sample(key, topology, seeds)
        ids = {name: ids for name, ids in sample.node_ids.items() if name in features and ids.shape[0]}
        batch = MiniBatch(sample, features.gather(ids, dtype=self.config.dtype), seeds, key)
        own = labels[jnp.maximum(seeds, 0)]
        valid = (seeds >= 0) & (own >= 0)
        right = self.logits(params, batch, None).argmax(1) == own
        return (right & valid).sum(), valid.sum()


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How long a run is, and what it writes.

    Attributes:
        steps: number of steps in all.
        out: folder for results, plot and the checkpoint; None writes nothing.
        checkpoint: steps between checkpoints; 0: only at the end.
        resume: go on from the checkpoint in `out`.
        eval_batches: validation batches after each report; 0: none.
        report: steps between two reports.
    """

    steps: int
    out: Path | None = None
    checkpoint: int = 0
    resume: bool = False
    eval_batches: int = 0
    report: int = 100


def train(trainer: Trainer, options: RunOptions) -> tuple[dict[str, Any], Curves]:
    """Runs, prints progress, and writes what `options` say. Returns the state and the curves."""
    state, done, curves = trainer.init(), 0, Curves()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.resume:
            state, done, curves = restore(options.out, state, trainer)
        else:
            _write_settings(options.out, trainer)
    per_call = trainer.recipe.pipeline or 1
    reported, saved, warm = done, done, 0
    while done < options.steps:
        count = min(per_call, options.steps - done)
        began = time.perf_counter()
        state, outs = trainer.run(state, done, count)
        losses = np.asarray(outs["loss"])
        seconds = time.perf_counter() - began
        done += count
        curves.loss += [float(value) for value in losses]
        if lost := int(np.asarray(outs["lost"]).sum()):
            print(f"step {done}: {lost} nodes did not fit in the samples' arrays; give a larger --sigmas", flush=True)
        warm += 1
        if warm > 1 and count == per_call:  # the first call compiles
            curves.seconds += seconds
            curves.measured += count
        if done - reported >= options.report or done >= options.steps:
            reported = done
            if options.eval_batches:
                curves.accuracy.append((done, trainer.accuracy(state["params"], options.eval_batches)))
            print(_line(trainer, options, done, losses, seconds / count, curves), flush=True)
        if options.out is not None and options.checkpoint and done - saved >= options.checkpoint:
            saved = done
            save(options.out, state, done, curves)
    if options.out is not None:
        save(options.out, state, done, curves)
    return state, curves


def _line(trainer: Trainer, options: RunOptions, done: int, losses: np.ndarray, seconds: float, curves: Curves) -> str:
    parts = [
        f"step {done}/{options.steps}",
        f"loss {losses.mean():.4f}",
        f"{1e3 * seconds:.1f} ms a step",
        f"{trainer.recipe.batch / seconds:,.0f} seeds/s",
    ]
    if curves.accuracy and curves.accuracy[-1][0] == done:
        parts.append(f"validation {100 * curves.accuracy[-1][1]:.1f} %")
    return ", ".join(parts)


# -------------------------------------------------------------------------------------------- files


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """What a resumed run must share."""
    config = asdict(trainer.config)
    recipe = asdict(replace(trainer.recipe, pipeline=0, offload=False))  # these change no number
    found: dict[str, Any] = json.loads(json.dumps({"data": trainer.data.name, "model": config, "recipe": recipe}))
    return found


def _write_settings(out: Path, trainer: Trainer) -> None:
    (out / SETTINGS).write_text(json.dumps(settings_of(trainer), indent=1) + "\n", encoding="utf-8")


def save(out: Path, state: Any, done: int, curves: Curves) -> None:
    """Writes a checkpoint: to a temporary file that replaces the earlier one."""
    leaves = jax.tree.leaves(state)
    arrays: dict[str, Any] = {f"leaf{n}": np.asarray(leaf) for n, leaf in enumerate(leaves)}
    temporary = out / f"{CHECKPOINT}.part"
    with temporary.open("wb") as file:
        arrays |= {"done": np.int64(done), "curves": np.frombuffer(json.dumps(asdict(curves)).encode(), np.uint8)}
        np.savez(file, **arrays)
    temporary.replace(out / CHECKPOINT)


def check_resume(out: Path, trainer: Trainer) -> None:
    """Whether a run can go on from the checkpoint in a folder.

    Raises:
        FileNotFoundError: no run is there.
        ValueError: it had other settings.
    """
    if not (out / CHECKPOINT).exists():
        raise FileNotFoundError(f"{out} holds no checkpoint to resume from; leave --resume out")
    former = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
    for part, wanted in settings_of(trainer).items():
        if former.get(part) != wanted:
            raise ValueError(
                f"--resume: {part} must be that of the run in {out}, {former.get(part)}, got {wanted}; give the same, "
                "or another --out"
            )


def restore(out: Path, like: Any, trainer: Trainer) -> tuple[Any, int, Curves]:
    """State, finished steps and curves of the run in a folder; raises as `check_resume`."""
    check_resume(out, trainer)
    with np.load(out / CHECKPOINT) as found:
        leaves, treedef = jax.tree.flatten(like)
        restored = [jnp.asarray(found[f"leaf{n}"], leaf.dtype) for n, leaf in enumerate(leaves)]
        curves = json.loads(found["curves"].tobytes())
        curves["accuracy"] = [tuple(point) for point in curves["accuracy"]]
        return jax.tree.unflatten(treedef, restored), int(found["done"]), Curves(**curves)


def table(trainer: Trainer, curves: Curves, total_seconds: float) -> str:
    """The table at the end of a run."""
    data, recipe = trainer.data, trainer.recipe
    nodes, edges = sum(data.topology.num_nodes.values()), sum(data.topology.num_edges.values())
    step = curves.seconds / curves.measured if curves.measured else None
    rows = [
        ("graph", f"{data.name}: {nodes:,} nodes, {edges:,} edges, {len(data.topology.relations)} relations"),
        ("model", f"R-GAT, {trainer.config.layers} layers, {trainer.config.heads} heads, {trainer.config.hidden} wide"),
        ("steps", f"{len(curves.loss):,} of {recipe.batch:,} seeds, fan-out {', '.join(map(str, recipe.fan_outs))}"),
        ("loss", f"{curves.loss[0]:.4f} to {np.mean(curves.loss[-10:]):.4f}" if curves.loss else "-"),
        ("validation", f"{100 * curves.accuracy[-1][1]:.2f} %" if curves.accuracy else "not measured"),
        ("time per step", f"{1e3 * step:.2f} ms, {recipe.batch / step:,.0f} seeds/s" if step else "not measured"),
        ("whole job", f"{total_seconds:.1f} s"),
    ]
    return "\n".join(f"  {name:<15}{value}" for name, value in rows)


def results(trainer: Trainer, curves: Curves, total_seconds: float) -> dict[str, Any]:
    """The results, for JSON."""
    step = curves.seconds / curves.measured if curves.measured else None
    data = trainer.data
    return {
        **settings_of(trainer),
        "nodes": data.topology.num_nodes,
        "edges": {"/".join(edge_type): count for edge_type, count in data.topology.num_edges.items()},
        "pipeline": trainer.recipe.pipeline,
        "loss": curves.loss,
        "accuracy": curves.accuracy,
        "step_ms": None if step is None else 1e3 * step,
        "seeds_per_second": None if step is None else trainer.recipe.batch / step,
        "total_s": total_seconds,
    }


def draw(path: Path, curves: Curves) -> None:
    """The loss by step, and validation accuracy where it was measured."""
    with optional("matplotlib", of="the plot of a training"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(np.arange(1, len(curves.loss) + 1), curves.loss, color="#0072B2", linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy of the seeds")
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    if curves.accuracy:
        right = axes.twinx()
        right.plot(*zip(*((n, 100 * a) for n, a in curves.accuracy), strict=True), color="#D55E00", marker="o")
        right.set_ylabel("validation accuracy, %", color="#D55E00")
    figure.savefig(path)
