"""What a model of tables reads: packed rows, the edges with times, and the names under which they lie."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from dejax.datasets import HeteroDataset
from dejax.minibatch import FeatureStore, HeteroTopology
from dejax.training.tables.encoders import apart_name
from dejax.training.tables.rows import TablePlan, apart, pack
from dejax.training.tables.seed_times import Clock, topology_in_time


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTables:
    """The tables of a data set as steps read them.

    Attributes:
        plans: where the columns of each table stand in its packed rows.
        packed: the packed rows of tables, and vectors that are tables of their own, by name in the feature store.
        table_of: the table of each of these vectors.
        topology: the edges, all with times.
        features: `packed` as a feature store.
    """

    plans: dict[str, TablePlan]
    packed: dict[str, np.ndarray]
    table_of: dict[str, str]
    topology: HeteroTopology
    features: FeatureStore

    @classmethod
    def of(
        cls,
        data: HeteroDataset,
        clock: Clock,
        until: int | float,
        *,
        hidden: Collection[tuple[str, str]],
        bins: int,
        latest: bool,
        on_host: bool,
    ) -> PreparedTables:
        """Packs tables and sorts edges.

        Args:
            data: tables as a graph.
            clock: counts the times.
            until: means, quantiles and categories are those of values that are known before this time.
            hidden: (table, column) pairs that are left out.
            bins: quantiles of a number.
            latest: as `topology_in_time`.
            on_host: whether rows and edges lie in host memory.
        """
        plans: dict[str, TablePlan] = {}
        packed: dict[str, np.ndarray] = {}
        table_of: dict[str, str] = {}
        for table in data.num_nodes:
            columns = data.columns.get(table, {})
            own = [column for other, column in hidden if other == table]
            rows, plan = pack(columns, data.known_from.get(table), until, hidden=own, bins=bins, day=clock.day)
            plans[table] = plan
            if plan.width and len(rows):
                packed[table] = rows
        for table, plan in plans.items():
            table_of |= {apart_name(table, place.name): table for place in plan.apart}
            if data.num_nodes[table]:
                vectors = apart(data.columns.get(table, {}), plan)
                packed |= {apart_name(table, column): values for column, values in vectors.items()}
        topology = topology_in_time(data, clock, latest=latest, on_host=on_host)
        return cls(plans, packed, table_of, topology, FeatureStore.from_arrays(packed, on_device=not on_host))
