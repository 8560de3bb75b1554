"""The history of rows as of cutoffs: how many rows refer to each, since when, and what stands in their columns.

A sample ends at its fan-out and a mean cannot count, so networks read the history of the rows that they are asked
about, and so does the linear model beside them. It is computed on the host, once for all examples of a task.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dejax.datasets import HeteroDataset
from dejax.datasets.columns import Column
from dejax.minibatch import HeteroTopology
from dejax.minibatch.topology.hetero_topology import EdgeType, as_numpy
from dejax.training.tables.rows import TablePlan, pack
from dejax.training.tables.seed_times import DAY, is_latest

_WINDOWS = (30, 90, 365)
"""Days before the cutoff within which rows are counted."""
_WINDOWS_OF_REFERRED = (30,)
"""The same for the means of columns of rows that refer to a row that an example refers to."""
_MOST_COLUMNS = 16  # of a relation: each is up to eight numbers of every example
_UNIT = float(1 << 20)  # sums are whole numbers of 1 / _UNIT deviations, so that they are exact in any order
_ALWAYS = np.iinfo(np.int32).min


@dataclass(frozen=True, slots=True)
class _Relation:
    """The numbers from the edges of one relation.

    Attributes:
        edge_type: the relation, to the table itself or to one that it refers to.
        key: the foreign key that leads to the relation's table; None: it is the table itself.
        timed: whether the edges have times.
        columns: the columns of the rows that refer whose sums and means are taken, all known with the edge.
    """

    edge_type: EdgeType
    key: str | None
    timed: bool
    columns: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """What each number says, in their order."""
        at = "" if self.key is None else f"{self.key}: "
        of_windows = [f"of the last {days} days" for days in self.windows]
        found = ["rows"]
        if self.timed:
            found += ["days since the last", *(f"rows of the last {days} days" for days in _WINDOWS)]
        for column in self.columns:
            means = [f"mean {column}", *(f"mean {column} {window}" for window in of_windows)]
            sums = [f"sum of {column}", *(f"sum of {column} {window}" for window in of_windows)]
            found += means if self.key is not None else means + sums
        return [f"{at}{', '.join(self.edge_type)}: {what}" for what in found]

    @property
    def windows(self) -> tuple[int, ...]:
        """Days before the cutoff, of the sums and means."""
        return () if not self.timed else _WINDOWS if self.key is None else _WINDOWS_OF_REFERRED


@dataclass(frozen=True, slots=True)
class RowHistory:
    """Numbers that tell the history of a table's rows as of cutoffs, from the edges that lead to them.

    Of each relation to the table: log(1 + its known edges), in all and of the last 30, 90 and 365 days, and log(1 +
    days) since the last one. Of each numeric column of the rows that refer, and of each with two categories: its mean
    over the same edges, and its sum s as sign(s) log(1 + |s|), in deviations of the column. The same, with fewer
    windows and without sums, of the rows to which the table's own foreign keys lead. Edges are those that samples are
    drawn from, up to the same cutoffs, and a column that is known later than its row enters from then on. So nothing
    later than the cutoff enters.

    Attributes:
        table: whose rows.
        relations: where the numbers come from.
        day: the length of a day in the times' unit.
        names: what each number says.
        kept: the numbers that differ among training examples, which a network reads.
        plan: their columns in packed rows.
    """

    table: str
    relations: tuple[_Relation, ...]
    day: int
    kept: tuple[int, ...] = ()
    plan: TablePlan = dataclasses.field(default_factory=lambda: TablePlan((), 0, 0))

    @property
    def names(self) -> tuple[str, ...]:
        """What each number says."""
        return tuple(name for relation in self.relations for name in relation.names)

    @classmethod
    def of(
        cls,
        data: HeteroDataset,
        topology: HeteroTopology,
        table: str,
        plans: Mapping[str, TablePlan],
        *,
        referred: bool = True,
    ) -> RowHistory:
        """That of a table's rows.

        Args:
            data: tables as a graph.
            topology: its edges, of `topology_in_time`.
            table: the name of the table.
            plans: the packed columns of each table: others are hidden.
            referred: whether the rows to which the table's foreign keys lead have theirs, too.
        """
        own: list[tuple[str | None, str]] = [(None, table)]
        if referred:
            counts = topology.num_edges
            own += [(name, to) for of, name, to in counts if of == table and counts.get((to, f"rev_{name}", of))]
        found = []
        for key, to in own:
            for relation in topology.relations:
                source, name, target = edge_type = relation.edge_type
                of_own_key = name.startswith("rev_") and (target, name.removeprefix("rev_"), source) in data.edges
                if target != to or not relation.num_edges or is_latest(edge_type) or of_own_key:
                    continue
                columns = tuple(_columns_known_with(data, edge_type, plans[source]))
                found.append(_Relation(edge_type, key, edge_type in data.edge_times, columns[:_MOST_COLUMNS]))
        return cls(table, tuple(found), day_of(data))

    def fitted(self, numbers: np.ndarray, bins: int, times: np.ndarray) -> RowHistory:
        """With the columns of packed rows, by the numbers of some training examples, float[examples, numbers]."""
        differ = [len(own) and not np.array_equal(own, np.full_like(own, own[0]), equal_nan=True) for own in numbers.T]
        if os.environ.get("LIN_RULE", "eta") == "eta":
            differ = np.array(differ, bool) & (_told_by_time(numbers, times) < 0.1)
        chosen, names = np.flatnonzero(differ), self.names
        if each := int(os.environ.get("LIN_EACH", "0")):
            rank = [(": mean " in names[n] or ": sum of " in names[n]) + 2 * (names[n].count(": ") > 1) for n in chosen]
            chosen = np.sort(chosen[np.argsort(rank, kind="stable")[: max(1, len(numbers) // each)]])
        kept = tuple(chosen.tolist())
        columns = {names[n]: Column("number", numbers[:, n].astype(np.float64), np.isnan(numbers[:, n])) for n in kept}
        return dataclasses.replace(self, kept=kept, plan=pack(columns, None, None, bins=bins)[1])

    def packed(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers that are kept as packed rows of `plan`, float32[rows, width], from float[rows, numbers]."""
        mean, deviation = (
            np.array([getattr(place, name)[0] for place in self.plan.columns], np.float32)
            for name in ("mean", "deviation")
        )
        found: np.ndarray = (numbers[:, list(self.kept)].astype(np.float32) - mean) / deviation
        return found


