"""What is known at a cutoff does not depend on anything later, bit for bit, in random databases."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from dejax.datasets import Column, HeteroDataset, from_tables
from tests.datasets.random_databases import CUTOFF, Database, random_database


def _shown(column: Column, row: int) -> Any:
    """All that an encoder may read of a value at the cutoff."""
    if column.missing[row] or (column.known_at is not None and column.known_at[row] > CUTOFF):
        return None
    if column.offsets is not None:
        values = column.values[column.offsets[row] : column.offsets[row + 1]].tolist()
    else:
        values = column.values[row].tolist()
    # A code says which category it is among those that are known by then.
    return column.kind, values, [column.categories[code] for code in np.atleast_1d(values)] if column.categories else []


def inputs(data: HeteroDataset, known: dict[tuple[str, int], float]) -> dict[str, Any]:
    """All that may be an input at the cutoff: edges, rows, and their values and features."""
    edges = {}
    for relation, ends in data.edges.items():
        times = data.edge_times.get(relation, np.full(len(ends[0]), -np.inf))
        edges[relation] = [*np.stack([*ends, times])[:, times <= CUTOFF].T.tolist()]
    rows = {
        (table, row): [data.node_times[table][row].item()] if table in data.node_times else []
        for (table, row), time in known.items()
        if time <= CUTOFF
    }
    for table, row in rows:
        for name, column in data.columns[table].items():
            rows[table, row].append((name, _shown(column, row)))
    # A column of which nothing is known yet is of the kind that it has later, and so are its features.
    features = {
        table: values[[row for of, row in rows if of == table]]
        for table, values in data.features.items()
        if all(
            any(shown for of, row in rows if of == table for shown in [_shown(column, row)])
            for column in data.columns[table].values()
            if column.known_at is None
        )
    }
    return {"edges": edges, "rows": rows, "features": features}


def check(seed: int) -> None:
    rng = np.random.default_rng(seed)
    database = random_database(rng)
    other = database.with_another_future(rng)
    known = {row: time for row, time in database.known_from().items() if time <= CUTOFF}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # columns that are half text and half numbers
        before, after = (inputs(from_tables(**one.arguments), known) for one in (database, other))
    assert before["edges"] == after["edges"]
    assert before["rows"] == after["rows"]
    for table, rows in before["features"].items():
        np.testing.assert_array_equal(rows, after["features"][table])
    _check_meaning(database, before)


def _check_meaning(database: Database, found: dict[str, Any]) -> None:
    """Edges lead between rows that are known; events to rows whose late values are."""
    known = database.known_from()
    for (table, column, other), edges in found["edges"].items():
        for row, referred, _ in edges:
            assert known[table, row] <= CUTOFF and known[other, referred] <= CUTOFF
            if "@" in column:
                assert database.tables[table]["told"][int(row)] <= CUTOFF
    for table, column, other in database.references:
        keys = database.tables[table][column]
        visible = [row for row, key in enumerate(keys) if key is not None and known[table, row] <= CUTOFF]
        assert len(visible) == len(found["edges"][table, column, other])


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 1000), marks=pytest.mark.slow)], ids=["some", "a thousand"]
)
def test_nothing_that_is_known_at_a_cutoff_depends_on_what_comes_later(seeds: range) -> None:
    for seed in seeds:
        check(seed)
