"""A run of the decoder's training: batches, progress, checkpoints, exact resume."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from dejax._optional import optional
from dejax.offload import ActivationStore, StackState
from dejax.training.decoder import model
from dejax.training.decoder.config import DecoderConfig
from dejax.training.decoder.step import Recipe, Trainer
from dejax.training.decoder.text import batch_at

SETTINGS_FILE = "settings.json"
_FREE = ("steps", "offload", "state", "gradients", "min_bytes")  # a resumed run may change these


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run writes, and how often.

    Attributes:
        out: folder for losses, settings and checkpoints.
        report: steps between lines.
        checkpoint: steps between checkpoints; 0: none.
        resume: go on from the last checkpoint in `out`.
        seed: of parameters and batches.
        store: folder of a disk tier for activations.
        host_bytes: limit of host memory for activations.
        endurance_bytes: what the drive is rated for; the last report says how long it lasts.
        plot: draw where stored tensors were, to `out`/store.svg, and write `out`/store.trace.json for Perfetto.
    """

    out: Path
    report: int = 20
    checkpoint: int = 100
    resume: bool = False
    seed: int = 0
    store: Path | None = None
    host_bytes: int | None = None
    endurance_bytes: float | None = None
    plot: bool = False


@dataclass
class Progress:
    """One line for a report, written over itself on a terminal.

    Attributes:
        name: of the run.
        steps: of the run.
        tokens: in a step.
        flops: model FLOPs in a step.
        stream: where lines go.
    """

    name: str
    steps: int
    tokens: int
    flops: float
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    _began: float = field(default_factory=time.perf_counter)
    _before: int = 0

    def restart(self, done: int) -> None:
        """Begins to measure at a step."""
        self._began, self._before = time.perf_counter(), done

    def line(self, done: int, loss: float, note: str = "") -> str:
        """The text of a report."""
        seconds = (time.perf_counter() - self._began) / max(1, done - self._before)
        full = int(20 * done / max(1, self.steps))
        bar = "#" * full + "." * (20 - full)
        left = (self.steps - done) * seconds
        speed = f"{self.tokens / seconds:,.0f} tokens/s, {self.flops / seconds / 1e12:,.2f} TFLOP/s"
        rest = f", {left:,.0f} s left" if left >= 1 else ""
        return f"{self.name} [{bar}] step {done:5}  loss {loss:.4f}  {speed}{rest}{note}"

    def report(self, done: int, loss: float, note: str = "") -> None:
        """Writes the line."""
        text = self.line(done, loss, note)
        if self.stream.isatty():
            print(f"\r\x1b[2K{text}", end="\n" if done == self.steps else "", file=self.stream, flush=True)
        else:
            print(text, file=self.stream, flush=True)
        self.restart(done)


def prepare(options: RunOptions, config: DecoderConfig, recipe: Recipe, command: dict[str, Any]) -> None:
    """Makes the folder of a run. Without `resume`, removes the checkpoints of an earlier run.

    Raises:
        ValueError: the folder has checkpoints of something else, or of another model.
    """
    settings, checkpoints = options.out / SETTINGS_FILE, options.out / "checkpoints"
    now = {"model": asdict(config), "recipe": asdict(recipe), "seed": options.seed, "command": command}
    if options.resume and settings.exists():
        check_same(json.loads(settings.read_text(encoding="utf-8")), now, options.out)
    if checkpoints.exists() and not options.resume:
        if not settings.exists():  # perhaps not of this program
            raise ValueError(
                f"--out must be a new folder or one of this example, got {options.out} with checkpoints and no "
                f"{SETTINGS_FILE}; give --resume to continue from them, or another --out"
            )
        shutil.rmtree(checkpoints)
    options.out.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(now, default=str, indent=2) + "\n", encoding="utf-8")


def check_same(former: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    """Raises ValueError where a run goes on with other settings than it began with."""
    for part in ("model", "recipe"):
        for name, value in now[part].items():
            was = former.get(part, {}).get(name, value)
            if name not in _FREE and was != value:
                raise ValueError(
                    f"--resume: `{name}` must be that of the run in {out}, {was!r}, got {value!r}; give the same, or "
                    "another --out"
                )
    was = former.get("seed", now["seed"])
    if was != now["seed"]:
        raise ValueError(
            f"--resume: `seed` must be that of the run in {out}, {was}, got {now['seed']}: batches follow from it"
        )
    states = former.get("recipe", {}).get("state", now["recipe"]["state"]), now["recipe"]["state"]
    if states[0] != states[1] and "device" in states:  # a step layer by layer has its own arrays of state
        raise ValueError(
            f"--resume: `state` may change between 'moments' and 'all' alone, got {states[1]!r} for the run in {out} "
            f"with {states[0]!r}; give the same, or another --out"
        )


class Checkpoints:
    """The last checkpoint of a run, by Orbax: state and losses."""

    def __init__(self, out: Path) -> None:
        with optional("orbax-checkpoint", of="a checkpoint"):
            import orbax.checkpoint as ocp

        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)

    def close(self) -> None:
        """Closes the manager."""
        self._manager.close()

    def save(self, done: int, state: Any, losses: list[float]) -> None:
        """Writes a checkpoint, and removes the one before."""
        save = self._ocp.args
        items = save.Composite(state=save.StandardSave(_plain(state)), losses=save.JsonSave(losses))
        self._manager.save(done, args=items, force=True)

    def restore(self, state: Any) -> tuple[Any, list[float]] | None:
        """The last checkpoint as a state like this one and its losses; None where there is none."""
        last = self._manager.latest_step()
        if last is None:
            return None
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_near(x.sharding)), _plain(state))
        load = self._ocp.args
        items = load.Composite(state=load.StandardRestore(like), losses=load.JsonRestore())
        found = self._manager.restore(last, args=items)
        kept = _lasting(state)
        values = [
            jax.device_put(value, x.sharding)
            for value, x in zip(jax.tree.leaves(found["state"]), jax.tree.leaves(kept), strict=True)
        ]
        restored = jax.tree.unflatten(jax.tree.structure(kept), values)
        if isinstance(state, StackState):
            restored = restored._replace(gradients=state.gradients)
        return restored, list(found["losses"])


