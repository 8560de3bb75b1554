"""What columns and relations contribute to a trained model of tables: how much worse it is without each of them.

A column's values are permuted among the rows of its table (Breiman, 2001). A relation's edges are taken out. The model
is not trained again, so of two columns that say the same neither may seem to matter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.datasets import HeteroDataset
from dejax.host_gather import HostTable
from dejax.minibatch import FeatureStore, HeteroTopology
from dejax.training.metrics import LOWER_IS_BETTER
from dejax.training.state import TrainState
from dejax.training.tables.encoders import apart_name
from dejax.training.tables.seed_times import is_latest
from dejax.training.tables.task import TableTask


def importance(
    trainer: Any, state: TrainState, split: str = "valid", *, examples: int = 2000, seed: int = 0
) -> dict[str, dict[str, float]]:
    """By how much the first measure of a split becomes worse without each column and each relation.

    Args:
        trainer: a trainer of a `TableTask`.
        state: its parameters.
        split: which examples.
        examples: at most so many of them.
        seed: random seed of the choice of examples and of the permutations.

    Returns:
        "columns": by "table.column", and "relations": by "source, name, destination"; the largest first. A measure of
        which less is better (an error) becomes larger, others smaller; both are positive where something contributes.
    """
    task: TableTask = trainer.task
    rng = np.random.default_rng(seed)
    places = task.splits[split]
    places = np.sort(rng.choice(places, examples, replace=False)) if examples < len(places) else places

    def value(world: Any, data: HeteroDataset = task.data) -> float:
        found = task.measures_of(split, task.predict(trainer, state, places, world=world, data=data), places)
        name, first = next(iter(found.items()))
        return -first if name in LOWER_IS_BETTER else first

    world, topology = task.world, task.world.topology
    assert topology is not None
    whole = value(world)
    in_histories = {place for history in task.histories.values() for place in history.columns}
    columns = {}
    for table, plan in task.plans.items():
        for place in plan.columns:
            name = apart_name(table, place.name) if place.apart else table
            if name not in world.features.types:
                continue
            changed = np.array(task.packed[name])
            some = slice(place.first, place.first + place.width)
            order = rng.permutation(len(changed))
            changed[:, some] = changed[order, some]
            data = task.data
            if (table, place.name) in in_histories:
                data = with_permuted(data, table, place.name, order)
            features = world.features | FeatureStore.from_arrays(
                {name: changed}, on_device=task.settings.place == "device"
            )
            columns[f"{table}.{place.name}"] = whole - value(dataclasses.replace(world, features=features), data)
    relations = {
        ", ".join(edge_type): whole - value(dataclasses.replace(world, topology=without(topology, number)))
        for number, edge_type in enumerate(topology.edge_types)
        if not is_latest(edge_type)  # its edges are edges of another one, too
    }
    return {"columns": _sorted(columns), "relations": _sorted(relations)}


def without(topology: HeteroTopology, number: int) -> HeteroTopology:
    """The topology of a `TableTask` whose relation of this number is not known at any cutoff.

    All edges have times there. Sizes stay, so nothing is compiled again.
    """
    relation = topology.relations[number]
    lists = list(topology.lists)
    own = lists[relation.lists]
    assert own.times is not None
    on_device = isinstance(own.times, jax.Array)
    times = np.array(own.times if isinstance(own.times, jax.Array) else own.times.numpy())
    times[relation.first_edge : relation.first_edge + relation.num_edges] = np.iinfo(times.dtype).max
    placed = jnp.asarray(times) if on_device else HostTable.from_numpy(times)
    lists[relation.lists] = dataclasses.replace(own, times=placed)
    return dataclasses.replace(topology, lists=tuple(lists))


def with_permuted(data: HeteroDataset, table: str, name: str, order: np.ndarray) -> HeteroDataset:
    """The tables with the values of a column in another order; each keeps the time from which it is known."""
    column = data.columns[table][name]
    own = {**data.columns[table], name: dataclasses.replace(column.take(order), known_at=column.known_at)}
    return dataclasses.replace(data, columns={**data.columns, table: own}, check=False)


def _sorted(found: dict[str, float]) -> dict[str, float]:
    return dict(sorted(found.items(), key=lambda item: -item[1]))
