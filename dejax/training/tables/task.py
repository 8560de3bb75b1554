"""The task "tables": a `Task` of a data set with columns, on mini-batches in which no row is later than its cutoff."""

from __future__ import annotations

import dataclasses
import warnings
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
from dejax.training.tables.encoders import apart_name
from dejax.training.tables.history import RowHistory, linear_baseline
from dejax.training.tables.models import TableModel
from dejax.training.tables.rows import ColumnPlace, TablePlan, apart, pack
from dejax.training.tables.seed_times import Clock, is_latest, topology_in_time
from dejax.training.tables.tree_attention import days_between
from dejax.training.tasks.task import (
    CAPACITY_BATCHES,
    Runner,
    StepView,
    TrainingTask,
    World,
    digest_of,
    log_losses,
    spread_over_steps,
)

with optional("flax", of="dejax.training"):
    from flax import nnx


_MOST_OF_BASELINE = 50_000
_MOST_OF_HISTORY = 50_000  # training examples to which its columns are fitted
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
    ) -> None:
        self.settings, self.options, self.data = settings, options, data
        self.examples = examples = task_of(data, settings.target)
        self.splits = {name: np.asarray(places) for name, places in examples.splits.items()}
        self._check_labels()
        self.measure = _MEASURES[examples.kind].format(k=settings.top)
        self.embedded: dict[str, int] = {}
        self.clock = Clock.of(examples.times, f"cutoffs of task {examples.name!r}")
        self.until = until = examples.times[self.splits["train"]].max() + 1
        both = {
            table: pack(
                data.columns.get(table, {}),
                data.known_from.get(table),
                until,
                hidden=[column for other, column in examples.hidden if other == table],
                bins=settings.bins,
                day=self.clock.day,
            )
            for table in data.num_nodes
        }
        self.plans = {table: plan for table, (_, plan) in both.items()}
        self.packed = {table: rows for table, (rows, plan) in both.items() if plan.width and len(rows)}
        self.table_of = {
            apart_name(table, place.name): table for table, plan in self.plans.items() for place in plan.apart
        }
        for table, plan in self.plans.items():
            if data.num_nodes[table]:
                vectors = apart(data.columns.get(table, {}), plan)
                self.packed |= {apart_name(table, column): values for column, values in vectors.items()}
        topology = topology_in_time(data, self.clock, latest=settings.recent, on_host=settings.place != "device")
        features = FeatureStore.from_arrays(self.packed, on_device=settings.place == "device")
        self.world = World(topology, features, {**self._labels(), "known": self._known_from()})
        self._train = self._trained_on(print_table)
        self.histories = self._histories(topology)
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

    def _histories(self, topology: HeteroTopology) -> dict[str, RowHistory]:
        """The history of each table's seeds, if it differs among training examples."""
        some = self._train[:: -(-len(self._train) // _MOST_OF_HISTORY)]
        ids, times = self._ids_and_times(some, np.random.default_rng(0))
        found = {}
        for table, rows in ids.items():
            history = RowHistory.of(self.data, topology, table)
            numbers = history.numbers_of(topology, rows, times[table])
            found[table] = history.fitted(numbers[rows >= 0], self.settings.bins)
        return {table: history for table, history in found.items() if history.kept}

    def _labels(self) -> dict[str, Array]:
        """The labels as the loss reads them; sets what it scales them by."""
        examples, train = self.examples, self.splits["train"]
        self.center, self.scale = 0.0, 1.0
        self._class_weights = np.ones(self.outputs if self._is_classes else 2, np.float32)
        if examples.kind == "regression":
            labels = examples.labels.astype(np.float64)  # float32 would round those that lie far from 0
            self.center, self.scale = float(labels[train].mean()), float(labels[train].std()) or 1.0
            return {"labels": jnp.asarray((labels - self.center) / self.scale, jnp.float32)}
        labels = examples.labels.astype(np.int32)
        if self.settings.class_weights == "balanced":
            counts = np.bincount(labels[train], minlength=len(self._class_weights))
            self._class_weights = (len(train) / (len(counts) * np.maximum(counts, 1))).astype(np.float32)
        return {"labels": jnp.asarray(labels)}

    def _check_labels(self) -> None:
        train = self.splits.get("train", np.zeros(0, np.int64))
        if not len(train):
            raise ValueError(
                f"task {self.examples.name!r} must have training examples, got none; move `valid_from` and `test_from`"
            )
        if self.examples.kind == "link":  # a label is a row
            return
        labels, valid = self.examples.labels[train], self.splits.get("valid", np.zeros(0, np.int64))
        if self.examples.kind == "binary" and len(valid) and np.ptp(self.examples.labels[valid]) == 0:
            warnings.warn(
                f"task {self.examples.name!r} has one class among its {len(valid):,} validation examples, of which no "
                "AUROC can be computed: training does not stop early; move `valid_from` or `test_from`",
                stacklevel=4,
            )
        if (labels == labels[0]).all():
            raise ValueError(
                f"labels of task {self.examples.name!r} must differ in training, got {labels[0].item()!r} in all "
                f"{len(train):,} examples; move `valid_from` and `test_from`, or choose another label"
            )

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
        return self._by_table(self._seeds_of(self.examples, places))

    @property
    def outputs(self) -> int:
        """Width of the model's result."""
        return len(self.examples.classes) or int(self.examples.labels.max()) + 1 if self._is_classes else 1

    @property
    def _is_classes(self) -> bool:
        return self.examples.kind == "classes"

    def model(self, key: Array) -> TableModel:
        """Encoders, relational layers, and a linear map to the outputs."""
        edge_types = self._edge_types
        more = {"day": self.clock.day, "options": self.options, "rngs": nnx.Rngs(key)}
        return TableModel(self.settings, self.plans, self._history_plans, edge_types, self.outputs, **more)

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
        return self._seeds_of(self.examples, spread_over_steps(places, self.steps_per_epoch, self._batch))

    def _seeds_of(self, examples: Task, places: np.ndarray) -> dict[str, Any]:
        """The seeds of a task's examples, by their places; -1 for padding."""
        there, entity = places >= 0, examples.entity
        ids = np.where(there, examples.rows[places], -1).astype(np.int32)
        times = {entity: self.clock.cutoffs(np.where(there, examples.times[places], examples.times[0]))}
        return {
            "ids": {entity: ids},
            "times": times,
            "places": {entity: places.astype(np.int32)},
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
        assert topology is not None
        ids, cutoffs = self._by_table(seeds)
        history = {table: own.packed(topology, ids[table], cutoffs[table]) for table, own in self.histories.items()}
        return StepView(make_blocks(sample), sample.node_ids, sample.seed_positions, lost, sample.trees, times, history)

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
        """Mean loss of the seeds: cross-entropy, or of amounts Huber's loss in deviations of the training labels."""
        raw, places = self._raw(model, view, x, seeds, key), seeds["places"][self.examples.entity]
        there, wanted = places >= 0, data["labels"][jnp.maximum(places, 0)]
        weight = there.astype(jnp.float32)
        if self.examples.kind == "regression":
            error = jnp.abs(raw[:, 0] - wanted)
            each = jnp.where(error < 1.0, error**2 / 2, error - 0.5)
        else:
            weight = weight * jnp.asarray(self._class_weights)[jnp.maximum(wanted, 0)]
            logits = raw if self._is_classes else jnp.concatenate([jnp.zeros_like(raw), raw], axis=1)
            each = log_losses(logits, jnp.maximum(wanted, 0))
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
    ) -> np.ndarray | Ranking:
        """Predictions of examples: probabilities of class 1, of each class [rows, classes], amounts, or ranked rows.

        Args:
            trainer: the trainer of the task.
            state: its parameters.
            places: int[n], which examples; None: all.
            examples: rows and cutoffs instead of the task's own, of the same entity table.
            world: what is read instead of the task's own.
        """
        examples = examples or self.examples
        places = np.arange(len(examples)) if places is None else places
        return self._predictions(trainer, state, places, examples, world or self.world)

    def _predictions(
        self, trainer: Runner, state: TrainState, places: np.ndarray, examples: Task, world: World
    ) -> np.ndarray | Ranking:
        order = np.random.default_rng(0).permutation(len(places))  # so that samples are of about one size
        found = []
        for at in range(0, len(places), self._part):
            some = places[order[at : at + self._part]]
            seeds = self._seeds_of(examples, np.pad(some, (0, self._part - len(some)), constant_values=-1))
            key = jax.random.fold_in(jax.random.key(0), at)
            found.append(self._outputs(trainer, key, state.params, world, seeds)[: len(some)])
        raw = np.concatenate([np.zeros((0, self.outputs), np.float32), *map(np.asarray, found)])
        back = np.empty_like(raw)
        back[order] = raw
        return self.in_units(back)

    def in_units(self, raw: np.ndarray) -> np.ndarray:
        """A model's outputs as probabilities, or as amounts in the labels' unit."""
        raw = raw.astype(np.float64)
        if self.examples.kind == "regression":
            return raw[:, 0] * self.scale + self.center
        if self._is_classes:
            odds = np.exp(raw - raw.max(-1, keepdims=True))
            return odds / odds.sum(-1, keepdims=True)
        return 1.0 / (1.0 + np.exp(-np.clip(raw[:, 0], -700, 700)))

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
        """The test measures of a linear model of counts and times, on at most 50,000 examples; {} of links."""
        places = self.splits.get("test", np.zeros(0, np.int64))
        if self.examples.kind == "link" or not len(places):
            return {}
        if len(places) > _MOST_OF_BASELINE:
            places = np.sort(np.random.default_rng(0).choice(places, _MOST_OF_BASELINE, replace=False))
        assert self.world.topology is not None
        history = RowHistory.of(self.data, self.world.topology, self.examples.entity)
        numbers = lambda rows, times: history.numbers_of(self.world.topology, rows, self.clock.cutoffs(times))  # noqa: E731
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
        return digest_of([columns, self._edge_types, examples, self._rows_with_parameters(), histories])

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
