"""The history of rows as of cutoffs: how many rows refer to each, since when, and what stands in their columns.

A sample ends at its fan-out and a mean cannot count, so a network's seeds have their history as columns. It is computed
on the host, once for all examples of a task, so that steps do not search edge lists for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.datasets import HeteroDataset
from dejax.datasets.columns import Column
from dejax.datasets.files._work import for_blocks
from dejax.minibatch import HeteroTopology
from dejax.minibatch.topology.hetero_topology import EdgeType, as_numpy
from dejax.training.tables.rows import ColumnPlace, TablePlan, by_number, pack
from dejax.training.tables.seed_times import DAY, is_latest

_WINDOWS = (30, 90, 365)
"""Days before the cutoff within which rows are counted."""
_WINDOWS_OF_REFERRED = (30,)
"""The same for the means of columns of rows that refer to a row that an example refers to."""
_MOST_COLUMNS = 16  # of a relation: each is up to eight numbers of every example
_UNIT = float(1 << 20)  # sums are whole numbers of 1 / _UNIT deviations, so that they are exact in any order
_PART = 1 << 14  # rows of a thread
_ALWAYS = np.iinfo(np.int32).min


@dataclass(frozen=True, slots=True)
class _RelationHistory:
    """The numbers from the edges of one relation.

    Attributes:
        edge_type: the relation, to the table itself or to one that it refers to.
        key: the foreign key that leads to the relation's table; None: it is the table itself.
        timed: whether the edges have times; without them there is one count.
        columns: the columns of the rows that refer whose means and sums are taken, all known with the edge.
    """

    edge_type: EdgeType
    key: str | None
    timed: bool
    columns: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """What each number says, in their order."""
        more = ("days since the last", *(f"of the last {days} days" for days in _WINDOWS)) if self.timed else ()
        return [self._name(what) for what in ("rows", *more)] + [n for c in self.columns for n in self.names_of(c)]

    def names_of(self, column: str) -> list[str]:
        """What the numbers of a column say."""
        within = ["", *(f" of the last {days} days" for days in self.windows)]
        means, sums = ([self._name(f"{what} {column}{days}") for days in within] for what in ("mean", "sum of"))
        return means if self.key is not None else means + sums

    def _name(self, what: str) -> str:
        return f"{'' if self.key is None else f'{self.key}: '}{', '.join(self.edge_type)}: {what}"

    @property
    def windows(self) -> tuple[int, ...]:
        """Days before the cutoff, of the means and sums."""
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
        kept: the numbers that a network reads.
        plan: their columns in packed rows.
    """

    table: str
    relations: tuple[_RelationHistory, ...]
    day: int
    kept: tuple[int, ...] = ()
    plan: TablePlan = dataclasses.field(default_factory=lambda: TablePlan((), 0, 0))

    @classmethod
    def of(
        cls, data: HeteroDataset, topology: HeteroTopology, table: str, plans: Mapping[str, TablePlan] | None = None
    ) -> RowHistory:
        """That of a table's rows, from the relations to it but those of its own foreign keys, which come with a row.

        Args:
            data: tables as a graph.
            topology: its edges, of `topology_in_time`.
            table: the name of the table.
            plans: the packed columns of each table, others being hidden; None: the table's own counts alone.
        """
        own: list[tuple[str | None, str]] = [(None, table)]
        if plans is not None:
            counts = topology.num_edges
            own += [(name, to) for of, name, to in counts if of == table and counts.get((to, f"rev_{name}", of))]
        found = []
        for key, to in own:
            for relation in topology.relations:
                source, name, target = edge_type = relation.edge_type
                own_key = (target, name.removeprefix("rev_"), source) in data.edges and name.startswith("rev_")
                if target != to or not relation.num_edges or is_latest(edge_type) or own_key:
                    continue
                columns = () if plans is None else tuple(_columns_known_with(data, edge_type, plans[source]))
                found.append(_RelationHistory(edge_type, key, edge_type in data.edge_times, columns[:_MOST_COLUMNS]))
        return cls(table, tuple(found), day_of(data))

    @property
    def names(self) -> tuple[str, ...]:
        """What each number says."""
        return tuple(name for relation in self.relations for name in relation.names)

    @property
    def are_counts(self) -> np.ndarray:
        """bool[numbers]: which tell how many rows refer to the table's own, and since when."""
        plain = {name for of in self.relations if of.key is None for name in dataclasses.replace(of, columns=()).names}
        return np.array([name in plain for name in self.names], bool)

    @property
    def columns(self) -> set[tuple[str, str]]:
        """(table, column) whose means and sums are among the numbers."""
        return {(of.edge_type[0], column) for of in self.relations for column in of.columns}

    def fitted(self, numbers: np.ndarray, wanted: np.ndarray, bins: int) -> RowHistory:
        """With the columns of packed rows, by the numbers of some training examples, and nothing else.

        Args:
            numbers: float[examples, numbers].
            wanted: bool[numbers], which to keep; those that do not differ among the examples are not.
            bins: quantiles of a number.
        """
        columns = {self.names[n]: as_column(numbers[:, n]) for n in np.flatnonzero(wanted & differing(numbers))}
        return self.with_plan(pack(columns, None, None, bins=bins)[1])

    def with_plan(self, plan: TablePlan) -> RowHistory:
        """With the columns of packed rows that a run has, and nothing else.

        Raises:
            ValueError: a number of the run is not among the history's, as of a relation without edges.
        """
        wanted = {place.name for place in plan.columns}
        if gone := sorted(wanted - set(self.names)):
            raise ValueError(
                f"relations must be those that the model was trained on, got none for the history {gone[0]!r}; train "
                "again, or undo the change"
            )
        trimmed = (
            dataclasses.replace(of, columns=tuple(c for c in of.columns if wanted & set(of.names_of(c))))
            for of in self.relations
        )
        relations = tuple(of for of in trimmed if wanted & set(of.names))
        names = [name for of in relations for name in of.names]
        kept = tuple(names.index(place.name) for place in plan.columns)
        return dataclasses.replace(self, relations=relations, kept=kept, plan=plan)


