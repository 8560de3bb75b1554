"""Full-batch training of one model: one jitted function for several epochs, and one for the accuracies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._optional import optional
from dejax._pytrees import pytree
from dejax.datasets import EntityDataset
from dejax.rgnn import Options, RelGraph
from dejax.training.data import SPLITS, needs_reverse, split_nodes
from dejax.training.models import EntityClassifier, NodeMLP
from dejax.training.settings import Settings

with optional("optax", of="dejax.training"):
    import optax
with optional("flax", of="dejax.training"):
    from flax import nnx


@pytree
@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of a step. They are arguments of the jitted functions, so that no array becomes a constant.

    Attributes:
        graph: with reverse relations.
        features: float32 [num_nodes, d], or None.
        nodes: by split, int32 [size], ids of its nodes.
        labels: by split, int32 [size], classes of its nodes.
    """

    graph: RelGraph
    features: Array | None
    nodes: dict[str, Array]
    labels: dict[str, Array]


@pytree
@dataclass(frozen=True, slots=True)
class TrainState:
    """The state that changes from step to step. A run resumes from it.

    Attributes:
        params: the model's parameters, an nnx.State.
        opt_state: the state of Adam.
        epoch: int32 scalar, number of finished steps.
        key: uint32 [2], the run's random key as plain integers. Epoch e draws dropout from `fold_in(key, e)`, so that
            a resumed run draws the same.

    >>> from dejax.datasets import load
    >>> from dejax.training import Trainer, resolve
    >>> trainer = Trainer(resolve("stdlib"), load("stdlib"))  # doctest: +SKIP
    >>> state = trainer.init(seed=0)  # doctest: +SKIP
    >>> int(state.epoch)  # doctest: +SKIP
    """

    params: Any
    opt_state: Any
    epoch: Array
    key: Array


@dataclass(frozen=True, slots=True)
class Progress:
    """What `Trainer.run` reports after each piece of work.

    Attributes:
        epoch: number of finished steps.
        loss: float32 [epochs of this piece], loss of the training nodes before each step.
        accuracy: by split, after the last step, without empty splits.
        seconds: time of the steps, without the evaluation.
    """

    epoch: int
    loss: np.ndarray
    accuracy: dict[str, float]
    seconds: float


