"""The task "nodes": entity classification, where each step sees the whole graph and all training nodes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._optional import optional
from dejax.datasets import EntityDataset
from dejax.minibatch import FeatureStore
from dejax.rgnn import Options
from dejax.training.settings import Settings
from dejax.training.state import TrainState
from dejax.training.tasks.data import SPLITS, needs_reverse, split_nodes
from dejax.training.tasks.models import EntityClassifier, NodeMLP
from dejax.training.tasks.task import (
    Runner,
    StepView,
    TrainingTask,
    World,
    cross_entropy,
    digest_of,
    most_frequent,
)

with optional("flax", of="dejax.training"):
    from flax import nnx


class WholeGraphTask(TrainingTask):
    """Classification of the nodes of an `EntityDataset`, by the published models.

    Args:
        settings: model and hyperparameters.
        data: the data set.
        options: options of the compiler.

    Raises:
        ValueError: the data set has no task, or the held-out share leaves no training node.
    """

    sampled, steps_per_epoch = False, 1

    def __init__(self, settings: Settings, data: EntityDataset, options: Options) -> None:
        if not data.num_classes or not len(data.train_nodes):
            raise ValueError(
                f"the data set must have labelled nodes to train on, got {data.name!r} without; choose one with a task"
            )
        self.settings, self.dataset, self.options, self.embedded = settings, data, options, {}
        # RGAT has no root weight. A node sees its own value through a self loop, which is one more relation.
        graph = data.graph(add_reverse=needs_reverse(data), add_self_loops=settings.model == "rgat")
        features = None if settings.featureless or data.features is None else jnp.asarray(data.features)
        self.splits = split_nodes(data, settings.holdout, settings.fold)
        arrays = {
            "graph": graph,
            "features": features,
            "nodes": {name: jnp.asarray(nodes) for name, nodes in self.splits.items()},
            "labels": {name: jnp.asarray(data.labels[nodes]) for name, nodes in self.splits.items()},
        }
        self.world = World(None, FeatureStore(), arrays)
        self.seeds_per_epoch = len(self.splits["train"])
        nodes = int(data.num_nodes) if features is None else None  # which have parameters of their own
        self.layout_of_data = digest_of([data.edge_type_names, data.node_type_names, data.class_names, nodes])
        self._correct = jax.jit(self._num_correct, static_argnums=0)

    def model(self, key: Array) -> Any:
        """The published model, or the baseline without edges."""
        graph, x = self.world.data["graph"], self.world.data["features"]
        width, classes, rngs = None if x is None else x.shape[1], self.dataset.num_classes, nnx.Rngs(key)
        if self.settings.model == "mlp":
            return NodeMLP(self.settings, graph, width, classes, rngs=rngs)
        return EntityClassifier(self.settings, graph, width, classes, options=self.options, rngs=rngs)

    def order(self, seed: int, epoch: int) -> Any:
        """Nothing: each step has all training nodes, which are part of the data."""
        return {}

    def view(self, topology: Any, data: Any, seeds: Any, sample: Any) -> StepView:
        """The whole graph."""
        return StepView(data["graph"], {}, {}, jnp.zeros((), jnp.int32))

    def loss(
        self, model: Any, view: StepView, x: dict[str, Array], seeds: Any, data: Any, key: Array
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """Mean cross-entropy of the training nodes, and the penalty on the first layer."""
        dropout = bool(self.settings.dropout)
        rngs = nnx.Rngs(dropout=key) if dropout else None
        logits = model(view.graphs, data["features"], deterministic=not dropout, rngs=rngs)[data["nodes"]["train"]]
        labels = data["labels"]["train"]
        loss, aux = cross_entropy(logits, labels, jnp.ones(labels.shape, bool))
        if self.settings.l2:
            matrices = [p for p in jax.tree.leaves(nnx.state(model.layers[0], nnx.Param)) if p.ndim >= 2]
            loss += self.settings.l2 * sum(jnp.sum(jnp.square(p)) for p in matrices)
        return loss, aux

    def _num_correct(self, trainer: Runner, params: Any, data: Any) -> dict[str, Array]:
        best = trainer.merged(params)(data["graph"], data["features"]).argmax(-1)
        return {name: jnp.sum(best[data["nodes"][name]] == data["labels"][name]) for name in SPLITS}

    def measures(self, trainer: Runner, state: TrainState, *, last: bool) -> dict[str, float]:
        """The share of right nodes of each split, without empty splits."""
        correct = self._correct(trainer, state.params, self.world.data)
        return {name: int(correct[name]) / len(nodes) for name, nodes in self.splits.items() if len(nodes)}

    def final(self, trainer: Runner, state: TrainState, *, inference: str | None = None) -> dict[str, float]:
        """The same measures, with the arguments of `measures`."""
        return self.measures(trainer, state, last=True)

    def counts(self) -> dict[str, Any]:
        """The sizes of the graph, for the report."""
        graph, x = self.world.data["graph"], self.world.data["features"]
        return {
            "nodes": graph.num_nodes,
            "edges": graph.num_edges,
            "edge_types": graph.num_edge_types,
            "node_types": graph.num_node_types,
            "features": 0 if x is None else int(x.shape[1]),
            "split_sizes": {name: len(nodes) for name, nodes in self.splits.items()},
        }

    def majority(self) -> float:
        """Test accuracy of the most frequent class of the training nodes."""
        train = np.asarray(self.dataset.labels[self.splits["train"]])
        return most_frequent(train, np.asarray(self.dataset.test_labels), self.dataset.num_classes)