class HistoryReader:
    """Computes the numbers of a `RowHistory` for any number of rows, from edges and columns in host memory.

    Args:
        history: which numbers.
        topology: the edges, of `topology_in_time`.
        data: the columns.
        plans: the packed columns of each table, whose means and deviations are the units of sums; {} for counts alone.

    >>> from dejax.datasets import from_tables
    >>> from dejax.training.tables.seed_times import Clock, topology_in_time
    >>> orders = {"user": [7, 8, 7], "day": [1, 2, 6]}
    >>> data = from_tables({"users": {"id": [7, 8]}, "orders": orders}, {"users": "id"}, [("orders", "user", "users")],
    ...                    {"orders": "day"})
    >>> topology = topology_in_time(data, Clock(), latest=False, on_host=True)
    >>> read = HistoryReader(RowHistory.of(data, topology, "users"), topology, data, {})
    >>> np.expm1(read.numbers(np.array([0, 0, 1]), np.array([5, 6, 6]))[:, :2]).round()  # rows, days since the last
    array([[1., 4.],
           [2., 0.],
           [1., 4.]], dtype=float32)
    """

    def __init__(
        self, history: RowHistory, topology: HeteroTopology, data: HeteroDataset, plans: Mapping[str, TablePlan]
    ) -> None:
        self.history = history
        self._edges: dict[EdgeType, _EdgesByTime] = {}
        columns: dict[EdgeType, dict[str, Column]] = {}
        for relation in history.relations:
            own = columns.setdefault(relation.edge_type, {})
            own |= {name: data.columns[relation.edge_type[0]][name] for name in relation.columns}
            if relation.key is not None:
                columns.setdefault(self._to_row(relation), {})
        for edge_type, by_name in columns.items():
            places = {place.name: place for place in plans[edge_type[0]].columns} if by_name else {}
            values = {name: _in_deviations(column, places[name]) for name, column in by_name.items()}
            self._edges[edge_type] = _EdgesByTime(topology, edge_type, values)

    def _to_row(self, relation: _RelationHistory) -> EdgeType:
        """The relation from the rows that a foreign key leads to, to the table."""
        return relation.edge_type[2], f"rev_{relation.key}", self.history.table

    def packed(self, rows: np.ndarray, cutoffs: np.ndarray) -> np.ndarray:
        """The numbers that are kept as packed rows of the history's plan, float32[rows, width]; as `numbers`."""
        found = self._columns_of(self.history.kept, rows, cutoffs)
        found -= np.array([place.mean[0] for place in self.history.plan.columns], np.float32)
        found /= np.array([place.deviation[0] for place in self.history.plan.columns], np.float32)
        return found

    def numbers(self, rows: np.ndarray, cutoffs: np.ndarray) -> np.ndarray:
        """float32[rows, numbers]; NaN where there is no edge whose age, or no value whose mean, could be told.

        Args:
            rows: int[rows] of the table, -1 for padding, which has no edges.
            cutoffs: int32[rows], as the topology's clock counts.
        """
        return self._columns_of(range(len(self.history.names)), rows, cutoffs)

    def _columns_of(self, wanted: Sequence[int], rows: np.ndarray, cutoffs: np.ndarray) -> np.ndarray:
        """Some of the numbers, float32[rows, wanted]."""
        found, place = np.empty((len(rows), len(wanted)), np.float32), {n: at for at, n in enumerate(wanted)}

        def compute(_: int, start: int, stop: int) -> None:
            for number, values in enumerate(self._numbers(rows[start:stop], cutoffs[start:stop].astype(np.int64))):
                if number in place:
                    found[start:stop, place[number]] = values

        for_blocks(compute, len(rows), _PART, progress=False)
        return found

    def _numbers(self, rows: np.ndarray, cutoffs: np.ndarray) -> Iterator[np.ndarray]:
        for relation in self.history.relations:
            edges, receivers = self._edges[relation.edge_type], rows
            if relation.key is not None:
                receivers = self._edges[self._to_row(relation)].last_sender(rows, cutoffs)
            first, known = edges.up_to(receivers, cutoffs)
            yield np.log1p(known)
            since = [first]
            if relation.timed:
                last = edges.last(first, known)
                yield np.where(last > _ALWAYS, np.log1p(np.maximum(cutoffs - last, 0) / self.history.day), np.nan)
                for days in _WINDOWS:
                    _, before = edges.up_to(receivers, np.maximum(cutoffs - days * self.history.day, _ALWAYS))
                    yield np.log1p(known - before)
                    since += [first + before] * (days in relation.windows)
            for column in relation.columns:
                sums = [edges.sums(column, start, first + known) for start in since]
                for count, total, _ in sums:
                    yield np.where(count > 0, total / np.maximum(count, 1), np.nan)
                for _, _, total in sums if relation.key is None else ():
                    yield np.sign(total) * np.log1p(np.abs(total))


