"""What the commands of `training.sampled` and `training.links` share: a trainer's epochs, and the run of one seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._optional import optional
from dejax.datasets._progress import Progress as Bar
from dejax.host_gather import shardings
from dejax.minibatch import HeteroTopology, SampleOptions, find_capacities
from dejax.training.checkpoint import Checkpoints
from dejax.training.commands import SAVE_SECONDS
from dejax.training.fit import Progress
from dejax.training.history import History

with optional("flax", of="dejax.training"):
    from flax import nnx

CAPACITY_BATCHES = 20
MAX_DEGREE = 512  # for a fan-out of -1: a sample has room for this many edges of a node and relation


class BatchTrainer:
    """Epochs of one jitted step on mini-batches. A subclass has the model, the state, the step and its order of seeds.

    Args:
        settings: hyperparameters, with `fan_outs`.

    Attributes:
        inputs: what the step reads and does not change. The subclass sets it.
        steps_per_epoch: steps of a pass over the training data. The subclass sets it.
        num_params: number of parameters of the model, without embeddings.
        compile_seconds: time spent in compilation of training steps so far.
    """

    inputs: Any
    steps_per_epoch: int

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.compile_seconds = 0.0
        self._sample_options = SampleOptions(max_degree=MAX_DEGREE)
        self._step: Any = None

    # --------------------------------------------------------------------------------- what a subclass defines

    def _model(self, key: Array) -> Any:
        raise NotImplementedError

    def step(self, state: Any, inputs: Any, order: Any) -> Any:
        """The state after one step. It runs inside `jax.jit`."""
        raise NotImplementedError

    def order(self, seed: int, epoch: int) -> Any:
        """A pytree of numpy arrays: the seeds of an epoch's steps."""
        raise NotImplementedError

    def evaluated(self, state: Any, epoch: int, last: bool) -> tuple[float, dict[str, float]]:
        """The mean loss of a finished epoch, and its measures by split. `last`: no epoch follows."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------- what it gets

    def _split_model(self) -> None:
        abstract = nnx.eval_shape(lambda: self._model(jax.random.key(0)))
        self._graphdef, params, self._rest = nnx.split(abstract, nnx.Param, ...)
        self.num_params = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))

    def _merged(self, params: Any) -> Any:
        # The streams of keys inside the modules are never read: each call gets its own keys.
        rest = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._rest)
        return nnx.merge(self._graphdef, params, rest)

    def _find_capacities(
        self,
        topology: HeteroTopology,
        batches: Sequence[Any],
        print_table: Callable[[str], None] | None,
        **options: Any,
    ) -> Any:
        return find_capacities(
            jax.random.key(0),
            topology,
            batches,
            list(self.settings.fan_outs),
            print_table=print_table,
            options=self._sample_options,
            **options,
        )

    def run(self, state: Any, seed: int, epochs: int, bar: Bar | None = None) -> Iterator[tuple[Any, Progress | None]]:
        """Trains until `epochs` passes are done.

        Args:
            state: the state to begin with; its arrays are donated.
            seed: of the order of the training data.
            epochs: passes in all, including those of the state.
            bar: a progress bar that counts steps.

        Yields:
            The state after each step, and at the end of an epoch a report with the results of `evaluated`, else None.
        """
        per_epoch, begin = self.steps_per_epoch, time.perf_counter()
        while (done := int(state.step)) < epochs * per_epoch:
            order = jax.tree.map(jnp.asarray, self.order(seed, done // per_epoch))
            train = self._compiled(state, order)
            begin = time.perf_counter() if done % per_epoch == 0 else begin
            for at in range(done + 1, (done // per_epoch + 1) * per_epoch + 1):
                state = train(state, self.inputs, order)
                if bar is not None:
                    bar.update()
                if at % per_epoch:
                    yield state, None
            jax.block_until_ready(state.step)
            seconds, epoch = time.perf_counter() - begin, at // per_epoch
            loss, measures = self.evaluated(state, epoch, last=epoch == epochs)
            yield state, Progress(epoch, np.array([loss], np.float32), measures, seconds)

    def _compiled(self, state: Any, order: Any) -> Any:
        if self._step is None:
            start = time.perf_counter()
            jitted = jax.jit(self.step, donate_argnums=0, out_shardings=shardings(state))
            self._step = jitted.lower(state, self.inputs, order).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._step


def run_seed(
    trainer: Any, checkpoints: Checkpoints | None, seed: int, *, resume: bool, every: int | None
) -> tuple[Any, History]:
    """Trains one seed to the end, with a bar on a terminal, and writes checkpoints.

    Args:
        trainer: a `BatchTrainer` with `init`, `exported` and `imported`.
        checkpoints: the run's; None to write none.
        seed: the seed.
        resume: continue from the seed's checkpoint, if there is one.
        every: steps between two checkpoints; None or 0: half a minute. One is always written at the end.

    Returns:
        The last state, and the seed's curves.
    """
    history, state = History(), trainer.init(seed)
    if resume and checkpoints is not None and checkpoints.latest(seed) is not None:
        plain, curves = checkpoints.restore(seed, trainer.exported(state))
        history = History(**curves)
        state = trainer.imported(plain, seed)
    epochs = trainer.settings.epochs
    total, saved_at = epochs * trainer.steps_per_epoch, time.monotonic()
    with Bar(f"seed {seed}", total, unit="steps") as bar:
        bar.update(int(state.step))
        for now, progress in trainer.run(state, seed, epochs, bar):
            state = now  # the one before is donated
            if progress is not None:
                history.add(progress)
            if checkpoints is None:
                continue
            due = time.monotonic() - saved_at >= SAVE_SECONDS if not every else int(state.step) % every == 0
            if due and int(state.step) < total:
                checkpoints.save(seed, int(state.step), trainer.exported(state), history.as_dict())
                saved_at = time.monotonic()
    if checkpoints is not None and checkpoints.latest(seed) != int(state.step):
        checkpoints.save(seed, int(state.step), trainer.exported(state), history.as_dict())
    return state, history