class HistoryReader:
    """Computes the numbers of a `RowHistory`, from edges and columns.

    Args:
        history: which numbers.
        data: the columns, and the foreign keys of the table.
        topology: the edges, of `topology_in_time`.
        plans: the packed columns of each table, whose means and deviations are the units of sums.

    >>> import numpy as np
    >>> from dejax.datasets import from_tables
    >>> from dejax.training.tables.seed_times import Clock, topology_in_time
    >>> orders = {"user": [7, 8, 7], "day": [1, 2, 6]}
    >>> data = from_tables({"users": {"id": [7, 8]}, "orders": orders}, {"users": "id"}, [("orders", "user", "users")],
    ...                    {"orders": "day"})
    >>> topology = topology_in_time(data, Clock(), latest=False, on_host=True)
    >>> plans = dict.fromkeys(data.num_nodes, TablePlan((), 0, 0))
    >>> history = RowHistory.of(data, topology, "users", plans)
    >>> found = HistoryReader(history, data, topology, plans)(np.array([0, 0, 1]), np.array([5, 6, 6]))
    >>> np.expm1(found[:, :2]).round()  # rows, and days since the last
    array([[1., 4.],
           [2., 0.],
           [1., 4.]], dtype=float32)
    """

    def __init__(
        self, history: RowHistory, data: HeteroDataset, topology: HeteroTopology, plans: Mapping[str, TablePlan]
    ) -> None:
        self.history = history
        self._edges: dict[EdgeType, _EdgesByTime] = {}
        for relation in history.relations:
            source = relation.edge_type[0]
            columns = {
                name: _in_deviations(data.columns[source][name], plans[source], name) for name in relation.columns
            }
            self._edges[relation.edge_type] = _EdgesByTime(topology, relation.edge_type, columns)
            if (to_row := self._to_row(relation)) is not None and to_row not in self._edges:
                self._edges[to_row] = _EdgesByTime(topology, to_row, {})

    def _to_row(self, relation: _Relation) -> EdgeType | None:
        """The relation from the rows that a foreign key leads to, to the table; None for the table itself."""
        return None if relation.key is None else (relation.edge_type[2], f"rev_{relation.key}", self.history.table)

    def __call__(self, rows: np.ndarray, cutoffs: np.ndarray) -> np.ndarray:
        """float32[rows, numbers]; NaN where there is no edge whose age, or no value whose mean, could be told.

        Args:
            rows: int[rows] of the table, -1 for padding.
            cutoffs: int32[rows], as the topology's clock counts.
        """
        found = np.empty((len(rows), len(self.history.names)), np.float32)
        for number, values in enumerate(self._numbers(rows, cutoffs.astype(np.int64))):
            found[:, number] = values
        return found

    def _numbers(self, rows: np.ndarray, cutoffs: np.ndarray) -> Iterator[np.ndarray]:
        for relation in self.history.relations:
            edges = self._edges[relation.edge_type]
            to_row = self._to_row(relation)
            receivers = rows if to_row is None else self._edges[to_row].last_sender(rows, cutoffs)
            end, begin = edges.known(receivers, cutoffs), edges.first(receivers)
            yield np.log1p(end - begin)
            since = [begin]
            if relation.timed:
                gap = (cutoffs - edges.when(end)) / self.history.day
                yield np.where(end > begin, np.log1p(np.maximum(gap, 0.0)), np.nan)
                later = {
                    d: edges.known(receivers, np.maximum(cutoffs - d * self.history.day, _ALWAYS)) for d in _WINDOWS
                }
                for start in later.values():
                    yield np.log1p(end - start)
                since += [later[days] for days in relation.windows]
            for column in relation.columns:
                sums = [edges.sums(column, start, end) for start in since]
                for count, total, _ in sums:
                    yield np.where(count > 0, total / np.maximum(count, 1), np.nan)
                if relation.key is None:
                    for _, _, total in sums:
                        yield np.sign(total) * np.log1p(np.abs(total))


