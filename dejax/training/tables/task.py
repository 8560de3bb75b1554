"""The task "tables": a `Task` of a data set with columns, on mini-batches in which no row is later than its cutoff."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._optional import optional
from dejax.datasets import HeteroDataset, Task
from dejax.minibatch import (
    FeatureStore,
    HeteroTopology,
    SampledBlocks,
    SampleOptions,
    find_capacities,
    make_blocks,
)
from dejax.rgnn import Options
from dejax.training.command.predictions import labels_of
from dejax.training.metrics import Ranking, measure
from dejax.training.settings import Settings
from dejax.training.state import TrainState
from dejax.training.tables.history import RowHistory
from dejax.training.tables.labels import Labels
from dejax.training.tables.models import TableModel
from dejax.training.tables.prepared import PreparedTables
from dejax.training.tables.rows import ColumnPlace, TablePlan
from dejax.training.tables.seed_inputs import ExampleInputs, SeedInputs, as_bits, of_bits
from dejax.training.tables.seed_times import Clock, is_latest
from dejax.training.tables.tree_attention import days_between
from dejax.training.tasks.task import (
    CAPACITY_BATCHES,
    Runner,
    StepView,
    TrainingTask,
    World,
    spread_over_steps,
)

with optional("flax", of="dejax.training"):
    from flax import nnx


_MEASURES = {"binary": "auroc", "classes": "accuracy", "regression": "mae", "link": "map@{k}"}


class TableTask(TrainingTask):
    """Predictions about rows of a table, as of cutoff times.

    Args:
        settings: model and hyperparameters; `settings.target` names one of the data set's tasks.
        data: tables as a graph, with `columns` and `tasks`.
        options: options of the compiler.
        print_table: takes the table of capacities as text; None for no table.

    Raises:
        ValueError: no such task, no training examples, or labels that are all equal in training.
    """

    classes = False
    sampled = True

    @property
    def lower_is_better(self) -> bool:
        """Errors of amounts."""
        return self.examples.kind == "regression"

    def __init__(
        self,
        settings: Settings,
        data: HeteroDataset,
        options: Options,
        print_table: Callable[[str], None] | None = None,
    ) -> None:
        self.settings, self.options, self.data = settings, options, data
        self.examples = examples = task_of(data, settings.target)
        self.splits = {name: np.asarray(places) for name, places in examples.splits.items()}
        self.labels = Labels(examples, balanced=settings.class_weights == "balanced")
        self.measure = _MEASURES[examples.kind].format(k=settings.top)
        self.embedded: dict[str, int] = {}
        self.clock = Clock.of(examples.times, f"cutoffs of task {examples.name!r}")
        self.until = until = examples.times[self.splits["train"]].max() + 1
        self.prepared = prepared = PreparedTables.of(
            data,
            self.clock,
            until,
            hidden=examples.hidden,
            bins=settings.bins,
            latest=settings.recent,
            on_host=settings.place != "device",
        )
        self.plans, self.packed, topology = prepared.plans, prepared.packed, prepared.topology
        self.world = World(topology, prepared.features, {**self._labels(), "known": self._known_from()})
        self._train = self._trained_on(print_table)
        self.histories = {table: own for table, own in self._histories().items() if own.kept}
        self.seeds_per_epoch = train = len(self._train)
        self.steps_per_epoch = -(-train // settings.batch_size)
        self._part = -(-train // (self.steps_per_epoch * settings.parts))
        self._batch = self._part * settings.parts
        self.sample_options = SampleOptions(recent=settings.recent, max_degree=512)
        batches = self._capacity_batches()
        times = {id(seeds): cutoffs for seeds, cutoffs in batches}
        self.capacities = find_capacities(
            jax.random.key(0),
            topology,
            [seeds for seeds, _ in batches],
            self.fan_outs,
            sigmas=settings.sigmas,
            print_table=print_table,
            seed_times=lambda seeds: times[id(seeds)],
            options=self.sample_options,
        )
        self._outputs = jax.jit(self._outputs_of, static_argnums=0)

    def _trained_on(self, show: Callable[[str], None] | None) -> np.ndarray:
        """The numbers of the training examples, all of which an epoch visits."""
        return self.splits["train"]

    def _known_from(self) -> dict[str, Array]:
        """The times from which on rows are known, if the model reads them."""
        if self.settings.model != "relgt":
            return {}
        return {table: jnp.asarray(self.clock.relative(times)) for table, times in self.data.known_from.items()}

    def _histories(self) -> dict[str, RowHistory]:
        """The history of each table's seeds."""
        bins = self.settings.bins
        self.seed_inputs = SeedInputs(self.data, self.prepared, self.clock, self.examples, self.labels, bins)
        return {self.examples.entity: self.seed_inputs.history}

    def _labels(self) -> dict[str, Array]:
        """The labels as the loss reads them."""
        return {"labels": jnp.asarray(self.labels.values)}

    def _capacity_batches(self) -> list[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Examples of each split in turn: later ones see more."""
        rng = np.random.default_rng(0)
        splits = [places for places in self.splits.values() if len(places)]
        found = []
        for number in range(CAPACITY_BATCHES):
            found.append(self._ids_and_times(rng.choice(splits[number % len(splits)], self._part), rng))
        return found

    def _ids_and_times(self, places: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
        """The ids and times by table of seeds, by their places as in `_trained_on`."""
        return self._by_table(self._seeds_of(self.examples, places, self.seed_inputs.own))

    def model(self, key: Array) -> TableModel:
        """Encoders, relational layers, and a linear map to the outputs."""
        edge_types = self._edge_types
        more = {"day": self.clock.day, "options": self.options, "rngs": nnx.Rngs(key)}
        return TableModel(self.settings, self.plans, self._history_plans, edge_types, self.labels.outputs, **more)

    @property
    def _history_plans(self) -> dict[str, TablePlan]:
        return {table: history.plan for table, history in self.histories.items()}

    @property
    def fan_outs(self) -> list[dict[tuple[str, str, str], int]]:
        """By relation: those of the settings, and 1 for the latest edges alone, where that differs."""
        return [
            {name: int(most != 1) if is_latest(name) else most for name in self._edge_types}
            for most in self.settings.fan_outs
        ]

    # -------------------------------------------------------------------------------------------- a step

    def order(self, seed: int, epoch: int) -> Any:
        """The training examples of an epoch in random order: rows, cutoffs, and places of labels."""
        rng = np.random.default_rng([seed, epoch])
        places = rng.permutation(self._train)
        places = spread_over_steps(places, self.steps_per_epoch, self._batch)
        return self._seeds_of(self.examples, places, self.seed_inputs.own.of(places))

    def _seeds_of(self, examples: Task, places: np.ndarray, inputs: ExampleInputs) -> dict[str, Any]:
        """The seeds of a task's examples, by their places, and their inputs; -1 for padding."""
        there, entity = places >= 0, examples.entity
        ids = np.where(there, examples.rows[places], -1).astype(np.int32)
        times = {entity: self.clock.cutoffs(np.where(there, examples.times[places], examples.times[0]))}
        return {
            "ids": {entity: ids},
            "times": times,
            "places": {entity: places.astype(np.int32)},
            "history": {entity: as_bits(inputs.history)} if entity in self.histories else {},
            "offsets": as_bits(inputs.offsets),
        }

    def sample(self, key: Array, topology: HeteroTopology, seeds: Any) -> SampledBlocks:
        """As any task's; the ids of a table stand also under the names of its vectors, so that they are read."""
        found = super().sample(key, topology, seeds)
        more = {name: found.node_ids[table] for name, table in self.prepared.table_of.items()}
        return dataclasses.replace(found, node_ids={**found.node_ids, **more}) if more else found

    def view(self, topology: HeteroTopology | None, data: Any, seeds: Any, sample: SampledBlocks | None) -> StepView:
        """The blocks of the sample, and the seed of each node."""
        assert sample is not None
        lost = sample.lost.sum(dtype=jnp.int32) + sample.lost_edges.astype(jnp.int32)
        times = None
        if self.settings.model == "relgt":
            always = jnp.iinfo(jnp.int32).min
            times = {
                table: data["known"][table][jnp.maximum(ids, 0)]
                if table in data["known"]
                else jnp.full(ids.shape, always, jnp.int32)
                for table, ids in sample.node_ids.items()
                if table not in self.prepared.table_of
            }
        history = self._history_by_table(seeds)
        return StepView(make_blocks(sample), sample.node_ids, sample.seed_positions, lost, sample.trees, times, history)

    def _history_by_table(self, seeds: Any) -> dict[str, Any]:
        """The packed history of a step's seeds by table, float32[seeds, width]."""
        return {table: of_bits(bits) for table, bits in seeds["history"].items()}

    def _by_table(self, seeds: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The ids and times of a step's seeds by table."""
        return seeds["ids"], seeds["times"]

    def _raw(self, model: TableModel, view: StepView, x: Any, seeds: Any, key: Array | None) -> Array:
        """The model's outputs for the seeds, [seeds, outputs]."""
        entity = self.examples.entity
        cutoffs, more = self._of_trees(view, seeds["times"][entity])
        deterministic = key is None or not self.settings.dropout
        rngs = None if key is None else nnx.Rngs(dropout=key)
        found = model(view.graphs, x, cutoffs, **more, deterministic=deterministic, rngs=rngs)
        return found[entity][view.positions[entity]] + of_bits(seeds["offsets"])

    def _of_trees(self, view: StepView, of_seeds: Array) -> tuple[dict[str, Array], dict[str, Any]]:
        """The cutoff of each sampled row, and what else a model reads of the seeds' trees."""
        assert view.trees is not None
        cutoffs = {table: of_seeds[jnp.maximum(tree, 0)] for table, tree in view.trees.items()}
        more: dict[str, Any] = {"history": view.history}
        if view.times is not None:
            days = {table: days_between(times, cutoffs[table]) for table, times in view.times.items()}
            more |= {"trees": view.trees, "days": days}
        return cutoffs, more

    def loss(
        self, model: Any, view: StepView, x: dict[str, Array], seeds: Any, data: Any, key: Array
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """Mean loss of the seeds, of `Labels.losses`."""
        raw, places = self._raw(model, view, x, seeds, key), seeds["places"][self.examples.entity]
        there = places >= 0
        each, counted = self.labels.losses(raw, data["labels"][jnp.maximum(places, 0)])
        weight = jnp.where(there, counted, 0.0)
        total = weight.sum()
        return jnp.where(there, each * weight, 0.0).sum() / jnp.maximum(total, 1e-9), (total, {})

    # -------------------------------------------------------------------------------------------- predictions

    def _outputs_of(self, trainer: Runner, key: Array, params: Any, world: World, seeds: Any) -> Array:
        view, x = self.seen(trainer, key, FeatureStore(), world, seeds)
        return self._raw(trainer.merged(params), view, x, seeds, None)

    def predict(
        self,
        trainer: Runner,
        state: TrainState,
        places: np.ndarray | None = None,
        *,
        examples: Task | None = None,
        world: World | None = None,
        data: HeteroDataset | None = None,
    ) -> np.ndarray | Ranking:
        """Predictions of examples: probabilities of class 1, of each class [rows, classes], amounts, or ranked rows.

        Args:
            trainer: the trainer of the task.
            state: its parameters.
            places: int[n], which examples; None: all.
            examples: rows and cutoffs instead of the task's own, of the same entity table.
            world: what is read instead of the task's own.
            data: the tables from whose columns histories are computed, instead of the task's own.
        """
        examples = examples or self.examples
        places = np.arange(len(examples)) if places is None else places
        return self._predictions(trainer, state, places, examples, world or self.world, data or self.data)

    def _predictions(
        self, trainer: Runner, state: TrainState, places: np.ndarray, examples: Task, world: World, data: HeteroDataset
    ) -> np.ndarray | Ranking:
        if examples is self.examples and world is self.world and data is self.data:
            inputs = self.seed_inputs.own.of(places)
        else:
            assert world.topology is not None
            inputs = self.seed_inputs.of(data, world.topology, examples, places)
        order = np.random.default_rng(0).permutation(len(places))  # so that samples are of about one size
        found = []
        for at in range(0, len(places), self._part):
            some = np.pad(order[at : at + self._part], (0, max(0, at + self._part - len(places))))
            padded = np.where(np.arange(self._part) < len(places) - at, places[some], -1)
            seeds = self._seeds_of(examples, padded, inputs.of(some))
            key = jax.random.fold_in(jax.random.key(0), at)
            found.append(self._outputs(trainer, key, state.params, world, seeds)[: len(places) - at])
        raw = np.concatenate([np.zeros((0, self.labels.outputs), np.float32), *map(np.asarray, found)])
        back = np.empty_like(raw)
        back[order] = raw
        return self.labels.in_units(back)

    def predicted(self, trainer: Runner, state: TrainState) -> dict[str, np.ndarray | Ranking]:
        """The predictions of the validation and the test examples."""
        none = np.zeros(0, np.int64)
        return {split: self.predict(trainer, state, self.splits.get(split, none)) for split in ("valid", "test")}

    def measures_of(
        self, split: str, predicted: np.ndarray | Ranking, places: np.ndarray | None = None
    ) -> dict[str, float]:
        """The measures of a split's predictions, or of those of some of its examples; {} without any."""
        places = self.splits.get(split, np.zeros(0, np.int64)) if places is None else places
        return measure(self.examples.kind, labels_of(self.examples, places), predicted) if len(places) else {}

    def measures(self, trainer: Runner, state: TrainState, *, last: bool) -> dict[str, float]:
        """The first measure of the validation examples, or of `Settings.eval_rows` of them, the same each time."""
        places = self._places_of_measures()
        if not len(places):
            return {}
        predicted = self.predict(trainer, trainer.on_one_device(state), places)
        return {"valid": next(iter(self.measures_of("valid", predicted, places).values()))}

    def first_measures(self) -> dict[str, float]:
        """`measures` of the linear model, whose outputs are those of a network before its first step."""
        import os

        places = self._places_of_measures()
        if not len(places) or os.environ.get("LIN_START", "1") == "0":
            return {}
        return {"valid": next(iter(self.measures_of("valid", self._linear(places), places).values()))}

    def _places_of_measures(self) -> np.ndarray:
        places, most = self.splits.get("valid", np.zeros(0, np.int64)), self.settings.eval_rows
        if self.examples.kind == "link":  # those without links have no measure
            places = places[labels_of(self.examples, places) > 0]
        if most and most < len(places):
            places = np.sort(np.random.default_rng(1).choice(places, most, replace=False))
        return places

    def final(self, trainer: Runner, state: TrainState, *, inference: str | None = None) -> dict[str, float]:
        """All measures of the test examples."""
        places = self.splits.get("test", np.zeros(0, np.int64))
        return self.measures_of("test", self.predict(trainer, state, places))

    def linear_measures(self) -> dict[str, float]:
        """The test measures of the linear model of each example's row and history; {} of links."""
        places = self.splits.get("test", np.zeros(0, np.int64))
        return self.measures_of("test", self._linear(places)) if len(places) else {}

    def _linear(self, places: np.ndarray) -> np.ndarray:
        """The linear model's predictions of examples of later splits."""
        return self.labels.in_units(self.seed_inputs.own.offsets[places])

    def counts(self) -> dict[str, Any]:
        """The sizes of the tables, for the report."""
        topology = self.world.topology
        assert topology is not None
        return {
            "nodes": sum(topology.num_nodes.values()),
            "edges": sum(len(ends[0]) for ends in self.data.edges.values()),
            "edge_types": len(self.data.edges),
            "node_types": len(topology.node_types),
            "features": {table: len(plan.columns) for table, plan in self.plans.items()},
            "split_sizes": {name: len(places) for name, places in self.splits.items()},
        }

    @property
    def layout_of_data(self) -> str:  # type: ignore[override]
        """A digest of the tables, columns, categories, relations and classes that parameters belong to, in their order.

        Rows that are known after the last training cutoff change nothing in it.
        """
        columns = [
            [table, place.name, place.kind, place.width, place.known, self._categories(table, place)]
            for table, plan in self.plans.items()
            for place in plan.columns
        ]
        examples = [self.examples.entity, self.examples.target, self.examples.classes]
        histories = [
            [table, [place.name for place in history.plan.columns]] for table, history in self.histories.items()
        ]
        said = json.dumps([columns, self._edge_types, examples, self._rows_with_parameters(), histories])
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def _rows_with_parameters(self) -> str:
        """A digest of the rows that have parameters of their own; "" for none."""
        return ""

    def _categories(self, table: str, place: ColumnPlace) -> tuple[str, ...]:
        """The categories of a column that have parameters of their own."""
        return self.data.columns[table][place.name].categories[: place.codes]

    @property
    def _edge_types(self) -> tuple[tuple[str, str, str], ...]:
        assert self.world.topology is not None
        return self.world.topology.edge_types


def task_of(data: HeteroDataset, name: str | None) -> Task:
    """The task of a data set of this name, or its only one.

    Raises:
        ValueError: there is none, or several and no name.
    """
    tasks = data.tasks
    if not tasks:
        raise ValueError(f"dataset {data.name!r} must have a task, got none; make one with dejax.datasets")
    if (name is None and len(tasks) > 1) or (name is not None and name not in tasks):
        raise ValueError(
            f"target must be one of the tasks {', '.join(tasks)}, got {name!r}; give its name (on the command line "
            "--target NAME)"
        )
    return next(iter(tasks.values())) if name is None else tasks[name]


def training_examples(data: HeteroDataset, name: str | None) -> int:
    """The number of training examples of `task_of`, or of a link task that of their links."""
    task = task_of(data, name)
    places = task.splits.get("train", np.zeros(0, np.int64))
    return len(places) if task.offsets is None else int(labels_of(task, places).sum())
