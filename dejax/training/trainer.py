"""Training of one model on one data set: a step is a sample, its rows, the layers, and Adam's updates.

A task says what a step sees and what its loss is. The trainer has everything else: the state, the compiled programs of
one or more steps, the epochs, and the state as plain arrays for a checkpoint.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from dejax import _compat
from dejax._optional import optional
from dejax._platform import on_gpu
from dejax.datasets import EntityDataset, HeteroDataset
from dejax.distributed import Part, data_parallel, local, make_mesh, share
from dejax.host_gather import RowGradient, adam, shardings
from dejax.minibatch import FeatureStore, MiniBatch, SampledBlocks, pipelined_steps, sampled_step, step_keys
from dejax.rgnn import Options
from dejax.training.settings import Settings
from dejax.training.state import Epochs, TrainState
from dejax.training.tables.links import table_task
from dejax.training.tasks.links import LinkTask
from dejax.training.tasks.nodes import WholeGraphTask
from dejax.training.tasks.samples import SampledTask
from dejax.training.tasks.task import TrainingTask, World

with optional("optax", of="dejax.training"):
    import optax
with optional("flax", of="dejax.training"):
    from flax import nnx

_PIPELINE = 16  # steps of one program on a GPU


class Trainer:
    """Trains one model on one data set: it has the compiled steps, the epochs, and the evaluation.

    Args:
        settings: task, model and hyperparameters.
        data: the data set: an `EntityDataset` for the task "nodes", otherwise a `HeteroDataset`.
        backend: backend of the compiler: "auto", "pallas" or "xla".
        devices: for the task "samples": number of devices over which the seeds of a step are divided; None means one
            device without a mesh.
        print_table: function that gets a table of the capacities of samples as text; None for no table.
        fitted: for the task "tables": `task.fitted` of the run whose states will be imported, so that columns are
            encoded as in its training, whatever rows the tables have got since; None for a new run.

    Raises:
        ValueError: the data set has nothing to train on, or a setting does not fit it.

    Attributes:
        task: the task object, which defines model, loss and measures.
        num_params: number of parameters of the model, without embeddings.
        compile_seconds: time spent in compilation of steps so far; 0 with several devices.

    >>> from dejax.datasets import load
    >>> from dejax.training import Trainer, resolve
    >>> trainer = Trainer(resolve("stdlib"), load("stdlib"))  # doctest: +SKIP
    >>> for state, report in trainer.run(trainer.init(seed=0), 20):  # doctest: +SKIP
    ...     print(report)
    """

    def __init__(
        self,
        settings: Settings,
        data: EntityDataset | HeteroDataset,
        *,
        backend: str = "auto",
        devices: int | None = None,
        print_table: Callable[[str], None] | None = None,
        fitted: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        options = Options(backend=backend, precision=settings.precision)
        self.mesh = self._mesh(devices)
        self.task: TrainingTask
        if isinstance(data, EntityDataset):
            self.task = WholeGraphTask(settings, data, options)
        else:
            make: dict[str, Callable[..., TrainingTask]]
            make = {"links": LinkTask, "tables": functools.partial(table_task, fitted=fitted)}
            self.task = make.get(settings.task, SampledTask)(settings, data, options, print_table)
        self.world = self.task.world if self.mesh is None else share(self.task.world, self.mesh)
        abstract = nnx.eval_shape(lambda: self.task.model(jax.random.key(0)))
        self._graphdef, params, self._rest = nnx.split(abstract, nnx.Param, ...)
        self.num_params = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
        self.num_embedding_values = settings.hidden * sum(self.task.embedded.values())
        self._optimizer = _optimizer(settings, settings.epochs * self.task.steps_per_epoch)
        self._of_rows = adam(settings.lr)
        # Compiled once for all seeds.
        self._first_params = jax.jit(lambda key: nnx.state(self.task.model(key), nnx.Param))
        self._first_opt_state = jax.jit(lambda params: self._optimizer.init(ravel_pytree(params)[0]))
        self.compile_seconds = 0.0
        self._programs: dict[int, Any] = {}
        self._orders = _DrawnAhead(self.task.order, settings.epochs)

    def _mesh(self, devices: int | None) -> Any:
        settings = self.settings
        if devices is None and settings.parts == 1:
            return None
        if settings.task not in ("samples", "tables") or settings.full_batch:
            raise ValueError(
                "devices (--mesh) must be given only for sampled training (--sampled) without full_batch "
                "(--full-batch), whose steps see the whole graph; leave it out"
            )
        if settings.parts % (devices or 1):
            raise ValueError(f"--parts must be a multiple of --mesh, {devices}, got {settings.parts}")
        return make_mesh(devices or 1)

    # -------------------------------------------------------------------------------------------- state

    def init(self, seed: int) -> TrainState:
        """Makes the state before the first step of the run with this seed."""
        return self._placed(self._begin(seed))

    def _placed(self, state: TrainState) -> TrainState:
        return state if self.mesh is None else share(state, self.mesh, writable=True)

    def _begin(self, seed: int) -> TrainState:
        key, own = jax.random.split(jax.random.key(seed))
        params = self._first_params(key)
        embeddings = FeatureStore()
        for number, (kind, count) in enumerate(self.task.embedded.items()):
            embeddings = embeddings.embedding(kind, count, self.settings.hidden, seed=(seed << 8) + number)
        sums = {"loss": jnp.float32, "weight": jnp.float32, **({"correct": jnp.int32} if self.task.classes else {})}
        return TrainState(
            params=params,
            opt_state=self._first_opt_state(params),
            embeddings=embeddings,
            moments=embeddings.init(self._of_rows),
            step=jnp.zeros((), jnp.int32),
            seed=jnp.uint32(seed),
            key=jax.random.key_data(own),
            sums={name: jnp.zeros((), dtype) for name, dtype in sums.items()},  # arrays of their own, to be donated
            lost=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
        )

    def exported(self, state: TrainState) -> dict[str, Any]:
        """Converts a state to plain arrays, for a checkpoint. Tables become numpy arrays that share their memory.

        The result does not depend on the number of devices. Its "layout" tells the data whose relations, categories and
        classes the parameters are of, uint8[8].
        """
        state = self.on_one_device(state)
        tables = {kind: state.embeddings[kind].table.numpy() for kind in state.embeddings.types}
        moments = {
            kind: {"step": of_type.step, "first": of_type.first.numpy(), "second": of_type.second.numpy()}
            for kind, of_type in state.moments.items()
        }
        plain = {name: getattr(state, name) for name in _PLAIN}
        return {**plain, "tables": tables, "moments": moments, "layout": self._layout}

    @property
    def _layout(self) -> np.ndarray:
        return np.frombuffer(bytes.fromhex(self.task.layout_of_data), np.uint8)

    def imported(self, plain: dict[str, Any]) -> TrainState:
        """Converts the plain arrays of `exported` back to a state.

        Raises:
            ValueError: the arrays are of data with other relations, categories or classes, or another order of them; or
                of another number of nodes. Tables may have grown at their ends.
        """
        if not np.array_equal(plain["layout"], self._layout):
            raise ValueError(
                "the state must be of the data of this trainer, got one of data with other types, relations, columns, "
                "categories or classes, or with another order of them; train again, or give the data of then"
            )
        state = self._begin(int(plain["seed"]))
        moments = {}
        for kind, of_type in state.moments.items():
            own, may_grow = plain["moments"][kind], self.task.may_grow
            parts = (state.embeddings[kind].table, plain["tables"][kind]), (of_type.first, own["first"])
            for table, rows in (*parts, (of_type.second, own["second"])):
                _overwrite(kind, table, np.asarray(rows), may_grow)
            moments[kind] = of_type._replace(step=jnp.asarray(own["step"]))
        # Committed to the device, as results of a step are: what jit has compiled for those serves these, too.
        (device,) = state.step.devices()
        own = jax.tree.map(_compat.own_memory, {name: plain[name] for name in _PLAIN})
        arrays = jax.device_put(own, device)
        return self._placed(TrainState(**arrays, embeddings=state.embeddings, moments=moments))

    def on_one_device(self, state: TrainState) -> TrainState:
        """Copies a state that lies on a mesh to one device."""
        found: TrainState = state if self.mesh is None else local(state)
        return found

    def merged(self, params: Any) -> Any:
        """The model as a Flax module with the parameters `params`, a state of `nnx.Param`."""
        # The streams of keys inside the modules are never read: each call gets its own keys.
        rest = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._rest)
        return nnx.merge(self._graphdef, params, rest)

    # -------------------------------------------------------------------------------------------- a step

    def gradients(
        self, state: TrainState, world: World, sample: SampledBlocks | None, x: Any, seeds: Any, key: Array
    ) -> Part:
        """Computes the loss of some seeds and its gradients for parameters and for the embedding rows that were read.

        Args:
            state: parameters and embeddings.
            world: the data of the run, without the features, which have been read.
            sample: the neighbourhood of the seeds; None means the whole graph.
            x: for each node type float32[nodes, width], the features.
            seeds: the seeds of the step.
            key: random key for dropout.
        """
        view = self.task.view(world.topology, world.data, seeds, sample)
        own = state.embeddings.gather({kind: view.ids[kind] for kind in state.embeddings.types}, dtype=jnp.float32)

        def loss_of(params: Any, own: dict[str, Array]) -> Any:
            return self.task.loss(self.merged(params), view, {**x, **own}, seeds, world.data, key)

        (loss, (weight, counts)), (gradient, of_rows) = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(
            state.params, own
        )
        rows = {kind: RowGradient(view.ids[kind], values) for kind, values in of_rows.items()}
        return Part(loss, gradient, weight, rows, {**counts, "lost": view.lost})

    def updated(self, state: TrainState, mean: Part) -> TrainState:
        """Applies Adam to a state with the mean gradients of a step.

        If they are not finite, the parameters stay as they are; a step without seeds, which fills up a call, changes
        nothing. Adam sees all parameters as one vector: for each of 50 arrays a step would compile and launch eight
        kernels.
        """
        gradient, _ = ravel_pytree(mean.gradients)
        params, unravel = ravel_pytree(state.params)
        weight = jnp.asarray(mean.weight, jnp.float32)
        has_seeds = weight > 0
        finite = jnp.isfinite(mean.loss).all() & jnp.isfinite(gradient).all()
        applied = finite & has_seeds

        def kept(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda x, y: jnp.where(applied, x, y), new, old)

        updates, opt_state = self._optimizer.update(gradient, state.opt_state, params)
        embeddings, moments = state.embeddings, state.moments
        if mean.rows:
            ids = {kind: jnp.where(applied, rows.ids, -1) for kind, rows in mean.rows.items()}  # -1 writes no row
            values = {kind: rows.values for kind, rows in mean.rows.items()}
            embeddings, moments = embeddings.update(self._of_rows, ids, values, moments)
            moments = {kind: m._replace(step=kept(m.step, state.moments[kind].step)) for kind, m in moments.items()}
        counts = {name: count for name, count in mean.counts.items() if name != "lost"}
        of_step = {"loss": jnp.where(applied, mean.loss * weight, 0.0), "weight": weight, **counts}
        first = has_seeds & (state.step % self.task.steps_per_epoch == 0)
        return TrainState(
            params=unravel(kept(optax.apply_updates(params, updates), params)),
            opt_state=kept(opt_state, state.opt_state),
            embeddings=embeddings,
            moments=moments,
            step=state.step + has_seeds,
            seed=state.seed,
            key=state.key,
            sums={name: jnp.where(first, 0, value) + of_step[name] for name, value in state.sums.items()},
            lost=state.lost + mean.counts["lost"],
            skipped=state.skipped + (has_seeds & ~finite),
        )

    def drawn(self, world: World, seeds: Any, key: Array) -> tuple[SampledBlocks | None, Any, Array]:
        """Draws the sample of a step. Returns the sample (None without sampling), its features, and a key for
        dropout.
        """
        if self.task.sampled:
            own, key = jax.random.split(key)
            assert world.topology is not None
            sample = self.task.sample(own, world.topology, seeds)
            ids = {kind: sample.node_ids[kind] for kind in world.features.types if kind in sample.node_ids}
        else:
            sample, ids = None, self.task.view(world.topology, world.data, seeds, None).ids
        x = world.features.gather({kind: ids[kind] for kind in world.features.types if kind in ids}, dtype=jnp.float32)
        return sample, x, key

    def _update(self, state: TrainState, batch: MiniBatch, topology: Any, data: Any) -> tuple[TrainState, Array]:
        """The step of `pipelined_steps`, which has sampled and read the features."""
        world = World(topology, FeatureStore(), data)
        part = self.gradients(state, world, batch.sample, dict(batch.x), batch.seeds, batch.key)
        return self.updated(state, part), part.loss

    def _whole_steps(self, state: TrainState, world: World, keys: Array, seeds: Any) -> tuple[TrainState, Array]:
        """Steps on the whole graph, one after the other in one program."""

        def step(state: TrainState, given: tuple[Array, Any]) -> tuple[TrainState, Array]:
            _, x, key = self.drawn(world, given[1], given[0])
            part = self.gradients(state, world, None, x, given[1], key)
            return self.updated(state, part), part.loss

        return jax.lax.scan(step, state, (keys, seeds))

    # -------------------------------------------------------------------------------------------- programs

    def _steps(self, state: TrainState, keys: Array, seeds: Any) -> tuple[TrainState, Array]:
        """Runs one step for each key; returns the state, and the loss of each step."""
        count, world = keys.shape[0], self.world
        if self.mesh is not None:
            return self._on_mesh(state, keys, seeds)
        arguments: tuple[Any, ...] = (state, world, keys, seeds)
        if self.task.sampled:
            keys, seeds = _of_one(keys, seeds) if count == 1 else (keys, seeds)
            arguments = (state, world.topology, world.features, keys, seeds, world.topology, world.data)
        if count not in self._programs:
            begin = time.perf_counter()
            if self.task.sampled:
                make = pipelined_steps if count > 1 else sampled_step
                traced = make(self._update, self.task.sample, dtype=jnp.float32).trace(*arguments)
            else:
                places = (shardings(state), None)
                traced = jax.jit(self._whole_steps, donate_argnums=0, out_shardings=places).trace(*arguments)
            self._programs[count] = traced.lower().compile()
            self.compile_seconds += time.perf_counter() - begin
        state, losses = self._programs[count](*arguments)
        return state, losses if losses.ndim else losses[None]

    def _on_mesh(self, state: TrainState, keys: Array, seeds: Any) -> tuple[TrainState, Array]:
        count = keys.shape[0]
        if count not in self._programs:

            def gradients(state: TrainState, key: Array, seeds: Any, world: World) -> Part:
                sample, x, key = self.drawn(world, seeds, key)
                return self.gradients(state, world, sample, x, seeds, key)

            self._programs[count] = data_parallel(
                gradients, self.updated, self.mesh, parts=self.settings.parts, steps=count
            )
        keys, seeds = _of_one(keys, seeds) if count == 1 else (keys, seeds)
        state, report = self._programs[count](state, keys, seeds, self.world)
        return state, jnp.reshape(report.loss, (count,))

    @property
    def steps_per_call(self) -> int:
        """Number of steps in one call of the compiled program.

        For a whole graph these are all steps until the next report, otherwise `settings.pipeline` or fewer.
        """
        per_epoch = self.task.steps_per_epoch
        if per_epoch == 1 and not self.task.sampled:
            return self.settings.eval_every
        most = min(self.settings.pipeline or (_PIPELINE if on_gpu() else 1), per_epoch)
        # Calls of one length fill an epoch, the last one with the fewest steps without seeds.
        return min(range(most, most // 2, -1), key=lambda count: -per_epoch % count)

    # -------------------------------------------------------------------------------------------- a run

    def run(self, state: TrainState, epochs: int) -> Iterator[tuple[TrainState, Epochs | None]]:
        """Trains until `epochs` epochs are done.

        Args:
            state: the first state; its arrays are donated.
            epochs: total number of epochs, including those that the state has done.

        Yields:
            After each call of the compiled program a pair: the state, and a report or None. Reports come after each
            epoch; for the task "nodes", where an epoch is one step, after each `settings.eval_every` epochs.
        """
        per_epoch = self.task.steps_per_epoch
        period = per_epoch if per_epoch > 1 else self.settings.eval_every
        losses: list[tuple[Array, int]] = []
        seconds, done = 0.0, int(state.step)
        while done < epochs * per_epoch:
            # Calls end at reports, and reports at multiples of the period, even if a resumed run begins between them.
            end = min((done // period + 1) * period, epochs * per_epoch)
            count = min(self.steps_per_call, end - done)
            width = count if per_epoch == 1 else self.steps_per_call  # so that one program serves all calls
            keys, seeds = step_keys(state.key, done, width), self._seeds(int(state.seed), done, count, width)
            compiled, begin = self.compile_seconds, time.perf_counter()
            state, found = self._steps(state, keys, seeds)
            losses.append((found, count))
            done += count
            jax.block_until_ready(state.step)  # or the caller, who reads the step, would wait outside of the clock
            seconds += time.perf_counter() - begin - (self.compile_seconds - compiled)
            if done < end:
                yield state, None
                continue
            epoch = done // per_epoch
            measures = self.task.measures(self, state, last=epoch == epochs)
            of_steps = [float(value) for some, count in losses for value in np.asarray(some)[:count]]
            loss = of_steps if per_epoch == 1 else [float(state.sums["loss"]) / max(1.0, float(state.sums["weight"]))]
            yield state, Epochs(epoch, loss, measures, seconds)
            losses, seconds = [], 0.0

    def train(self, state: TrainState, epochs: int) -> TrainState:
        """Trains like `run` until `epochs` epochs are done, and returns the state.

        The arrays of `state` are donated.
        """
        for now, _ in self.run(state, epochs):
            state = now
        return state

    def _seeds(self, seed: int, first: int, count: int, width: int) -> Any:
        """The seeds of some steps of one epoch, or of epochs of one step; -1 in steps from `count` to `width`."""
        per_epoch = self.task.steps_per_epoch
        if per_epoch == 1:
            orders = [self.task.order(seed, first + n) for n in range(count)]
            return jax.tree.map(lambda *some: jnp.asarray(np.concatenate(some)), *orders)
        epoch, at = divmod(first, per_epoch)

        def filled(some: Any) -> Array:
            own = np.asarray(some[at : at + count])
            none = np.full((width - count, *own.shape[1:]), -1, own.dtype)
            return jnp.asarray(np.concatenate([own, none]) if width > count else own)

        return jax.tree.map(filled, self._orders(seed, epoch))

    def final(self, state: TrainState, *, inference: str | None = None) -> dict[str, float]:
        """Computes the final results of a state: accuracies of the splits, or ranks of the test edges.

        Args:
            state: the state.
            inference: for the task "samples": "layers" computes all nodes layer by layer from all neighbours; "sampled"
                uses samples. None means "layers", unless edges have times or weights.
        """
        return self.task.final(self, self.on_one_device(state), inference=inference)


class _DrawnAhead:
    """The seeds of an epoch. A thread draws those of the next epoch, while the steps of this one run."""

    def __init__(self, order: Callable[[int, int], Any], epochs: int) -> None:
        self._order, self._epochs = order, epochs
        self._thread = ThreadPoolExecutor(1, "dejax-order")
        self._drawn: dict[tuple[int, int], Future[Any]] = {}

    def __call__(self, seed: int, epoch: int) -> Any:
        wanted = [(seed, n) for n in range(epoch, min(epoch + 2, max(self._epochs, epoch + 1)))]
        held = self._drawn  # another thread may train with another seed
        drawn = {key: held[key] if key in held else self._thread.submit(self._order, *key) for key in wanted}
        self._drawn = drawn
        return drawn[seed, epoch].result()


def _optimizer(settings: Settings, steps: int) -> Any:
    """Adam with decoupled weight decay after clipping; the settings' schedule gives its rate over `steps` steps."""
    rate: Any = settings.lr
    warmup = settings.warmup
    if settings.schedule != "constant":  # which does not depend on the number of steps, so that a run can be lengthened
        warmup = min(warmup, steps // 8)
    rest = max(1, steps - warmup)
    if settings.schedule == "cosine":
        rate = optax.cosine_decay_schedule(settings.lr, rest)
    elif settings.schedule == "linear":
        rate = optax.linear_schedule(settings.lr, 0.0, rest)
    if warmup:
        after = rate if callable(rate) else optax.constant_schedule(rate)
        rising = optax.linear_schedule(0.0, settings.lr, warmup)
        rate = optax.join_schedules([rising, after], [warmup])
    adamw = optax.adamw(rate, weight_decay=settings.weight_decay)
    return optax.chain(optax.clip_by_global_norm(settings.clip), adamw) if settings.clip else adamw


_PLAIN = ("params", "opt_state", "step", "seed", "key", "sums", "lost", "skipped")


def _of_one(keys: Array, seeds: Any) -> tuple[Array, Any]:
    """The key and the seeds of a program of one step, which has no axis of steps."""
    return keys[0], jax.tree.map(lambda x: x[0], seeds)


def _overwrite(kind: str, table: Any, rows: np.ndarray, may_grow: bool) -> None:
    # Orbax compares no shapes of numpy arrays.
    if len(table) and rows.shape != table.shape and not (may_grow and rows.shape[0] < len(table)):
        raise ValueError(
            f"the state must be of the data of this trainer, got {rows.shape[0]:,} rows of {kind!r}, and the data have "
            f"{len(table):,}; train again, or give the data of then"
        )
    if len(table):
        table.write(0, rows)