class _EdgesByTime:
    """The edges of a relation where they lie in host memory, with running sums of columns of their senders.

    Args:
        topology: the edges of all relations.
        edge_type: the relation.
        columns: the columns of the senders, by name.
    """

    def __init__(self, topology: HeteroTopology, edge_type: EdgeType, columns: Mapping[str, _Deviations]) -> None:
        relation = topology.relations[topology.number_of(edge_type)]
        lists = topology.lists[relation.lists]
        groups = topology.num_nodes[edge_type[2]] + 1
        assert lists.times is not None
        self._starts = as_numpy(lists.starts)[relation.first_group : relation.first_group + groups]
        self._times, self._senders = as_numpy(lists.times), as_numpy(lists.senders)
        self._first = relation.first_edge
        own = self._senders[self._first : self._first + relation.num_edges]
        self._sums = {
            name: (_running(column.whole[own]), _running(column.there[own]), column.mean)
            for name, column in columns.items()
        }

    def up_to(self, rows: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The position of each row's first edge, and how many have a time up to its limit; none of row -1."""
        place = np.maximum(rows, 0)
        first, end = self._starts[place].astype(np.int64), self._starts[place + 1].astype(np.int64)
        low, high = first, np.where(rows >= 0, end, first)
        while (low < high).any():  # edges before `low` count, those from `high` on do not
            middle = (low + high) // 2
            counts = (low < high) & (self._times[np.minimum(middle, len(self._times) - 1)] <= limits)
            low, high = np.where(counts, middle + 1, low), np.where(counts, high, middle)
        return first, low - first

    def last(self, first: np.ndarray, count: np.ndarray) -> np.ndarray:
        """The time of the last of the first edges of each row; the least int32 for none."""
        found: np.ndarray = np.where(count > 0, self._times[np.maximum(first + count - 1, 0)], _ALWAYS)
        return found.astype(np.int64)

    def last_sender(self, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """The sender of the last edge of each row up to its limit; -1 for none."""
        first, count = self.up_to(rows, limits)
        found: np.ndarray = np.where(count > 0, self._senders[np.maximum(first + count - 1, 0)], -1)
        return found

    def sums(self, column: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the edges from a position to another: values that are there, their sum about the mean, and their sum."""
        whole, there, mean = self._sums[column]
        starts, ends = starts - self._first, ends - self._first
        count, total = there[ends] - there[starts], (whole[ends] - whole[starts]) / _UNIT
        return count, total, total + count * mean


@dataclass(frozen=True, slots=True, eq=False)
class _Deviations:
    """A column in deviations: the difference to its mean in whole numbers of 1 / `_UNIT`, 0 where missing."""

    whole: np.ndarray
    there: np.ndarray
    mean: float


def _in_deviations(column: Column, place: ColumnPlace) -> _Deviations:
    there = ~column.missing & np.isfinite(column.values)
    if column.kind == "category":
        column = by_number(column, place.categories)
        there &= column.values < place.codes  # others are none of the two
    values = np.where(there, column.values, place.mean[0]).astype(np.float64)
    scaled = (np.clip(values, -1e300, 1e300) - place.mean[0]) / place.deviation[0]
    whole = np.rint(np.clip(scaled, -_UNIT, _UNIT) * _UNIT).astype(np.int64)
    return _Deviations(whole, there, place.mean[0] / place.deviation[0])


def _running(values: np.ndarray) -> np.ndarray:
    """int64[n + 1], the sum of the values before each place."""
    found = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=found[1:])
    return found


def _columns_known_with(data: HeteroDataset, edge_type: EdgeType, plan: TablePlan) -> Iterator[str]:
    """The columns of numbers, or of two categories, of a relation's senders that are known from its edges' times on."""
    source, when = edge_type[0], data.edge_times.get(edge_type)
    columns, senders = data.columns.get(source, {}), data.edges[edge_type][0]

    def late(column: Column) -> bool:
        return when is not None and column.known_at is not None and np.array_equal(column.known_at[senders], when)

    some_late = any(late(column) for column in columns.values())
    for place in plan.columns:
        column = columns[place.name]
        if column.kind == "number" or (column.kind == "category" and place.codes == 2):
            if late(column) if some_late else column.known_at is None:
                yield place.name


def differing(numbers: np.ndarray) -> np.ndarray:
    """bool[numbers], which differ among examples, float[examples, numbers]."""
    same = [not len(own) or np.array_equal(own, np.full_like(own, own[0]), equal_nan=True) for own in numbers.T]
    return ~np.array(same, bool)


def as_column(number: np.ndarray) -> Column:
    """A number of histories as a column of a table."""
    return Column("number", number.astype(np.float64), np.isnan(number))


def as_bits(values: np.ndarray) -> np.ndarray:
    """float32[...] as int32[...]: what goes with the seeds of a step is integers."""
    return np.ascontiguousarray(values, np.float32).view(np.int32)


def of_bits(bits: Array) -> Array:
    """The float32[...] of `as_bits`, in a step."""
    found: Array = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return found


def day_of(data: HeteroDataset) -> int:
    """The length of a day in the unit of the times."""
    return DAY if data.time_unit == "s" else 1
