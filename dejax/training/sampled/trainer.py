"""Training on mini-batches: one jitted step samples, gathers rows, runs the layers and updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._int32 import entering_jit
from dejax._optional import optional
from dejax._pytrees import pytree
from dejax.datasets import HeteroDataset
from dejax.distributed import Part
from dejax.host_gather import HostTable, RowGradient, adam
from dejax.minibatch import (
    Block,
    FeatureStore,
    HeteroTopology,
    InferenceBatch,
    SampledBlocks,
    infer_layers,
    make_blocks,
    make_typed_blocks,
    sample_blocks,
)
from dejax.rgnn import Options, RelGraph
from dejax.training.mini_batch import CAPACITY_BATCHES, BatchTrainer
from dejax.training.sampled.data import Prepared, embeddings_of, only_sampled, prepare
from dejax.training.sampled.model import SampledClassifier
from dejax.training.sampled.settings import SampledSettings

with optional("optax", of="dejax.training.sampled"):
    import optax
with optional("flax", of="dejax.training.sampled"):
    from flax import nnx


@pytree
@dataclass(frozen=True, slots=True)
class SampledState:
    """The state that changes from step to step. A run resumes from it.

    Attributes:
        params: the model's parameters, an nnx.State.
        opt_state: the state of Adam.
        embeddings: tables of the types without features, in host memory.
        moments: Adam's state of each embedding, in host memory.
        step: int32 scalar, number of finished steps.
        key: uint32 [2], the run's random key as plain integers. Step s draws from `fold_in(key, s)`.
        loss, correct, count: sums over the steps of the epoch: loss, right training nodes, training nodes.
        lost: int32 scalar, sampled nodes that did not fit, in all steps.
    """

    params: Any
    opt_state: Any
    embeddings: FeatureStore
    moments: Any
    step: Array
    key: Array
    loss: Array
    correct: Array
    count: Array
    lost: Array


@pytree
@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a step that do not change. They are arguments of the jitted functions, not constants.

    Attributes:
        topology: the edges.
        features: tables of the types with features.
        labels: int32 [nodes] by type.
        edge_type: int32 [edges], where all relations are sampled together; else None.
        graph: the whole graph, if steps see it; else None.
        times: int [nodes] by type, of nodes as seeds, where edges have times; else None.
    """

    topology: HeteroTopology
    features: FeatureStore
    labels: dict[str, Array]
    edge_type: Array | None
    graph: RelGraph | None
    times: dict[str, Array] | None


