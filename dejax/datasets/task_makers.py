"""Makers of tasks: of a table of labels, of a function, of a column of the rows themselves, of events that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np

from dejax.datasets._events import Events, How, duration, label_of, links_of
from dejax.datasets._examples import Splitting, cutoffs_of, entity_rows, finished, has_times, labelled_task
from dejax.datasets._hetero import HeteroDataset
from dejax.datasets._known_from import ALWAYS
from dejax.datasets.columns import Column
from dejax.datasets.tasks import Task


def task_from_columns(
    data: HeteroDataset,
    name: str,
    entity: str,
    keys: Any,
    times: Any = None,
    labels: Any = None,
    *,
    kind: str | None = None,
    target: str | None = None,
    valid_from: Any = None,
    test_from: Any = None,
    splits: Any = None,
    unit: str = "",
    hidden: Sequence[tuple[str, str]] = (),
    missing_keys: str = "error",
) -> Task:
    """A task of a table with an entity's key, a cutoff and a label in each row, as RelBench has them.

    Left out, and counted in `Task.left_out`: examples without a label, with a cutoff before all data, or whose entity
    is not known by its cutoff.

    Args:
        data: of `from_tables`.
        name: of the task.
        entity: the table whose rows are asked about.
        keys: [n], values of its primary key; of a table without one, row numbers.
        times: [n], cutoffs, as the time columns of the data: dates, or numbers. None for data without times.
        labels: [n] numbers, booleans or text; of links a list of keys of `target` for each example, or one key each:
            then those of one entity and cutoff are one example.
        kind: "binary", "classes", "regression" or "link". By default booleans, zeros and ones, and two different texts
            are binary, more texts are classes, other numbers are a regression, and with `target` it is "link".
        target: the table that links lead to.
        valid_from: examples with a cutoff before this are for training.
        test_from: those with this cutoff or a later one are for tests; those between are for validation. Data without
            times is split at random, 80 : 10 : 10, if neither is given.
        splits: instead of the two, "train", "valid" or "test" for each example, one split after the other in time.
        unit: of a regression's labels.
        hidden: (table, column) pairs that are never an input.
        missing_keys: what happens to keys that no row has: "error" raises, "drop" leaves out the examples, or links.

    Raises:
        ValueError: a table or key that does not exist; columns of different lengths; cutoffs of another kind than the
            data's times; no example is left; labels that are constant in training, or do not fit the kind.

    >>> from dejax.datasets import from_tables
    >>> users, orders = {"id": [7, 8]}, {"user": [7, 8, 8], "day": [1, 2, 6]}
    >>> keys = {"users": "id"}, [("orders", "user", "users")], {"orders": "day"}
    >>> data = from_tables({"users": users, "orders": orders}, *keys)
    >>> task = task_from_columns(data, "buys", "users", [7, 8, 7], [3, 3, 5], [0, 1, 1], valid_from=4, test_from=6)
    >>> print(task.summary())
    task buys: binary of users, 3 examples
                  2  train, 50.0 % positive
                  1  valid, 100.0 % positive
                  0  test
    """
    rows = entity_rows(data, name, entity, keys, missing_keys)
    if times is None:
        if has_times(data):
            raise ValueError(f"times of task {name!r} must be given, {data.name!r} has times")
        times = np.zeros(len(rows), np.int64)
    cutoffs = cutoffs_of(data, name, times)
    if labels is None or not len(rows) == len(cutoffs) == len(labels):
        found = "none" if labels is None else len(labels)
        raise ValueError(
            f"keys, times and labels of task {name!r} must have one length, got {len(rows)}, {len(cutoffs)} and {found}"
        )
    splitting = Splitting(valid_from, test_from, splits)
    if target is None and kind != "link":
        return labelled_task(
            data, name, entity, rows, cutoffs, labels, splitting, kind=kind, unit=unit, hidden=tuple(hidden)
        )
    return _links(data, name, entity, rows, cutoffs, splitting, target, labels, missing_keys)


def _links(
    data: HeteroDataset,
    name: str,
    entity: str,
    rows: np.ndarray,
    cutoffs: np.ndarray,
    splitting: Splitting,
    target: str | None,
    labels: Any,
    missing_keys: str,
) -> Task:
    if target is None:
        raise ValueError(f"task {name!r} must have a `target`, the table that its links lead to")
    lists = [list(one) if isinstance(one, list | tuple | set | np.ndarray) else None for one in labels]
    single = all(one is None for one in lists)
    keys = [key for one, given in zip(lists, labels, strict=True) for key in ([given] if one is None else one)]
    ends = entity_rows(data, name, target, keys, missing_keys)
    lengths = np.array([1 if one is None else len(one) for one in lists], np.int64)
    lost = ends < 0
    example = np.repeat(np.arange(len(lists)), lengths)
    parts = splitting.of(data, name, cutoffs)
    if single:  # the links of one entity and cutoff are one example
        split = np.full(len(rows), -1)
        for number, places in enumerate(parts.values()):
            split[places] = number
        order = np.lexsort((rows, cutoffs, split))
        groups = np.stack([split, cutoffs, rows])[:, order]
        begins = np.append(True, (groups[:, 1:] != groups[:, :-1]).any(0))
        example, ends, lost = (np.cumsum(begins) - 1)[: len(order)], ends[order], lost[order]
        rows, cutoffs, split = (values[order][begins[: len(order)]] for values in (rows, cutoffs, split))
        parts = {name: np.flatnonzero(split == number) for number, name in enumerate(parts)}
    kept = np.bincount(example[~lost], minlength=len(rows))
    offsets = np.concatenate([[0], np.cumsum(kept)])
    left_out = {f"links whose key {target} lacks": int(lost.sum())} if lost.any() else {}
    task = Task(
        name, "link", entity, rows, cutoffs, ends[~lost], parts, offsets=offsets, target=target, left_out=left_out
    )
    return finished(data, task.with_kept(rows >= 0, f"examples whose key {entity} lacks"))


def task_from_function(
    data: HeteroDataset,
    name: str,
    entity: str,
    function: Callable[[Any], tuple[Any, Any]],
    cutoffs: Sequence[Any],
    **options: Any,
) -> Task:
    """A task whose labels a function makes for each of several cutoffs.

    Args:
        data, name, entity: as in `task_from_columns`.
        function: cutoff -> (keys, labels) of the examples at that time. Labels say what follows it.
        cutoffs: the grid of times.
        options: as in `task_from_columns`.

    Raises:
        ValueError: as `task_from_columns`; a function that gives keys and labels of different lengths.

    >>> from dejax.datasets import from_tables
    >>> data = from_tables({"users": {"id": [7, 8], "joined": [1, 1]}}, {"users": "id"}, [], {"users": "joined"})
    >>> later = lambda cutoff: ([7, 8], [cutoff, 0])
    >>> task_from_function(data, "t", "users", later, [1, 2, 3], valid_from=2, test_from=3).labels
    array([1., 0., 2., 0., 3., 0.], dtype=float32)
    """
    keys: list[Any] = []
    times: list[Any] = []
    labels: list[Any] = []
    for cutoff in cutoffs:
        some, of_them = function(cutoff)
        if len(some) != len(of_them):
            raise ValueError(
                f"function of task {name!r} must give as many labels as keys, got {len(of_them)} and {len(some)} at "
                f"{cutoff!r}"
            )
        keys += list(some)
        times += [cutoff] * len(some)
        labels += list(of_them)
    return task_from_columns(data, name, entity, keys, times, labels, **options)


def task_of_rows(
    data: HeteroDataset,
    name: str,
    table: str,
    label: str,
    *,
    cutoff: str | None = None,
    above: float | None = None,
    kind: str | None = None,
    valid_from: Any = None,
    test_from: Any = None,
    splits: Any = None,
    unit: str = "",
) -> Task:
    """A task of the rows of a table, whose labels are one of its columns: "will this flight be late".

    The label must be known later than the cutoff. A column with `known_at` is an input where it is known by then, so
    that other rows' labels are seen as far as they have come true. Any other column is known with its row, so it is
    hidden from all rows.

    Args:
        data: of `from_tables`.
        name: of the task.
        table: the table.
        label: its column. Rows without a value have no label.
        cutoff: the column of the table with the cutoffs; by default the time of the row itself.
        above: makes a binary task of a column of numbers: whether the label is above this.
        kind, valid_from, test_from, splits, unit: as in `task_from_columns`.

    Raises:
        ValueError: as `task_from_columns`; a table or column that does not exist; a label that is known by its cutoff.

    >>> from dejax.datasets import from_tables
    >>> flights = {"at": [1, 2, 3, 4], "landed": [5, 4, 9, 8], "delay": [40, 0, 3, 50]}
    >>> known_at = {"flights": {"delay": "landed"}}
    >>> data = from_tables({"flights": flights}, time_columns={"flights": "at"}, known_at=known_at)
    >>> task_of_rows(data, "late", "flights", "delay", above=30, valid_from=3, test_from=4).labels
    array([1, 0, 0, 1], dtype=int32)
    """
    columns = data.columns.get(table)
    if columns is None:
        raise ValueError(f"task {name!r} must name a table, one of {', '.join(map(repr, data.columns))}; got {table!r}")
    for wanted in filter(None, (label, cutoff)):
        if wanted not in columns:
            raise ValueError(f"task {name!r} must name columns of {table!r}, {', '.join(columns)}; got {wanted!r}")
    if not data.num_nodes[table]:
        raise ValueError(f"task {name!r} must have rows in the table {table!r}, which is empty")
    column = columns[label]
    times, dated = _row_times(data, name, table, cutoff)
    rows = np.flatnonzero(dated)
    if column.known_at is not None:
        early = (column.known_at[rows] <= times[rows]) & ~column.missing[rows]
        if early.any():
            raise ValueError(
                f"label of task {name!r} must be known after its cutoff, {int(early.sum())} of {len(rows)} rows of "
                f"{table!r} have it by then, the first is row {rows[early][0]}; give an earlier `cutoff`"
            )
    task = labelled_task(
        data,
        name,
        table,
        rows.astype(np.int32),
        times[rows],
        _values_of(name, f"{table}.{label}", column, above)[rows],
        Splitting(valid_from, test_from, None if splits is None else np.asarray(splits)[rows]),
        kind=kind,
        unit=unit or column.unit,
        hidden=() if column.known_at is not None else ((table, label),),
    )
    undated = {f"rows of {table} without a cutoff": int((~dated).sum())} if not dated.all() else {}
    return dataclasses.replace(task, left_out={**undated, **task.left_out})


def _row_times(data: HeteroDataset, name: str, table: str, cutoff: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The cutoff of each row of a table, and which rows have one."""
    count = data.num_nodes[table]
    if cutoff is not None:
        column = data.columns[table][cutoff]
        if column.kind != "time" or column.unit != data.time_unit:
            raise ValueError(
                f"cutoff of task {name!r} must be a column of the kind of the dataset's times, {table}.{cutoff} is "
                f"{column.kind}"
            )
        return column.values, ~column.missing
    if table in data.node_times:
        return np.asarray(data.node_times[table]), np.full(count, True)
    if data.node_times:
        raise ValueError(
            f"task {name!r} must have a `cutoff`, a column with the time at which each row of {table!r} is asked "
            "about: the table has no times"
        )
    return np.zeros(count, np.int64), np.full(count, True)


