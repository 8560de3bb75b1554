"""What a trainer asks of a task: the model, what a step reads, its loss, and how a state is measured."""

from __future__ import annotations

import abc
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._pytrees import pytree
from dejax.minibatch import Capacities, FeatureStore, HeteroTopology, SampledBlocks, SampleOptions, sample_blocks
from dejax.rgnn import Options
from dejax.training.settings import Settings
from dejax.training.state import TrainState

CAPACITY_BATCHES = 20
SAMPLE_OPTIONS = SampleOptions(max_degree=512)  # edges of a node that a sample has room for with a fan-out of -1


def digest_of(names: Any) -> str:
    """A digest of plain values that JSON can hold, such as names in their order."""
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]


@pytree
@dataclass(frozen=True, slots=True)
class World:
    """What steps read and do not change. It is an argument of the compiled functions, so no array is a constant.

    Attributes:
        topology: the edges, as they are sampled; None where steps see the whole graph alone.
        features: tables of the node types that have features.
        data: a pytree of arrays of the task: labels, a whole graph.
    """

    topology: HeteroTopology | None
    features: FeatureStore
    data: Any


@pytree
@dataclass(frozen=True, slots=True)
class StepView:
    """What a model runs on in one step.

    Attributes:
        graphs: one for each layer, or one for all; as the task's model takes them.
        ids: int32[nodes] by node type, the nodes whose rows the model reads; -1 for padding.
        positions: int32[seeds] by node type, where the model's result has the seeds.
        lost: int32 scalar, sampled nodes and edges that did not fit.
        trees: int32[nodes] by node type, the seed that each node was sampled for, -1 for padding; None where seeds
            share nodes.
        times: int32[nodes] by node type, from when on each node is known, the least int32 for always; None where the
            model does not read it.
        history: float32[seeds, width] by node type, what tells the history of seeds; None without.
    """

    graphs: Any
    ids: dict[str, Array]
    positions: dict[str, Array]
    lost: Array
    trees: dict[str, Array] | None = None
    times: dict[str, Array] | None = None
    history: dict[str, Array] | None = None


class Runner(Protocol):
    """What a task uses of its `Trainer`."""

    def merged(self, params: Any) -> Any:
        """The model with these parameters."""

    def drawn(self, world: World, seeds: Any, key: Array) -> tuple[SampledBlocks | None, Any, Array]:
        """A step's sample, its features, and a key for dropout."""

    def on_one_device(self, state: TrainState) -> TrainState:
        """The state without a mesh."""