class Trainer:
    """Training of one model on one data set.

    Args:
        settings: model and hyperparameters.
        data: the data set.
        backend: backend of the compiler: "auto", "pallas" or "xla".

    Raises:
        ValueError: the data set has no task, or the held-out share leaves no training node.

    Attributes:
        batch: the graph and the splits on the device.
        num_params: number of parameters of the model.
        compile_seconds: time spent in compilation so far.

    >>> from dejax.datasets import load
    >>> from dejax.training import Trainer, resolve
    >>> trainer = Trainer(resolve("stdlib"), load("stdlib"))  # doctest: +SKIP
    >>> for state, progress in trainer.run(trainer.init(seed=0), 20):  # doctest: +SKIP
    ...     print(progress)
    """

    def __init__(self, settings: Settings, data: EntityDataset, *, backend: str = "auto") -> None:
        if not data.num_classes or not len(data.train_nodes):
            raise ValueError(f"dataset {data.name!r} has no labelled nodes to train on; choose one with a task")
        self.settings, self.data = settings, data
        self.options = Options(backend=backend, precision=settings.precision)
        # RGAT has no root weight. A node sees its own value through a self loop, which is one more relation.
        graph = data.graph(add_reverse=needs_reverse(data), add_self_loops=settings.model == "rgat")
        features = None if settings.featureless or data.features is None else jnp.asarray(data.features)
        splits = split_nodes(data, settings.holdout, settings.fold)
        self.batch = Batch(
            graph,
            features,
            {name: jnp.asarray(nodes) for name, nodes in splits.items()},
            {name: jnp.asarray(data.labels[nodes]) for name, nodes in splits.items()},
        )
        self._splits = tuple(name for name in SPLITS if len(splits[name]))
        abstract = nnx.eval_shape(lambda: self._model(jax.random.key(0)))
        self._graphdef, params, self._rest = nnx.split(abstract, nnx.Param, ...)
        self.num_params = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
        self._optimizer = optax.adam(settings.lr)
        self.compile_seconds = 0.0
        self._compiled: dict[Any, Any] = {}

    def _model(self, key: Array) -> nnx.Module:
        rngs = nnx.Rngs(key)
        width = None if self.batch.features is None else self.batch.features.shape[1]
        if self.settings.model == "mlp":
            return NodeMLP(self.settings, self.batch.graph, width, self.data.num_classes, rngs=rngs)
        classes = self.data.num_classes
        return EntityClassifier(self.settings, self.batch.graph, width, classes, options=self.options, rngs=rngs)

    def init(self, seed: int) -> TrainState:
        """The state before the first step of the run with this seed."""
        return self._compile("init", self._begin, jnp.uint32(seed))(jnp.uint32(seed))

    def abstract_state(self) -> TrainState:
        """A state's shapes and dtypes, as `jax.ShapeDtypeStruct`."""
        return jax.eval_shape(self._begin, jnp.uint32(0))

    def _begin(self, seed: Array) -> TrainState:
        key, dropout_key = jax.random.split(jax.random.key(seed))
        params = nnx.state(self._model(key), nnx.Param)
        raw = jax.random.key_data(dropout_key)
        return TrainState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32), raw)

    def logits(self, params: Any, batch: Batch, key: Array | None = None) -> Array:
        """Class logits of every node, [num_nodes, num_classes]; with dropout if `key` is given."""
        model = nnx.merge(self._graphdef, params, self._dummy_rest())
        rngs = None if key is None else nnx.Rngs(dropout=key)
        return model(batch.graph, batch.features, deterministic=key is None, rngs=rngs)

    def _dummy_rest(self) -> Any:
        # The streams of keys inside the modules are never read: each call gets its own keys.
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._rest)

    def loss(self, params: Any, batch: Batch, key: Array | None = None) -> Array:
        """Mean cross-entropy of the training nodes, and the penalty on the first layer."""
        logits = self.logits(params, batch, key)[batch.nodes["train"]]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels["train"]).mean()
        if self.settings.l2:
            matrices = [p for p in jax.tree.leaves(params["layers"][0]) if p.ndim >= 2]
            loss += self.settings.l2 * sum(jnp.sum(jnp.square(p)) for p in matrices)
        return loss

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Array]:
        """One epoch: the loss before it, its gradient, Adam's update."""
        key = None
        if self.settings.dropout:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.epoch)
        loss, gradients = jax.value_and_grad(self.loss)(state.params, batch, key)
        updates, opt_state = self._optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.epoch + 1, state.key), loss

    def num_correct(self, params: Any, batch: Batch) -> dict[str, Array]:
        """Number of nodes of each split whose class has the largest logit, int32."""
        best = self.logits(params, batch).argmax(-1)
        return {name: jnp.sum(best[batch.nodes[name]] == batch.labels[name]) for name in self._splits}

    def accuracy(self, params: Any) -> dict[str, float]:
        """The share of correct nodes of each split, without empty splits."""
        correct = self._compile("num_correct", self.num_correct, params, self.batch)(params, self.batch)
        return {name: int(correct[name]) / len(self.batch.labels[name]) for name in self._splits}

    def compiled_epochs(self, state: TrainState, count: int) -> Callable[[TrainState, Batch], tuple[TrainState, Array]]:
        """A compiled function of (state, batch) that takes `count` steps. It donates the state's arrays.

        Returns:
            A function that returns the new state and the loss before each step, float32 [count].
        """

        def epochs(state: TrainState, batch: Batch) -> tuple[TrainState, Array]:
            return jax.lax.scan(lambda s, _: self.step(s, batch), state, length=count)

        return self._compile(("epochs", count), epochs, state, self.batch, donate=(0,))

    def run(self, state: TrainState, epochs: int) -> Iterator[tuple[TrainState, Progress]]:
        """Trains until `epochs` steps are done, `settings.eval_every` at a time.

        Args:
            state: the state to begin with; its arrays are donated.
            epochs: number of steps in all, including the finished steps of the state.

        Yields:
            The state and a report: once at the beginning (accuracies only), and after each piece.
        """
        done = int(state.epoch)
        yield state, Progress(done, np.zeros(0, np.float32), self.accuracy(state.params), 0.0)
        while done < epochs:
            # Pieces end at multiples of eval_every, even if a resumed run begins between two of them.
            count = min(self.settings.eval_every - done % self.settings.eval_every, epochs - done)
            train = self.compiled_epochs(state, count)  # compile before the clock starts
            start = time.perf_counter()
            state, loss = train(state, self.batch)
            loss.block_until_ready()
            seconds = time.perf_counter() - start
            done += count
            yield state, Progress(done, np.asarray(loss), self.accuracy(state.params), seconds)

    def _compile(self, name: Any, function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Any:
        if name not in self._compiled:
            start = time.perf_counter()
            self._compiled[name] = jax.jit(function, donate_argnums=donate).lower(*args).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[name]