def _values_of(name: str, label: str, column: Column, above: float | None) -> np.ndarray:
    """The values of a column as labels, None or NaN where missing."""
    if column.kind == "number":
        if above is None:
            return np.where(column.missing, np.nan, column.values)
        return np.where(column.missing, np.nan, column.values > above)
    if column.kind != "category" or above is not None:
        wanted = "of categories or numbers" if above is None else "of numbers, which are compared with `above`"
        raise ValueError(f"label of task {name!r} must be a column {wanted}, {label} is {column.kind}")
    names = np.array([*column.categories, None], object)
    return names[column.values]


def task_of_events(
    data: HeteroDataset,
    name: str,
    events: tuple[str, str],
    cutoffs: Any,
    window: Any,
    *,
    how: How = "count",
    value: str | None = None,
    target: str | None = None,
    active: Any = None,
    valid_from: Any = None,
    test_from: Any = None,
    unit: str = "",
) -> Task:
    """A task about what follows a cutoff: "the orders of each customer in the 30 days after".

    There is an example for each cutoff and each row of the entity table that is known by then. Left out, and counted,
    are those whose window ends after the data does, and those of training whose window ends after `valid_from`: their
    labels would tell of the time on which settings are chosen.

    Args:
        data: of `from_tables`.
        name: of the task.
        events: (table, its foreign key to the entity table): the rows to count, at their own times.
        cutoffs: the grid of times.
        window: how long after a cutoff rows count: a `timedelta`, text as "30 days", or a number in the unit of the
            times.
        how: "any" and "none" (binary), "count", or "sum" and "mean" of a column of numbers; an entity without a row has
            no mean, and so no label.
        value: that column.
        target: instead of `how`, another foreign key of the table: links to the rows that it refers to.
        active: only entities with a row within this time up to the cutoff.
        valid_from, test_from: of cutoffs, as in `task_from_columns`.
        unit: of a regression's labels.

    Raises:
        ValueError: as `task_from_columns`; a table without times, a foreign key or column that does not exist.

    >>> from dejax.datasets import from_tables
    >>> users, orders = {"id": [7, 8]}, {"user": [7, 8, 8, 7], "day": [1, 2, 6, 9]}
    >>> keys = {"users": "id"}, [("orders", "user", "users")], {"orders": "day"}
    >>> data = from_tables({"users": users, "orders": orders}, *keys)
    >>> task = task_of_events(data, "orders", ("orders", "user"), [1, 4, 6], 3, how="any", valid_from=4, test_from=6)
    >>> task.rows, task.times, task.labels
    (array([0, 1, 0, 1, 0, 1], dtype=int32), array([1, 1, 4, 4, 6, 6]), array([0, 1, 0, 1, 1, 0], dtype=int32))
    """
    found = Events.of(data, name, events, target)
    times = np.unique(cutoffs_of(data, name, cutoffs))
    length = duration(window, data.time_unit, f"window of task {name!r}")
    back = None if active is None else duration(active, data.time_unit, f"active of task {name!r}")
    if how not in get_args(How):
        raise ValueError(f"how of task {name!r} must be one of {', '.join(get_args(How))}, got {how!r}")
    amounts = found.amounts(data, name, value) if how in ("sum", "mean") else None
    over = times + length > found.times.max(initial=0)
    if over.all():
        raise ValueError(
            f"cutoffs of task {name!r} must be at least {window!r} before the end of the data, none of {len(times)} is"
        )
    known = data.known_from.get(found.entity, np.full(data.num_nodes[found.entity], ALWAYS))
    rows: list[np.ndarray] = []
    labels: list[Any] = []  # an array by cutoff; of links a list of arrays
    for time in times[~over].tolist():
        asked = known <= time
        if back is not None:
            asked &= np.bincount(found.entities[found.within(time - back, time)], minlength=len(known)) > 0
        rows.append(np.flatnonzero(asked).astype(np.int32))
        after = found.within(time, time + length)
        if target is not None:
            labels.append(links_of(found.entities[after], found.ends[after], rows[-1]))
        else:
            some = None if amounts is None else amounts[after]
            labels.append(label_of(how, found.entities[after], some, len(known))[rows[-1]])
    stamps = np.repeat(times[~over], [len(some) for some in rows])
    joined, splitting = np.concatenate(rows), Splitting(valid_from, test_from)
    if target is None:
        kind = "binary" if how in ("any", "none") else "regression"
        made = np.concatenate(labels)
        task = labelled_task(data, name, found.entity, joined, stamps, made, splitting, kind=kind, unit=unit)
    else:
        parts = splitting.of(data, name, stamps)
        lists = [one for some in labels for one in some]
        offsets = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)
        ends = np.concatenate([np.zeros(0, np.int32), *lists]).astype(np.int32)
        task = Task(name, "link", found.entity, joined, stamps, ends, parts, offsets=offsets, target=found.target)
        task = finished(data, task)
    return _without_overlap(task, length, int(over.sum()))


def _without_overlap(task: Task, length: int, cutoffs_left_out: int) -> Task:
    """The task without training examples whose labels tell of the time of later splits."""
    train = np.zeros(len(task), bool)
    train[task.splits["train"]] = True
    later = task.times[~train].min(initial=np.iinfo(np.int64).max)
    task = task.with_kept(~train | (task.times + length <= later), "training examples whose window reaches validation")
    over = {"cutoffs whose window ends after the data": cutoffs_left_out} if cutoffs_left_out else {}
    return dataclasses.replace(task, left_out={**task.left_out, **over})
