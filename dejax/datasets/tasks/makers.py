"""Makers of tasks: of a table of labels, of a function, of a column of the rows themselves, of events that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np

from dejax.datasets._hetero import HeteroDataset
from dejax.datasets.columns import Column
from dejax.datasets.tasks._events import Events, How, duration, label_of, links_of
from dejax.datasets.tasks._examples import Splitting, cutoffs_of, entity_rows, finished, has_times, labelled_task
from dejax.datasets.tasks.task import Task


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
    """Makes a task from columns of keys, cutoff times and labels, one entry for each example, as RelBench has them.

    The cutoff of an example is the time as of which its label is predicted. Examples without a label, with a cutoff
    before all data, or whose entity is not known by the cutoff, are left out and counted in `Task.left_out`.

    Args:
        data: a data set of `from_tables`.
        name: name of the task.
        entity: the table whose rows the labels belong to.
        keys: [n], the primary key of each example's entity; row numbers if the table has no primary key.
        times: [n], the cutoff of each example, in the form of the data's time columns: dates or numbers. None for data
            without times.
        labels: [n] numbers, booleans or text. For a link task: a list of keys of `target` for each example; or one key
            for each, and then entries with the same entity and cutoff become one example.
        kind: "binary", "classes", "regression" or "link". By default: "link" with `target`; "binary" for booleans,
            zeros and ones, and two different texts; "classes" for more texts; "regression" for other numbers.
        target: for a link task: the table that links lead to.
        valid_from: examples with a cutoff before this time are for training.
        test_from: examples with a cutoff from this time on are for tests, and those between the two times for
            validation. Data without times is split 80 / 10 / 10 at random if neither is given.
        splits: in place of `valid_from` and `test_from`: "train", "valid" or "test" for each example. The splits must
            follow one another in time.
        unit: unit of the labels of a regression, such as "minutes".
        hidden: (table, column) pairs that are never an input.
        missing_keys: what happens to keys that no row has: "error" raises, "drop" leaves out the examples or links.

    Raises:
        ValueError: a table or key does not exist, columns have different lengths, cutoffs are not of the kind of the
            data's times, no example is left, or labels do not fit the kind or are all equal in training.

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
            raise ValueError(
                f"times of task {name!r} must be given for a data set with times, got None; give the cutoff of each "
                "example"
            )
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
    """The link task of examples whose labels are keys of the target table: lists of keys, or one key each."""
    if target is None:
        raise ValueError(f"target of task {name!r} must be the table to which its links lead, got None")
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
    """Makes a task whose examples a function of yours computes for each of several cutoff times.

    Args:
        data, name, entity: as in `task_from_columns`.
        function: function `cutoff -> (keys, labels)` of the examples at this time. Labels say what happens after it.
        cutoffs: the cutoff times.
        options: further keyword arguments of `task_from_columns`.

    Raises:
        ValueError: as `task_from_columns`; or the function returns keys and labels of different lengths.

    >>> from dejax.datasets import from_tables
    >>> data = from_tables({"users": {"id": [7, 8], "joined": [1, 1]}}, {"users": "id"}, [], {"users": "joined"})
    >>> later = lambda cutoff: ([7, 8], [cutoff, 0])
    >>> task_from_function(data, "t", "users", later, [1, 2, 3], valid_from=2, test_from=3).labels
    array([1., 0., 2., 0., 3., 0.])
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
    """Makes a task that predicts a column of a table for each of its rows, such as "will this flight be late".

    The cutoff of a row is the time as of which its label is predicted; the label must become known later. If the column
    has an entry in `known_at` of `from_tables`, the labels of other rows are an input from the time at which they are
    known. Without one, values are known with their row, so the column is hidden in all rows.

    Args:
        data: a data set of `from_tables`.
        name: name of the task.
        table: the table.
        label: the column to predict. Rows without a value have no label.
        cutoff: the column of the table that has the cutoffs; by default the time of the row itself.
        above: turns a column of numbers into a binary task: whether the number is above this.
        kind, valid_from, test_from, splits, unit: as in `task_from_columns`.

    Raises:
        ValueError: as `task_from_columns`; or a table or column does not exist, or a label is known by its cutoff.

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
        raise ValueError(f"table of task {name!r} must have rows, got the empty table {table!r}")
    if (table, label) in {relation[:2] for relation in data.edges}:
        raise ValueError(
            f"label of task {name!r} must not be a foreign key, whose edges tell it, got {table}.{label}; make a link "
            "task by `task_of_events` with `target`"
        )
    column = columns[label]
    times, dated = _row_times(data, name, table, cutoff)
    rows = np.flatnonzero(dated)
    if column.known_at is not None:
        early = (column.known_at[rows] <= times[rows]) & ~column.missing[rows]
        if early.any():
            raise ValueError(
                f"label of task {name!r} must become known after its cutoff, got {int(early.sum())} of {len(rows)} "
                f"rows of {table!r} whose label is known by then, the first row {rows[early][0]}; give an earlier "
                "`cutoff`"
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
                f"cutoff of task {name!r} must be a column of times of the same unit as the data set's times, got "
                f"{table}.{cutoff} of the kind {column.kind}"
            )
        return column.values, ~column.missing
    if table in data.node_times:
        return np.asarray(data.node_times[table]), np.full(count, True)
    if data.node_times:
        raise ValueError(
            f"cutoff of task {name!r} must name a column with the time at which each row of {table!r} is asked about, "
            "got None, and the table has no times"
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
        raise ValueError(
            f"label of task {name!r} must be a column {wanted}, got {label}, a column of the kind {column.kind}"
        )
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
    """Makes a task about events after a time, such as "the number of orders of each customer in the next 30 days".

    There is an example for each cutoff (a time as of which labels are predicted) and each row of the entity table that
    is known by then. Examples whose window ends after the data does are left out, and so are training examples whose
    window ends after the first later cutoff, because their labels would reveal the validation period. `Task.left_out`
    counts them.

    Args:
        data: a data set of `from_tables`.
        name: name of the task.
        events: (table, foreign key): the rows that count as events, and their key that refers to the entity table. A
            path of foreign keys leads further: ("lines", "order.customer") are the lines of each customer's orders.
        cutoffs: the cutoff times.
        window: length of time after a cutoff in which events count: a `timedelta`, text such as "30 days", or a number
            in the unit of the times.
        how: the label: "any" or "none" (binary), "count", or "sum" or "mean" of `value` over the events. Without events
            an entity has no mean, and so no label.
        value: the column of numbers for "sum" and "mean".
        target: in place of `how`, for a link task: another foreign key of the table, or a path. The label is the set of
            rows that the events lead to.
        active: a length of time: only entities with an event within this time before the cutoff are examples.
        valid_from, test_from: times that split the cutoffs, as in `task_from_columns`.
        unit: unit of the labels of a regression.

    Raises:
        ValueError: as `task_from_columns`; or the table has no times, or a foreign key or column does not exist.

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
    over = times + length > found.times.max(initial=-(2**63))
    if over.all():
        raise ValueError(
            f"cutoffs of task {name!r} must be at least {window!r} before the end of the data, got {len(times)} that "
            "are all later; give earlier cutoffs, or a shorter window"
        )
    known = data.known_from.get(found.entity, np.full(data.num_nodes[found.entity], -(2**63)))
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
