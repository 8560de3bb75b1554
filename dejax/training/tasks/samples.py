"""The task "samples": nodes of a `HeteroDataset` are classified on mini-batches, with `full_batch` without samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._dtypes import entering_jit
from dejax._optional import optional
from dejax.datasets import HeteroDataset
from dejax.minibatch import (
    FeatureStore,
    HeteroTopology,
    InferenceBatch,
    SampledBlocks,
    find_capacities,
    infer_layers,
    make_blocks,
    make_typed_blocks,
)
from dejax.rgnn import Options, RelGraph
from dejax.training.settings import Settings
from dejax.training.state import TrainState
from dejax.training.tasks.models import SampledClassifier
from dejax.training.tasks.prepared import only_sampled, prepare
from dejax.training.tasks.task import (
    CAPACITY_BATCHES,
    SAMPLE_OPTIONS,
    Runner,
    StepView,
    TrainingTask,
    World,
    cross_entropy,
    digest_of,
    most_frequent,
    spread_over_steps,
)

with optional("flax", of="dejax.training"):
    from flax import nnx

_Relation = tuple[str, str, str]
_Ids = dict[str, np.ndarray]


class SampledTask(TrainingTask):
    """Classification of nodes on mini-batches.

    Args:
        settings: model and hyperparameters.
        data: the data set.
        options: options of the compiler.
        print_table: takes the table of capacities as text; None for no table.

    Raises:
        ValueError: as `prepare`.
    """

    def __init__(
        self,
        settings: Settings,
        data: HeteroDataset,
        options: Options,
        print_table: Callable[[str], None] | None = None,
    ) -> None:
        self.settings, self.options, self.sampled = settings, options, not settings.full_batch
        self.prepared = prepared = prepare(data, settings)
        topology, self.splits = prepared.topology, prepared.splits
        self.embedded = {k: count for k, count in topology.num_nodes.items() if k not in prepared.features}
        own = {kind: data.node_names.get(kind) for kind in self.embedded}
        self.layout_of_data = digest_of([prepared.edge_types, topology.node_types, prepared.num_classes, own])
        labels = {kind: jnp.asarray(np.asarray(prepared.data.labels[kind]), jnp.int32) for kind in prepared.targets}
        arrays: dict[str, Any] = {"labels": labels}
        if prepared.edge_type is not None:
            arrays["edge_type"] = jnp.asarray(prepared.edge_type)
        if settings.full_batch:
            edges = {edge_type: _ends(topology, edge_type) for edge_type in topology.edge_types}
            arrays["graph"] = RelGraph.from_relations(edges, topology.num_nodes)
        self.world = World(topology, prepared.features, arrays)
        sizes = {kind: len(ids) for kind, ids in self.splits["train"].items()}
        self.seeds_per_epoch = sum(sizes.values())
        self.steps_per_epoch = 1 if settings.full_batch else -(-self.seeds_per_epoch // settings.batch_size)
        self._part = {kind: -(-count // (self.steps_per_epoch * settings.parts)) for kind, count in sizes.items()}
        self._batch = {kind: count * settings.parts for kind, count in self._part.items()}
        self.capacities = None
        if self.sampled:
            self.capacities = find_capacities(
                jax.random.key(0),
                topology,
                self._capacity_batches(),
                list(settings.fan_outs),
                sigmas=settings.sigmas,
                print_table=print_table,
                seed_times=lambda batch: None if prepared.times is None else self.with_times(batch)["times"],
                options=SAMPLE_OPTIONS,
            )
        self._layers: list[Any] = []
        self._scores = jax.jit(self._correct_of, static_argnums=0)

    def _capacity_batches(self) -> list[_Ids]:
        rng = np.random.default_rng(0)
        seeds = self.splits["train"]
        if self.prepared.times is not None:  # later nodes see more
            splits = self.splits.values()
            seeds = {kind: np.concatenate([ids[kind] for ids in splits if kind in ids]) for kind in seeds}
        return [
            {kind: rng.choice(ids, min(self._part[kind], len(ids)), replace=False) for kind, ids in seeds.items()}
            for _ in range(CAPACITY_BATCHES)
        ]

    def model(self, key: Array) -> SampledClassifier:
        """Projections by type, relational layers, and a linear map to the classes."""
        prepared = self.prepared
        widths = {kind: prepared.data.features[kind].shape[1] for kind in prepared.features.types}
        return SampledClassifier(
            self.settings,
            widths,
            prepared.edge_types,
            prepared.topology.node_types,
            prepared.num_classes,
            options=self.options,
            rngs=nnx.Rngs(key),
        )

    # -------------------------------------------------------------------------------------------- a step

    def order(self, seed: int, epoch: int) -> Any:
        """The training nodes of an epoch in random order: "ids", and where edges have times "times", by type."""
        rng = np.random.default_rng([seed, epoch])
        train = self.splits["train"]
        ids = {k: spread_over_steps(rng.permutation(x), self.steps_per_epoch, self._batch[k]) for k, x in train.items()}
        return self.with_times(ids)

    def with_times(self, ids: _Ids) -> dict[str, _Ids]:
        """The seeds of a step: ids, with their times where edges have times; padding has that of node 0."""
        times = self.prepared.times
        if times is None:
            return {"ids": ids}
        of_seeds = {kind: times[kind][some * (some >= 0)] for kind, some in ids.items()}
        return {"ids": ids, "times": entering_jit("node_times", of_seeds, ids_or_times=True)}

    def view(self, topology: HeteroTopology | None, data: Any, seeds: Any, sample: SampledBlocks | None) -> StepView:
        """The blocks of the sample, or the whole graph."""
        if sample is None:
            assert topology is not None
            ids = {kind: jnp.arange(count, dtype=jnp.int32) for kind, count in topology.num_nodes.items()}
            return StepView(data["graph"], ids, seeds["ids"], jnp.zeros((), jnp.int32))
        lost = sample.lost.sum(dtype=jnp.int32) + sample.lost_edges.astype(jnp.int32)
        blocks = make_blocks(sample) if "edge_type" not in data else self._typed(topology, data, sample)
        return StepView(blocks, sample.node_ids, sample.seed_positions, lost)

    def _typed(self, topology: Any, data: Any, sample: SampledBlocks) -> Any:
        loops = self.settings.model == "rgat"
        relations = len(self.prepared.edge_types) - loops
        return make_typed_blocks(topology, sample, data["edge_type"], relations, add_self_loops=loops)

    def loss(
        self, model: Any, view: StepView, x: dict[str, Array], seeds: Any, data: Any, key: Array
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """Mean cross-entropy of the seeds."""
        rngs = nnx.Rngs(dropout=key)
        outputs = model(view.graphs, x, deterministic=not self.settings.dropout, rngs=rngs)
        return self._cross_entropy(outputs, view, seeds, data)

    def _cross_entropy(
        self, outputs: dict[str, Array], view: StepView, seeds: Any, data: Any
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        ids = seeds["ids"]
        logits = jnp.concatenate([outputs[kind][view.positions[kind]] for kind in ids])
        classes = jnp.concatenate([data["labels"][kind][some] for kind, some in ids.items()])
        return cross_entropy(logits, classes, jnp.concatenate([some >= 0 for some in ids.values()]))

    # -------------------------------------------------------------------------------------------- accuracy

    def measures(self, trainer: Runner, state: TrainState, *, last: bool) -> dict[str, float]:
        """Accuracies: of training nodes in the steps of the epoch, and of the others on samples."""
        accuracy = {"train": float(state.sums["correct"]) / max(1.0, float(state.sums["weight"]))}
        others = [name for name in ("valid", "test") if self.splits[name]]
        return accuracy | self.sampled_accuracy(trainer, trainer.on_one_device(state), others)

    def final(self, trainer: Runner, state: TrainState, *, inference: str | None = None) -> dict[str, float]:
        """Accuracies by split: layer by layer from all neighbours, or each node on one sample."""
        inference = inference or self.inference
        if inference == "layers" and only_sampled(self.prepared.data):
            raise ValueError("--inference must be sampled if edges have times or weights, got layers; leave it out")
        if inference == "layers" and not self.settings.full_batch:
            return self.accuracy(trainer, state)
        return self.sampled_accuracy(trainer, state, [name for name, ids in self.splits.items() if ids])

    @property
    def inference(self) -> str:
        """How final accuracies are computed unless the user says otherwise: "layers" or "sampled"."""
        return "sampled" if only_sampled(self.prepared.data) else "layers"

    def _correct_of(
        self, trainer: Runner, key: Array, params: Any, embeddings: FeatureStore, world: World, seeds: Any
    ) -> Array:
        view, x = self.seen(trainer, key, embeddings, world, seeds)
        outputs = trainer.merged(params)(view.graphs, x)
        return self._cross_entropy(outputs, view, seeds, world.data)[1][1]["correct"]

    def sampled_accuracy(
        self, trainer: Runner, state: TrainState, splits: list[str], seed: int = 0
    ) -> dict[str, float]:
        """The share of right nodes of each split, each node on one sample, which is the same each time."""
        found = {}
        for name in splits:
            by_type = self.splits[name]
            sizes = {k: self._part[k] if self.sampled else len(by_type.get(k, ())) for k in self.prepared.targets}
            steps = max(-(-len(ids) // sizes[kind]) for kind, ids in by_type.items())
            right = []
            for at in range(steps):
                ids = {}
                for kind, size in sizes.items():
                    part = by_type.get(kind, np.zeros(0, np.int32))[at * size : (at + 1) * size]
                    ids[kind] = np.pad(part, (0, size - len(part)), constant_values=-1)
                key = jax.random.fold_in(jax.random.key(seed), at)
                seeds = self.with_times(ids)
                right.append(self._scores(trainer, key, state.params, state.embeddings, self.world, seeds))
            found[name] = sum(map(int, right)) / sum(map(len, by_type.values()))
        return found

    def outputs(
        self, trainer: Runner, state: TrainState, folder: Any = None, progress: bool | None = None
    ) -> dict[str, Any]:
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
        if not self._layers:  # kept, because they are compiled for each function
            self._layers = [partial(_on_batch, trainer, number) for number in range(self.settings.layers)]
        return infer_layers(
            self._layers,
            [state.params] * self.settings.layers,
            self.prepared.by_relation(),
            self.prepared.topology.num_nodes,
            state.embeddings | self.prepared.features,
            node_types=self.prepared.targets,
            dtype=np.dtype(np.float32),
            folder=folder,
            progress=progress,
        )

    def accuracy(self, trainer: Runner, state: TrainState, progress: bool | None = None) -> dict[str, float]:
        """The share of right nodes of each split, from `outputs`."""
        outputs, data = self.outputs(trainer, state, progress=progress), self.prepared.data
        best = {kind: _best(table) for kind, table in outputs.items()}
        found = {}
        for name, by_type in self.splits.items():
            if by_type:
                right = sum(int((best[k][ids] == np.asarray(data.labels[k][ids])).sum()) for k, ids in by_type.items())
                found[name] = right / sum(map(len, by_type.values()))
        return found

    # -------------------------------------------------------------------------------------------- report

    def counts(self) -> dict[str, Any]:
        """The sizes of the graph, for the report."""
        prepared = self.prepared
        return {
            "nodes": sum(prepared.topology.num_nodes.values()),
            "edges": sum(prepared.topology.num_edges.values()),
            "edge_types": len(prepared.edge_types),
            "node_types": len(prepared.topology.node_types),
            "features": {kind: prepared.data.features[kind].shape[1] for kind in prepared.features.types},
            "split_sizes": {name: sum(map(len, ids.values())) for name, ids in self.splits.items()},
        }

    def majority(self) -> float:
        """Test accuracy of the most frequent class of the training nodes."""
        labels = {kind: np.asarray(values) for kind, values in self.prepared.data.labels.items()}
        train, test = (
            np.concatenate([np.zeros(0, np.int64), *(labels[kind][ids] for kind, ids in self.splits[name].items())])
            for name in ("train", "test")
        )
        return most_frequent(train.astype(np.int64), test, self.prepared.num_classes)


def _on_batch(trainer: Runner, number: int, params: Any, batch: InferenceBatch) -> Array:
    found: Array = trainer.merged(params).on_batch(number, batch)
    return found


def _best(table: Any) -> np.ndarray:
    return np.asarray(np.asarray(table).argmax(-1))


def _ends(topology: HeteroTopology, edge_type: _Relation) -> tuple[np.ndarray, np.ndarray]:
    starts, senders, _ = topology.csc(edge_type)
    return senders, np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
