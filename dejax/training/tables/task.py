"""The task "tables": a `Task` of a data set with columns, on mini-batches in which no row is later than its cutoff."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
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
from dejax.training.tables.encoders import apart_name
from dejax.training.tables.history import HistoryReader, RowHistory, as_bits, of_bits
from dejax.training.tables.labels import Labels
from dejax.training.tables.linear import MOST_FITTED, linear_baseline
from dejax.training.tables.models import TableModel
from dejax.training.tables.prepared import packed_tables, task_of
from dejax.training.tables.relevance import relevant
from dejax.training.tables.rows import TablePlan, plain, plan_of
from dejax.training.tables.seed_times import Clock, is_latest, topology_in_time
from dejax.training.tables.tree_attention import days_between
from dejax.training.tasks.task import (
    CAPACITY_BATCHES,
    Runner,
    StepView,
    TrainingTask,
    World,
    digest_of,
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
        fitted: `fitted` of the run whose states it will read; None: what the data say.

    Raises:
        ValueError: no such task, no training examples, or labels that are all equal in training; other tables, columns
            or relations than `fitted` has.
    """

    classes = False
    sampled = may_grow = True

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
        fitted: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings, self.options, self.data = settings, options, data
        self.examples = examples = task_of(data, settings.target)
        self.splits = {name: np.asarray(places) for name, places in examples.splits.items()}
        self.labels = Labels(examples, balanced=settings.class_weights == "balanced")
        self.measure = _MEASURES[examples.kind].format(k=settings.top)
        self.embedded: dict[str, int] = {}
        self.clock = Clock.of(examples.times, f"cutoffs of task {examples.name!r}")
        self.until = examples.times[self.splits["train"]].max() + 1
        self.plans, self.packed = packed_tables(
            data,
            self.until,
            examples.hidden,
            settings.bins,
            self.clock.day,
            None if fitted is None else fitted["columns"],
        )
        self.table_of = {
            apart_name(table, place.name): table for table, plan in self.plans.items() for place in plan.apart
        }
        latest: Any = settings.recent
        if fitted is not None:
            self.labels.center, self.labels.scale = fitted["labels"]
            latest = {tuple(relation) for relation in fitted["latest"]}
        topology = topology_in_time(data, self.clock, latest=latest, on_host=settings.place != "device")
        features = FeatureStore.from_arrays(self.packed, on_device=settings.place == "device")
        self.world = World(topology, features, {**self._labels(), "known": self._known_from()})
        self._train = self._trained_on(print_table)
        self._readers = self._fitted_readers(topology, fitted)
        self.histories = {table: read.history for table, read in self._readers.items()}
        self._own_history = self._history_of_examples()
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

    @property
    def fitted(self) -> dict[str, Any]:
        """What was fitted to the data before the first step, as plain values for JSON.

        Parameters have a meaning only with these means, quantiles and categories. Data that have got new rows would
        give others, even if the rows are later than all examples: rows of tables without times are always known.
        """
        return {
            "columns": {table: plain(plan) for table, plan in self.plans.items()},
            "histories": {table: plain(history.plan) for table, history in self.histories.items()},
            "latest": [list(relation) for relation in self._edge_types if is_latest(relation)],
            "labels": [self.labels.center, self.labels.scale],
        }

    def _trained_on(self, show: Callable[[str], None] | None) -> np.ndarray:
        """The numbers of the training examples, all of which an epoch visits."""
        return self.splits["train"]

    def _known_from(self) -> dict[str, Array]:
        """The times from which on rows are known, if the model reads them."""
        if self.settings.model != "relgt":
            return {}
        return {table: jnp.asarray(self.clock.relative(times)) for table, times in self.data.known_from.items()}

    def _fitted_readers(self, topology: HeteroTopology, fitted: Mapping[str, Any] | None) -> dict[str, HistoryReader]:
        """The readers of the history of each table's seeds, if it differs among training examples."""
        more = topology, self.data, self.plans
        if fitted is not None:
            plans = {table: plan_of(places) for table, places in fitted["histories"].items()}
            histories = {table: self._whole_history(topology, table).with_plan(plan) for table, plan in plans.items()}
            return {table: HistoryReader(history, *more) for table, history in histories.items()}
        some = self._train[:: -(-len(self._train) // MOST_FITTED)]
        ids, times = self._ids_and_times(some, np.random.default_rng(0))
        found = {}
        for table, rows in ids.items():
            history, there = self._whole_history(topology, table), rows >= 0
            numbers = HistoryReader(history, *more).numbers(rows[there], times[table][there])
            found[table] = history.fitted(numbers, self._wanted(history, some, numbers), self.settings.bins)
        return {table: HistoryReader(history, *more) for table, history in found.items() if history.kept}

    def _whole_history(self, topology: HeteroTopology, table: str) -> RowHistory:
        """All numbers among which those that a network reads are chosen."""
        return RowHistory.of(self.data, topology, table, self.plans)

    def _wanted(self, history: RowHistory, some: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """bool[numbers], which numbers of the history of some training examples a network reads."""
        return relevant(history, self.data, self.examples, some, numbers)

    def _readers_in(self, topology: HeteroTopology | None, data: HeteroDataset) -> dict[str, HistoryReader]:
        """The readers in a topology and in tables that stand for the task's own."""
        assert topology is not None
        if topology is self.world.topology and data is self.data:
            return self._readers
        return {t: HistoryReader(history, topology, data, self.plans) for t, history in self.histories.items()}

    def _history_of_examples(self) -> dict[str, np.ndarray]:
        """The history of all examples' seeds by table, the bits of packed rows, int32[examples, width]."""
        return self._history_of(self.examples, np.arange(len(self.examples)), self._readers)

    def _history_of(
        self, examples: Task, places: np.ndarray, readers: Mapping[str, HistoryReader]
    ) -> dict[str, np.ndarray]:
        """The same of some examples of any cutoffs, by their places int[n]."""
        rows, cutoffs = examples.rows[places], self.clock.cutoffs(examples.times[places])
        return {table: as_bits(read.packed(rows, cutoffs)) for table, read in readers.items()}

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
        return self._by_table(self._seeds_of(self.examples, places, {}))

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
        places = spread_over_steps(rng.permutation(self._train), self.steps_per_epoch, self._batch)
        return self._seeds_of(self.examples, places, _at(places, self._own_history))

    def _seeds_of(self, examples: Task, places: np.ndarray, history: dict[str, np.ndarray]) -> dict[str, Any]:
        """The seeds of a task's examples, by their places, with their history; -1 for padding."""
        there, entity = places >= 0, examples.entity
        ids = np.where(there, examples.rows[places], -1).astype(np.int32)
        times = {entity: self.clock.cutoffs(np.where(there, examples.times[places], examples.times[0]))}
        return {
            "ids": {entity: ids},
            "times": times,
            "places": {entity: places.astype(np.int32)},
            "history": history,
        }

    def sample(self, key: Array, topology: HeteroTopology, seeds: Any) -> SampledBlocks:
        """As any task's; the ids of a table stand also under the names of its vectors, so that they are read."""
        found = super().sample(key, topology, seeds)
        more = {name: found.node_ids[table] for name, table in self.table_of.items()}
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
                if table not in self.table_of
            }
        history = {table: of_bits(bits) for table, bits in self._history_by_table(seeds).items()}
        return StepView(make_blocks(sample), sample.node_ids, sample.seed_positions, lost, sample.trees, times, history)

    def _history_by_table(self, seeds: Any) -> dict[str, Array]:
        """The history of a step's seeds by table, the bits of packed rows, int32[seeds, width]."""
        found: dict[str, Array] = seeds["history"]
        return found

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
        return found[entity][view.positions[entity]]

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
            data: the tables whose columns histories tell instead of the task's own.
        """
        examples, world = examples or self.examples, world or self.world
        places = np.arange(len(examples)) if places is None else places
        readers = self._readers_in(world.topology, data or self.data)
        return self._predictions(trainer, state, places, examples, world, readers)

    def _predictions(
        self,
        trainer: Runner,
        state: TrainState,
        places: np.ndarray,
        examples: Task,
        world: World,
        readers: Mapping[str, HistoryReader],
    ) -> np.ndarray | Ranking:
        if examples is self.examples and readers is self._readers:
            history = _at(places, self._own_history)
        else:
            history = self._history_of(examples, places, readers)
        order = np.random.default_rng(0).permutation(len(places))  # so that samples are of about one size
        found = []
        for at in range(0, len(places), self._part):
            own = order[at : at + self._part]
            some = np.pad(own, (0, self._part - len(own)), constant_values=-1)
            seeds = self._seeds_of(examples, np.where(some >= 0, places[some], -1), _at(some, history))
            key = jax.random.fold_in(jax.random.key(0), at)
            found.append(self._outputs(trainer, key, state.params, world, seeds)[: len(own)])
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
        places, most = self.splits.get("valid", np.zeros(0, np.int64)), self.settings.eval_rows
        if self.examples.kind == "link":  # those without links have no measure
            places = places[labels_of(self.examples, places) > 0]
        if not len(places):
            return {}
        if most and most < len(places):
            places = np.sort(np.random.default_rng(1).choice(places, most, replace=False))
        predicted = self.predict(trainer, trainer.on_one_device(state), places)
        return {"valid": next(iter(self.measures_of("valid", predicted, places).values()))}

    def final(self, trainer: Runner, state: TrainState, *, inference: str | None = None) -> dict[str, float]:
        """All measures of the test examples."""
        places = self.splits.get("test", np.zeros(0, np.int64))
        return self.measures_of("test", self.predict(trainer, state, places))

    def linear_measures(self) -> dict[str, float]:
        """The test measures of a linear model of row and history, on at most 50,000 examples; {} of links."""
        places = self.splits.get("test", np.zeros(0, np.int64))
        if self.examples.kind == "link" or not len(places):
            return {}
        if len(places) > MOST_FITTED:
            places = np.sort(np.random.default_rng(0).choice(places, MOST_FITTED, replace=False))
        read = self._readers.get(self.examples.entity)

        def numbers(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
            return np.zeros((len(rows), 0)) if read is None else read.packed(rows, self.clock.cutoffs(times))

        return self.measures_of("test", linear_baseline(self.data, self.examples, places, numbers), places)

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
        """A digest of the columns, categories, relations, classes and last training cutoff that parameters belong to.

        Rows that are known after that cutoff change nothing in it. Of data without times, whose examples are split at
        random, it has the number of training examples: with more rows, others would be for tests.
        """
        columns = [
            [table, place.name, place.kind, place.width, place.known is not None, place.categories]
            for table, plan in self.plans.items()
            for place in plan.columns
        ]
        examples = [self.examples.entity, self.examples.target, self.examples.classes, int(self.until)]
        split = [] if np.ptp(self.examples.times) else [len(self.splits["train"])]
        histories = [
            [table, [place.name for place in history.plan.columns]] for table, history in self.histories.items()
        ]
        return digest_of([columns, self._edge_types, examples, split, self._rows_with_parameters(), histories])

    def _rows_with_parameters(self) -> str:
        """A digest of the rows that have parameters of their own; "" for none."""
        return ""

    @property
    def _edge_types(self) -> tuple[tuple[str, str, str], ...]:
        assert self.world.topology is not None
        return self.world.topology.edge_types


def _at(places: np.ndarray, history: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The history of examples by their places int[...]; any for -1."""
    return {table: counts[places] for table, counts in history.items()}