class SampledTrainer(BatchTrainer):
    """Training of one model on one data set.

    Args:
        settings: layer and hyperparameters.
        data: the data set.
        backend: backend of the compiler: "auto", "pallas" or "xla".
        print_table: takes the table of capacities as text; None for no table.

    Raises:
        ValueError: the data set has no training nodes, or an impossible setting.

    Attributes:
        prepared: topology, features and splits.
        capacities: the room of a sample, by type.
        steps_per_epoch: steps of a pass over the training nodes.
        num_params: number of parameters of the model, without embeddings.
        num_embedding_values: number of values of the embeddings.
        compile_seconds: time spent in compilation of training steps so far.
    """

    def __init__(
        self,
        settings: SampledSettings,
        data: HeteroDataset,
        *,
        backend: str = "auto",
        print_table: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(settings)
        self.prepared: Prepared = prepare(data, settings)
        self.options = Options(backend=backend, precision=settings.precision)
        self.targets, self.splits = self.prepared.targets, self.prepared.splits
        topology, data = self.prepared.topology, self.prepared.data
        labels = {kind: jnp.asarray(np.asarray(data.labels[kind]), jnp.int32) for kind in self.targets}
        whole = None
        if settings.full_batch:
            edges = {edge_type: _ends(topology, edge_type) for edge_type in topology.edge_types}
            whole = RelGraph.from_relations(edges, topology.num_nodes)
        kinds = None if self.prepared.edge_type is None else jnp.asarray(self.prepared.edge_type)
        times = jax.tree.map(jnp.asarray, entering_jit("node_times", self.prepared.times, ids_or_times=True))
        self.inputs = Inputs(topology, self.prepared.features, labels, kinds, whole, times)
        sizes = {kind: len(ids) for kind, ids in self.splits["train"].items()}
        self.steps_per_epoch = 1 if settings.full_batch else -(-sum(sizes.values()) // settings.batch_size)
        parts = settings.parts
        self._part = {kind: -(-count // (self.steps_per_epoch * parts)) for kind, count in sizes.items()}
        self._batch = {kind: count * parts for kind, count in self._part.items()}
        self.capacities = None
        if not settings.full_batch:
            batches = self._capacity_batches()
            options = {"sigmas": settings.sigmas, "seed_times": partial(_times_of, self.prepared.times)}
            self.capacities = self._find_capacities(topology, batches, print_table, **options)
        self._split_model()
        self.num_embedding_values = settings.hidden * sum(
            count for kind, count in topology.num_nodes.items() if kind not in self.prepared.features
        )
        self._optimizer = optax.adamw(settings.lr, weight_decay=settings.weight_decay)
        self._of_rows = adam(settings.lr)
        self._layers = [partial(_on_batch, self, number) for number in range(settings.layers)]
        self._scores = jax.jit(self._correct_of)

    def _model(self, key: Array) -> SampledClassifier:
        topology = self.prepared.topology
        return SampledClassifier(
            self.settings,
            self.prepared.widths,
            self.prepared.edge_types,
            topology.node_types,
            self.prepared.num_classes,
            options=self.options,
            rngs=nnx.Rngs(key),
        )

    def _capacity_batches(self) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        seeds = self.splits["train"]
        if self.prepared.times is not None:  # later nodes see more
            splits = self.splits.values()
            seeds = {kind: np.concatenate([ids[kind] for ids in splits if kind in ids]) for kind in seeds}
        return [
            {kind: rng.choice(ids, min(self._part[kind], len(ids)), replace=False) for kind, ids in seeds.items()}
            for _ in range(CAPACITY_BATCHES)
        ]

    # -------------------------------------------------------------------------------------------- state

    def init(self, seed: int) -> SampledState:
        """The state before the first step of the run with this seed."""
        key, own = jax.random.split(jax.random.key(seed))
        params = jax.jit(lambda key: nnx.state(self._model(key), nnx.Param))(key)
        embeddings = embeddings_of(self.prepared, self.settings, seed)
        zero = np.zeros((), np.int32)
        return SampledState(
            params,
            jax.jit(self._optimizer.init)(params),
            embeddings,
            embeddings.init(self._of_rows),
            *(jnp.asarray(value) for value in (zero, jax.random.key_data(own), np.float32(0), zero, zero, zero)),
        )

    def exported(self, state: SampledState) -> dict[str, Any]:
        """A state as plain arrays, for a checkpoint: tables become numpy arrays that view their memory."""
        tables = {kind: state.embeddings[kind].table.numpy() for kind in state.embeddings.types}
        moments = {
            kind: {"step": of_type.step, "first": of_type.first.numpy(), "second": of_type.second.numpy()}
            for kind, of_type in state.moments.items()
        }
        scalars = {name: getattr(state, name) for name in _SCALARS}
        return {"params": state.params, "opt_state": state.opt_state, "tables": tables, "moments": moments, **scalars}

    def imported(self, plain: dict[str, Any], seed: int) -> SampledState:
        """The state of `exported`. `seed` makes the tables that are then overwritten."""
        state = self.init(seed)
        for kind in state.embeddings.types:
            _overwrite(state.embeddings[kind].table, plain["tables"][kind])
            _overwrite(state.moments[kind].first, plain["moments"][kind]["first"])
            _overwrite(state.moments[kind].second, plain["moments"][kind]["second"])
        moments = {
            kind: of_type._replace(step=jnp.asarray(plain["moments"][kind]["step"]))
            for kind, of_type in state.moments.items()
        }
        scalars = [jnp.asarray(plain[name]) for name in _SCALARS]
        return SampledState(plain["params"], plain["opt_state"], state.embeddings, moments, *scalars)

    # -------------------------------------------------------------------------------------------- a step

    def step(self, state: SampledState, inputs: Inputs, order: dict[str, Array]) -> SampledState:
        """One step: a sample, its rows, the layers, Adam's updates. It runs inside `jax.jit`.

        Args:
            state: donate it.
            inputs: edges, features, labels.
            order: int32[steps_per_epoch * batch] by type, the training nodes in the epoch's order, -1 for padding.
        """
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        return self.updated(state, self.part(state, key, self.seeds(state.step, order), inputs))

    def seeds(self, step: Array, order: dict[str, Array]) -> dict[str, Array]:
        """The seeds of a step."""
        within = step % self.steps_per_epoch
        return {
            kind: jax.lax.dynamic_slice(ids, (within * self._batch[kind],), (self._batch[kind],))
            for kind, ids in order.items()
        }

    def part(self, state: SampledState, key: Array, seeds: dict[str, Array], inputs: Inputs) -> Part:
        """Loss and gradients of some seeds."""
        sample_key, dropout_key = jax.random.split(key)
        graphs, ids, positions, lost = self._neighbourhood(sample_key, inputs, seeds)
        x = (state.embeddings | inputs.features).gather(ids, dtype=jnp.float32)
        own = {kind: rows for kind, rows in x.items() if kind in state.embeddings}

        def loss_of(params: Any, own: dict[str, Array]) -> tuple[Array, tuple[Array, Array]]:
            model = self._merged(params)
            rngs = nnx.Rngs(dropout=dropout_key)
            outputs = model(graphs, {**x, **own}, deterministic=not self.settings.dropout, rngs=rngs)
            return self._loss(outputs, positions, seeds, inputs.labels)

        (loss, (correct, count)), (gradient, of_rows) = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(
            state.params, own
        )
        rows = {kind: RowGradient(ids[kind], values) for kind, values in of_rows.items()}
        return Part(loss, gradient, count, rows, {"correct": correct, "count": count, "lost": lost})

    def updated(self, state: SampledState, mean: Part) -> SampledState:
        """The state after Adam's updates by the mean over a step's seeds."""
        updates, opt_state = self._optimizer.update(mean.gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ids = {kind: rows.ids for kind, rows in mean.rows.items()}
        values = {kind: rows.values for kind, rows in mean.rows.items()}
        embeddings, moments = state.embeddings.update(self._of_rows, ids, values, state.moments)
        kept, counts = jnp.where(state.step % self.steps_per_epoch == 0, 0, 1), mean.counts
        return SampledState(
            params,
            opt_state,
            embeddings,
            moments,
            state.step + 1,
            state.key,
            state.loss * kept + mean.loss * counts["count"],
            state.correct * kept + counts["correct"],
            state.count * kept + counts["count"],
            state.lost + counts["lost"],
        )

    def _neighbourhood(
        self, key: Array, inputs: Inputs, seeds: dict[str, Array]
    ) -> tuple[Any, dict[str, Array], dict[str, Array], Array]:
        """Graphs for the model, ids of the rows to gather, and where the outputs have the seeds."""
        if inputs.graph is not None:
            counts = inputs.topology.num_nodes
            ids = {kind: jnp.arange(count, dtype=jnp.int32) for kind, count in counts.items()}
            return inputs.graph, ids, seeds, jnp.zeros((), jnp.int32)
        sample = sample_blocks(
            key,
            inputs.topology,
            seeds,
            list(self.settings.fan_outs),
            capacities=self.capacities,
            seed_times=_times_of(inputs.times, seeds),
            options=self._sample_options,
        )
        lost = sample.lost.sum(dtype=jnp.int32) + sample.lost_edges.astype(jnp.int32)
        return self._blocks(inputs, sample), sample.node_ids, sample.seed_positions, lost

    def _blocks(self, inputs: Inputs, sample: SampledBlocks) -> list[Block]:
        if inputs.edge_type is None:
            return make_blocks(sample)
        loops = self.settings.layer == "rgat"
        relations = len(self.prepared.edge_types) - loops
        return make_typed_blocks(inputs.topology, sample, inputs.edge_type, relations, add_self_loops=loops)

    def _loss(
        self, outputs: dict[str, Array], positions: dict[str, Array], seeds: dict[str, Array], labels: dict[str, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        logits = jnp.concatenate([outputs[kind][positions[kind]] for kind in seeds])
        classes = jnp.concatenate([labels[kind][ids] for kind, ids in seeds.items()])
        there = jnp.concatenate([ids >= 0 for ids in seeds.values()])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(there, classes, 0))
        count = there.sum(dtype=jnp.int32)
        right = jnp.sum((logits.argmax(-1) == classes) & there, dtype=jnp.int32)
        return jnp.where(there, each, 0).sum() / jnp.maximum(count, 1), (right, count)

    # -------------------------------------------------------------------------------------------- a run

    def order(self, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """The training nodes of an epoch in random order, padded to whole batches."""
        rng = np.random.default_rng([seed, epoch])
        orders = {}
        for kind, ids in self.splits["train"].items():
            room = np.full(self.steps_per_epoch * self._batch[kind], -1, np.int32)
            room[: len(ids)] = rng.permutation(ids)
            # Padding is spread over the steps, so that each has about as many seeds.
            orders[kind] = room.reshape(self._batch[kind], self.steps_per_epoch).T.reshape(-1)
        return orders

    def evaluated(self, state: SampledState, epoch: int, last: bool) -> tuple[float, dict[str, float]]:
        """The mean loss of the epoch's seeds, and the accuracies: of training nodes, and of the others on samples."""
        count = max(1, int(state.count))
        accuracy = {"train": int(state.correct) / count}
        accuracy |= self.sampled_accuracy(state, [name for name in ("valid", "test") if self.splits[name]])
        return float(state.loss) / count, accuracy

    # -------------------------------------------------------------------------------------------- accuracy

    def _correct_of(
        self, key: Array, params: Any, embeddings: FeatureStore, inputs: Inputs, seeds: dict[str, Array]
    ) -> Array:
        graphs, ids, positions, _ = self._neighbourhood(key, inputs, seeds)
        x = (embeddings | inputs.features).gather(ids, dtype=jnp.float32)
        outputs = self._merged(params)(graphs, x)
        return self._loss(outputs, positions, seeds, inputs.labels)[1][0]

    def sampled_accuracy(self, state: SampledState, splits: list[str], seed: int = 0) -> dict[str, float]:
        """The share of right nodes of each split, each node on one sample, which is the same each time."""
        found = {}
        for name in splits:
            by_type = self.splits[name]
            steps = max(-(-len(ids) // self._part[kind]) for kind, ids in by_type.items())
            if self.inputs.graph is not None:
                steps = 1
            right = []
            for at in range(steps):
                seeds = {}
                for kind in self.targets:
                    size = self._part[kind] if self.inputs.graph is None else len(by_type.get(kind, ()))
                    part = by_type.get(kind, np.zeros(0, np.int32))[at * size : (at + 1) * size]
                    seeds[kind] = np.pad(part, (0, size - len(part)), constant_values=-1)
                key = jax.random.fold_in(jax.random.key(seed), at)
                right.append(self._scores(key, state.params, state.embeddings, self.inputs, seeds))
            found[name] = sum(map(int, right)) / sum(map(len, by_type.values()))
        return found

    def outputs(self, state: SampledState, folder: Any = None, progress: bool | None = None) -> dict[str, Any]:
        """The logits of all nodes of the target types, layer by layer from all their neighbours (`infer_layers`).

        Raises:
            ValueError: the edges have times or weights.
        """
        if only_sampled(self.prepared.data):
            raise ValueError(
                "inference by layers must be of data without times and weights of edges, got "
                f"{self.prepared.data.name!r}: a node would have all of its edges, later ones too; use "
                "sampled_accuracy, or on the command line --inference sampled"
            )
        return infer_layers(
            self._layers,
            [state.params] * self.settings.layers,
            self.prepared.by_relation(),
            self.prepared.topology.num_nodes,
            state.embeddings | self.prepared.features,
            node_types=self.targets,
            dtype=np.dtype(np.float32),
            folder=folder,
            progress=progress,
        )

    def accuracy(self, state: SampledState, progress: bool | None = None) -> dict[str, float]:
        """The share of right nodes of each split, from `outputs`."""
        outputs, data = self.outputs(state, progress=progress), self.prepared.data
        best = {kind: _best(table) for kind, table in outputs.items()}
        found = {}
        for name, by_type in self.splits.items():
            if by_type:
                right = sum(int((best[k][ids] == np.asarray(data.labels[k][ids])).sum()) for k, ids in by_type.items())
                found[name] = right / sum(map(len, by_type.values()))
        return found


_SCALARS = ("step", "key", "loss", "correct", "count", "lost")


def _times_of(times: dict[str, Any] | None, seeds: dict[str, Any]) -> dict[str, Any] | None:
    """The times of seeds; padding has that of node 0."""
    return None if times is None else {kind: times[kind][ids * (ids >= 0)] for kind, ids in seeds.items()}


def _on_batch(trainer: SampledTrainer, number: int, params: Any, batch: InferenceBatch) -> Array:
    return trainer._merged(params).on_batch(number, batch)


def _best(table: Any) -> np.ndarray:
    return np.asarray((table.numpy() if isinstance(table, HostTable) else table).argmax(-1))


def _overwrite(table: Any, rows: Any) -> None:
    if len(table):
        table.write(0, np.asarray(rows))


def _ends(topology: HeteroTopology, edge_type: tuple[str, str, str]) -> tuple[np.ndarray, np.ndarray]:
    starts, senders, _ = topology.csc(edge_type)
    return senders, np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