@dataclass(frozen=True, slots=True)
class _Values:
    """A column in deviations: the difference to its mean in whole numbers of 1 / `_UNIT`, 0 where missing."""

    whole: np.ndarray
    there: np.ndarray
    mean: float


class _EdgesByTime:
    """The edges of a relation by receiver and time, with running sums of columns of their senders."""

    def __init__(self, topology: HeteroTopology, edge_type: EdgeType, columns: Mapping[str, _Values]) -> None:
        starts, senders, _ = topology.csc(edge_type)
        relation = topology.relations[topology.number_of(edge_type)]
        times = topology.lists[relation.lists].times
        assert times is not None
        own = as_numpy(times)[relation.first_edge : relation.first_edge + relation.num_edges].astype(np.int64)
        self.starts, self.senders = np.asarray(starts, np.int64), senders
        # Ascending: a receiver's number, and within it the time, in one number.
        self.keys = (np.repeat(np.arange(len(starts) - 1), np.diff(self.starts)) << 32) + (own - _ALWAYS)
        self.columns = {
            name: (_running(column.whole[senders]), _running(column.there[senders]), column.mean)
            for name, column in columns.items()
        }

    def first(self, receivers: np.ndarray) -> np.ndarray:
        """The place of each receiver's first edge; 0 for padding."""
        found: np.ndarray = np.where(receivers >= 0, self.starts[np.maximum(receivers, 0)], 0)
        return found

    def known(self, receivers: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """The place after the last edge of each receiver that is known by a time; 0 for padding."""
        wanted = (receivers.astype(np.int64) << 32) + (limits - _ALWAYS)
        found: np.ndarray = np.where(receivers >= 0, np.searchsorted(self.keys, wanted, side="right"), 0)
        return found

    def when(self, ends: np.ndarray) -> np.ndarray:
        """The times of the edges before some places."""
        found: np.ndarray = (self.keys[np.maximum(ends - 1, 0)] & 0xFFFFFFFF) + _ALWAYS
        return found

    def last_sender(self, receivers: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """The sender of the last edge of each receiver that is known by a time; -1 for none."""
        end = self.known(receivers, limits)
        found: np.ndarray = np.where(end > self.first(receivers), self.senders[np.maximum(end - 1, 0)], -1)
        return found

    def sums(self, column: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the edges from a place to another: values that are there, their sum about the mean, and their sum."""
        whole, there, mean = self.columns[column]
        count, total = there[ends] - there[starts], (whole[ends] - whole[starts]) / _UNIT
        return count, total, total + count * mean


def _running(values: np.ndarray) -> np.ndarray:
    """int64[n + 1], the sum of the values before each place."""
    found = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=found[1:])
    return found


def day_of(data: HeteroDataset) -> int:
    """The length of a day in the unit of the times."""
    return DAY if data.time_unit == "s" else 1


def _columns_known_with(data: HeteroDataset, edge_type: EdgeType, plan: TablePlan) -> Iterator[str]:
    """The columns of numbers, or of two categories, of a relation's senders that are known from its edges' times on."""
    source, when = edge_type[0], data.edge_times.get(edge_type)
    columns, senders = data.columns.get(source, {}), data.edges[edge_type][0] if edge_type in data.edges else ()

    def late(column: Column) -> bool:
        return when is not None and column.known_at is not None and np.array_equal(column.known_at[senders], when)

    some_late = any(late(column) for column in columns.values())
    for place in plan.columns:
        column = columns[place.name]
        if column.kind == "number" or (column.kind == "category" and place.codes == 2):
            if late(column) if some_late else column.known_at is None:
                yield place.name


def _in_deviations(column: Column, plan: TablePlan, name: str) -> _Values:
    place = next(place for place in plan.columns if place.name == name)
    there = ~column.missing & np.isfinite(column.values)
    values = np.where(there, column.values, place.mean[0]).astype(np.float64)
    scaled = (np.clip(values, -1e300, 1e300) - place.mean[0]) / place.deviation[0]
    whole = np.rint(np.clip(scaled, -_UNIT, _UNIT) * _UNIT).astype(np.int64)
    return _Values(whole, there, place.mean[0] / place.deviation[0])


def _told_by_time(numbers: np.ndarray, times: np.ndarray, most: int = 20) -> np.ndarray:
    """The share of the variance of each number's ranks that lies between periods of cutoffs."""
    most = max(1, min(most, len(times) // 50))
    ends = np.unique(np.quantile(times, np.linspace(0, 1, most + 1))[1:-1])
    period = np.searchsorted(ends, times, side="right")
    found = np.zeros(numbers.shape[1])
    for n, x in enumerate(numbers.T):
        there = np.isfinite(x)
        if there.sum() < 2 or np.ptp(x[there]) == 0:
            continue
        _, place, count = np.unique(x[there], return_inverse=True, return_counts=True)
        rank = (np.cumsum(count) - (count + 1) / 2)[place]
        rank = rank - rank.mean()
        own = period[there]
        size = np.bincount(own, minlength=most)
        between = (np.bincount(own, rank, minlength=most) ** 2 / np.maximum(size, 1)).sum() / (rank**2).sum()
        groups = (size > 0).sum()
        if there.sum() > groups:
            found[n] = between - (groups - 1) * (1 - between) / (there.sum() - groups)
    return found