class TrainingTask(abc.ABC):
    """A task. A subclass sets the attributes and defines the methods.

    Attributes:
        settings: the settings of the run.
        options: options of the compiler.
        world: what steps read.
        embedded: the number of nodes of each type that has trainable embeddings, of width `settings.hidden`.
        sample_options: options of its samples.
        capacities: sizes of the arrays of a sample; None where nothing is sampled.
        sampled: whether a step samples; otherwise it sees the whole graph.
        steps_per_epoch: steps of a pass over the training data.
        seeds_per_epoch: training nodes, or training edges.
        classes: whether its measures are accuracies; otherwise `final` has several measures of test examples.
        measure: the name of the measure of the curves.
        layout_of_data: a digest of what the places of parameters mean, such as the order of relations or categories:
            of data with another one, a saved state would give wrong numbers.
        may_grow: whether a saved state serves data that have more nodes with embeddings, at the end of their types.
        lower_is_better: whether a lower validation measure is better; in no task but one that overrides it.
    """

    settings: Settings
    options: Options
    world: World
    embedded: dict[str, int]
    sampled: bool
    steps_per_epoch: int
    seeds_per_epoch: int
    classes = True
    measure = "accuracy"
    sample_options = SAMPLE_OPTIONS
    capacities: Capacities | None = None
    layout_of_data: str
    may_grow = False

    @property
    def lower_is_better(self) -> bool:
        return False

    @property
    def fan_outs(self) -> Any:
        """Fan-outs of its samples, as `sample_blocks` takes them."""
        return list(self.settings.fan_outs)

    @abc.abstractmethod
    def model(self, key: Array) -> Any:
        """A new model, an nnx.Module."""

    @abc.abstractmethod
    def order(self, seed: int, epoch: int) -> Any:
        """The seeds of an epoch's steps: a pytree of integers [steps_per_epoch, ...], -1 for padding."""

    def sample(self, key: Array, topology: HeteroTopology, seeds: Any) -> SampledBlocks:
        """The sampled neighbourhood of a step's seeds, none of it later than they are."""
        return sample_blocks(
            key,
            topology,
            seeds["ids"],
            self.fan_outs,
            capacities=self.capacities,
            seed_times=seeds.get("times"),
            options=self.sample_options,
        )

    @abc.abstractmethod
    def view(self, topology: HeteroTopology | None, data: Any, seeds: Any, sample: SampledBlocks | None) -> StepView:
        """What the model runs on; without a sample, the whole graph."""

    def seen(
        self, trainer: Runner, key: Array, embeddings: FeatureStore, world: World, seeds: Any
    ) -> tuple[StepView, dict[str, Array]]:
        """What a model that is measured runs on: the view of a sample of seeds, and the rows of its nodes."""
        sample, x, _ = trainer.drawn(world, seeds, key)
        view = self.view(world.topology, world.data, seeds, sample)
        own = embeddings.gather({kind: view.ids[kind] for kind in embeddings.types}, dtype=jnp.float32)
        return view, {**x, **own}

    @abc.abstractmethod
    def loss(
        self, model: Any, view: StepView, x: dict[str, Array], seeds: Any, data: Any, key: Array
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """The mean loss of a step's seeds, their number, and counts to add up over an epoch.

        Args:
            model: the result of `model`, with the parameters of the step.
            view: the result of `view`.
            x: float32[nodes, width] by node type, the rows of `view.ids`.
            seeds: the seeds of the step.
            data: `world.data`.
            key: the random key for dropout.
        """

    @abc.abstractmethod
    def measures(self, trainer: Runner, state: TrainState, *, last: bool) -> dict[str, float]:
        """Points of the curves after an epoch, by split. `last`: no epoch follows."""

    @abc.abstractmethod
    def final(self, trainer: Runner, state: TrainState, *, inference: str | None = None) -> dict[str, float]:
        """The results of a finished run, by split or by measure."""

    @abc.abstractmethod
    def counts(self) -> dict[str, Any]:
        """The sizes of the graph, for the report."""

    def majority(self) -> float | None:
        """Test accuracy of the most frequent class of the training nodes; None without classes."""
        return None


def spread_over_steps(ids: np.ndarray, steps: int, batch: int) -> np.ndarray:
    """Ids in their order as int32[steps, batch]. Padding by -1 is spread, so that steps have about as many."""
    room = np.full(steps * batch, -1, np.int32)
    room[: len(ids)] = ids
    return room.reshape(batch, steps).T


def most_frequent(train: np.ndarray, test: np.ndarray, classes: int) -> float:
    """The share of test labels that are the most frequent training label; nan without test nodes."""
    if not len(test):
        return float("nan")
    return float(np.mean(test == np.bincount(train, minlength=classes).argmax()))


def log_losses(logits: Array, classes: Array) -> Array:
    """-log of the probability of each row's class, float[n], from logits [n, classes] and int32[n]."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, classes[:, None], axis=-1)[:, 0]


def cross_entropy(logits: Array, classes: Array, there: Array) -> tuple[Array, tuple[Array, dict[str, Array]]]:
    """Mean cross-entropy of some seeds, as `TrainingTask.loss` returns it, with the number of right ones as "correct".

    Args:
        logits: float[seeds, classes].
        classes: int32[seeds].
        there: bool[seeds]; False for padding.
    """
    each = log_losses(logits, jnp.where(there, classes, 0))
    count = there.sum(dtype=jnp.int32)
    correct = jnp.sum((logits.argmax(-1) == classes) & there, dtype=jnp.int32)
    return jnp.where(there, each, 0).sum() / jnp.maximum(count, 1), (count, {"correct": correct})