def _lasting(state: Any) -> Any:
    """Without the memory for gradients, which a step fills anew."""
    return state._replace(gradients=None) if isinstance(state, StackState) else state


def _plain(state: Any) -> dict[str, Any]:
    return {f"{i:04}": leaf for i, leaf in enumerate(jax.tree.leaves(_lasting(state)))}


def _near(sharding: Any) -> Any:
    kind = next(iter(sharding.device_set)).default_memory().kind
    return sharding.with_memory_kind(kind)


def read_params(out: Path, config: DecoderConfig, trainer: Trainer) -> Any:
    """The parameters of a run's last checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    checkpoints = Checkpoints(out)
    try:
        found = checkpoints.restore(trainer.init(jax.random.key(0)))
    finally:
        checkpoints.close()
    if found is None:
        raise FileNotFoundError(f"{out} must hold a checkpoint; train with --checkpoint first, or name another --out")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.device_put(x, here), trainer.params_of(found[0]))


def train(trainer: Trainer, options: RunOptions, text: bytes, *, name: str = "") -> list[float]:
    """Trains to the recipe's last step; returns the loss of each step, those before a resume included."""
    recipe = trainer.recipe
    losses: list[float] = []
    flops = trainer.config.flops_per_token(recipe.sequence) * recipe.batch * recipe.sequence
    progress = Progress(name, recipe.steps, recipe.batch * recipe.sequence, flops)
    with contextlib.ExitStack() as stack:
        checkpoints = Checkpoints(options.out)
        stack.callback(checkpoints.close)
        state = trainer.init(jax.random.key(options.seed))
        if options.resume and (found := checkpoints.restore(state)) is not None:
            state, losses = found
            print(f"{name} goes on after step {len(losses)}", flush=True)
        store = recording = None
        if recipe.offload in ("inputs", "all"):
            store = stack.enter_context(ActivationStore(options.store, host_bytes=options.host_bytes))
            if options.plot:
                recording = stack.enter_context(store.record())
        pending: list[Any] = []
        progress.restart(len(losses))
        for at in range(len(losses), recipe.steps):
            tokens = batch_at(text, at, seed=options.seed, batch=recipe.batch, sequence=recipe.sequence)
            state, loss = trainer.step(state, trainer.put(tokens))
            pending.append(loss)
            done = at + 1
            if done % options.report == 0 or done == recipe.steps:
                losses += [float(value) for value in jax.device_get(pending)]
                pending = []
                note = "" if store is None else f"  {store.stats().line()}"
                progress.report(done, losses[-1], note + _skipped(state))
            if options.checkpoint and not pending and (done % options.checkpoint == 0 or done == recipe.steps):
                checkpoints.save(done, state, losses)
                progress.restart(done)
        if store is not None:
            print(store.summary(endurance_bytes=options.endurance_bytes))
            if recording is not None:
                recording.stop()
                recording.plot(options.out / "store.svg")
                recording.trace(options.out / "store.trace.json")
    (options.out / "losses.json").write_text(json.dumps({"mode": name, "losses": losses}), encoding="utf-8")
    return losses


def _skipped(state: Any) -> str:
    """How many steps layer by layer were skipped because gradients were not finite, if any were."""
    count = int(state.skipped) if isinstance(state, StackState) else 0
    return f"  {count} steps skipped: gradients not finite" if count else ""


def sample(params: Any, config: DecoderConfig, prompt: bytes, *, length: int, seed: int, temperature: float) -> bytes:
    """Text that continues a prompt."""
    from dejax.training.decoder.sampling import generate

    tokens = np.frombuffer(prompt, np.uint8).astype(np.int32)[None]
    key = jax.random.key(seed)
    found = generate(params, tokens, key, config=config, length=length, temperature=temperature, top_k=0)
    return bytes(np.asarray(found[0]).clip(0, 255).astype(np.uint8))


def describe(config: DecoderConfig, recipe: Recipe) -> str:
    """One line: parameters, tokens and operations of a step."""
    tokens = recipe.batch * recipe.sequence
    flops = config.flops_per_token(recipe.sequence) * tokens
    return (
        f"{config.num_params:,} parameters: {config.layers} layers, {config.width} wide, {config.heads} heads over "
        f"{config.kv_heads} keys; {tokens:,} tokens and {flops / 1e12:,.3g} TFLOP a step; attention by "
        f"{model.implementation(config, recipe.attention)}"
    )
