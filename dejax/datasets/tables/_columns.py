"""Columns of tables as they are given, in DataFrames, Arrow tables or mappings: as numpy arrays with missing values."""

from __future__ import annotations

import datetime
import decimal
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dejax._optional import is_there, optional
from dejax.datasets.files._work import for_blocks

Columns = dict[str, np.ndarray]
ForeignKey = tuple[str, str, str]
"""(table, column, table that the column refers to)."""

_EXACT_NUMBERS = (int, np.integer, decimal.Decimal)
_NUMBERS = (int, float, np.floating, np.integer, np.bool_, decimal.Decimal)
EXACT = 2**53  # beyond, float64 does not have every integer: keys with missing values stay objects


_NO_NAMES = {"", "Unnamed: 0"}  # of a CSV file's first column, and as pandas reads it


def columns_of(table: str, given: Any) -> Columns:
    """The columns of a table by name. Empty text is missing, as in CSV files; NULs at its end are left out.

    Raises:
        ValueError: no table of a known kind; columns of different lengths; times with and without zones in one column.
        ModuleNotFoundError: a table of Arrow's interchange, without pyarrow.
    """
    names = [str(name) for name in getattr(given, "column_names", getattr(given, "columns", ()))]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the columns of table {table!r} must have different names, got {twice!r} more than once")
    columns = _columns_given(table, given)
    for column in _NO_NAMES & columns.keys():
        warnings.warn(
            f"the column {column!r} of table {table!r} is left out, since it has no name, as an index of "
            "pandas has none; give it a name if it means something",
            stacklevel=3,
        )
        del columns[column]
    found: Columns = {}
    for column, values in columns.items():
        try:
            found[column] = array_of(values)
        except ValueError as error:
            raise ValueError(f"the column {table}.{column}: {error}") from None
    lengths = {column: len(values) for column, values in found.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of table {table!r} must have one length, got {lengths}")
    return found


def _with_plain_text(values: np.ndarray) -> np.ndarray:
    """The column with None in place of empty text, and text without NULs at its end; of the type that the values have.

    Fields of a fixed width are filled up with NULs, and numpy's text cannot end with one: of two texts that differ in
    them, keys and labels could not stay apart.
    """
    if values.dtype.kind != "O":
        return values
    odd = np.array([isinstance(value, str) and (not value.strip() or value[-1] == "\0") for value in values], bool)
    if not odd.any():
        return values
    plain = values.tolist()
    for row in np.flatnonzero(odd).tolist():
        text = plain[row].rstrip("\0")
        plain[row] = text if text.strip() else None
    return objects_of(plain)


def _columns_given(table: str, given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {str(column): values for column, values in given.items()}
    is_frame = hasattr(given, "columns") and hasattr(given, "isna")
    if is_frame and (levels := [name for name in given.index.names if name is not None and name not in given]):
        given = given.reset_index(level=levels)  # a key, often; Arrow has no column for a range
    # A DataFrame of pandas is an Arrow table where pyarrow is there and its columns have one type each.
    if hasattr(given, "__arrow_c_stream__") and not (is_frame and not is_there("pyarrow")):
        with optional("pyarrow", of=f"the table {table!r}, a {type(given).__name__},"):
            import pyarrow as pa
        try:
            rows = pa.table(given)
            return {name: rows.column(name) for name in rows.column_names if not name.startswith("__index_level_")}
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            if not is_frame:
                raise
    if hasattr(given, "columns") and not hasattr(given, "collect"):  # a lazy frame has names, and no values yet
        return {str(column): given[column] for column in given.columns}
    raise ValueError(
        "tables must be mappings of columns, pandas DataFrames, or tables of Arrow's interchange (polars, DuckDB, "
        f"Arrow), got {type(given).__name__} for the table {table!r}; "
        + ("collect it with .collect()" if hasattr(given, "collect") else "convert it to a dict of columns")
    )


def array_of(values: Any) -> np.ndarray:
    """A column as numbers, booleans, times, rows of numbers, or objects with None where missing or empty text."""
    return _with_plain_text(_array_of(values))


def _array_of(values: Any) -> np.ndarray:
    if hasattr(values, "combine_chunks"):
        return _of_arrow(values)
    if not hasattr(values, "isna") and (hasattr(values, "__arrow_c_array__") or hasattr(values, "__arrow_c_stream__")):
        with optional("pyarrow", of=f"a column that is a {type(values).__name__}"):
            import pyarrow as pa
        return _of_arrow(pa.chunked_array(values if hasattr(values, "__arrow_c_stream__") else [pa.array(values)]))
    if hasattr(values, "isna"):
        missing = np.asarray(values.isna())
        values = np.asarray(values.to_numpy())
        if missing.any() and values.dtype == object:
            values = values.copy()
            values[missing] = None
    array = values if isinstance(values, np.ndarray) else objects_of(list(values))
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.dtype.kind not in "biuf"):
        raise ValueError(
            f"a column must have one value, or one vector of numbers, in each row, got shape {list(array.shape)}"
        )
    return objects_of(list(array)) if array.dtype.kind in "OUS" else array


def _of_arrow(column: Any) -> np.ndarray:
    """A chunked array of pyarrow."""
    import pyarrow as pa

    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        column = column.combine_chunks().dictionary_encode()
        column = column.combine_chunks() if hasattr(column, "combine_chunks") else column
        names = np.array([*column.dictionary.to_pylist(), None], object)  # equal text is one object
        return names[column.indices.fill_null(len(names) - 1).to_numpy(zero_copy_only=False)]
    if _is_list(kind) and types.is_floating(kind.value_type) and (rows := _rows_of_floats(column)) is not None:
        return rows
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        if not column.null_count:
            return column.to_numpy()
        if types.is_floating(kind) or types.is_boolean(kind) or kind.bit_width < 64:
            return column.cast(pa.float64()).to_numpy()
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_duration(kind):
        return column.to_numpy()  # of zones the times are in UTC
    return objects_of(column.to_pylist())


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _rows_of_floats(column: Any) -> np.ndarray | None:
    """Lists of floats of one length as float[rows, length], NaN where a list is missing; None if lengths differ."""
    import pyarrow.compute as pc

    lengths = pc.min_max(pc.list_value_length(column)).as_py()
    width = lengths["max"]
    if not width or lengths["min"] != width:
        return None
    found = np.full((len(column), width), np.nan, column.type.value_type.to_pandas_dtype())
    row = 0
    for chunk in column.chunks:  # chunk by chunk, so that there is no second copy of all
        there = chunk.is_valid().to_numpy(zero_copy_only=False)
        values = chunk.drop_null().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
        found[row : row + len(chunk)][there] = values
        row += len(chunk)
    return found


def objects_of(values: list[Any]) -> np.ndarray:
    """Values of Python as numbers, booleans or times where all of them are, else as objects."""
    known = [value for value in values if not _is_missing(value)]
    kinds = {type(value) for value in known}
    if known and all(issubclass(kind, bool | np.bool_) for kind in kinds) and len(known) == len(values):
        return np.array(values, bool)
    whole = known and all(issubclass(kind, int | np.integer) for kind in kinds)
    if whole and len(known) == len(values) and -(2**63) <= min(known) and max(known) < 2**63:
        return np.array(values, np.int64)
    wide = known and all(issubclass(kind, _EXACT_NUMBERS) for kind in kinds) and max(map(abs, known)) > EXACT
    if known and not wide and all(issubclass(kind, _NUMBERS) for kind in kinds):
        return np.array([np.nan if _is_missing(value) else value for value in values], np.float64)
    if known and all(issubclass(kind, datetime.timedelta | np.timedelta64) for kind in kinds):
        return np.array(["NaT" if _is_missing(value) else value for value in values], "timedelta64[us]")
    if known and all(issubclass(kind, datetime.date | np.datetime64) for kind in kinds):
        check_zones(known)
        return np.array([np.datetime64("NaT", "us") if _is_missing(value) else moment_of(value) for value in values])
    if known and all(issubclass(kind, np.ndarray | list | tuple) for kind in kinds) and len(known) == len(values):
        widths = {len(row) for row in known}
        if len(widths) == 1 and widths != {0} and all(isinstance(n, float | np.floating) for n in known[0]):
            return np.array(known)
    array = np.empty(len(values), object)
    for row, value in enumerate(values):
        array[row] = None if _is_missing(value) else value
    return array


def as_numbers(values: np.ndarray) -> np.ndarray:
    """A column of objects as float64 if it has only integers, which `objects_of` kept exact for keys."""
    known = [value for value in values if value is not None] if values.dtype.kind == "O" else []
    if known and all(isinstance(value, _EXACT_NUMBERS) for value in known):
        return np.array([np.nan if value is None else float_of(value) for value in values], np.float64)
    return values


def float_of(value: Any) -> float:
    """A number as a float: infinity where it is beyond the range of floats, as of text such as "1e400"."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_missing(value: Any) -> bool:
    floats = float | np.floating | np.datetime64 | np.timedelta64 | datetime.datetime | decimal.Decimal
    return value is None or (isinstance(value, floats) and bool(value != value))


def moment_of(value: Any) -> np.datetime64:
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    return np.datetime64(value, "us")


def check_zones(times: Sequence[Any]) -> None:
    """Raises if some times have a zone and others have none: then they cannot be compared.

    Raises:
        ValueError: such times.
    """
    moments = [time for time in times if isinstance(time, datetime.datetime)]
    without = next((time for time in moments if time.tzinfo is None), None)
    within = next((time for time in moments if time.tzinfo is not None), None)
    if without is not None and within is not None:
        raise ValueError(
            f"times must all have a zone or none of them, got {within.isoformat()!r} and {without.isoformat()!r}; give "
            "all of them a zone, or convert all to UTC"
        )


def missing_in(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind in "mM":
        return np.isnat(values)
    if values.dtype.kind == "O":
        return np.array([value is None for value in values], bool)
    if values.dtype.kind != "f":
        return np.zeros(len(values), bool)
    if values.ndim == 1:
        return np.isnan(values)
    return np.concatenate([np.zeros(0, bool), *of_parts(lambda part, _: np.isnan(part).any(axis=1), values)])


def of_parts(work: Callable[[np.ndarray, int], Any], values: np.ndarray) -> list[Any]:
    """The results of `work(part, first row)` for parts of an array's or memory map's rows, on all cores.

    A part has some megabytes, so that what is computed of it is small.
    """
    rows = max(1, (1 << 22) // max(1, values[:1].size))
    found: list[Any] = [None] * -(-len(values) // rows)

    def of_part(number: int, start: int, stop: int) -> None:
        found[number] = work(np.asarray(values[start:stop]), start)

    for_blocks(of_part, len(values), rows, progress=False)
    return found


def texts_of(values: np.ndarray) -> list[str | None]:
    """Each value as text, None where missing; whole numbers without a point."""
    missing = missing_in(values)
    known = values[~missing]
    is_whole = values.dtype.kind == "f" and values.ndim == 1
    if is_whole and ((known == np.rint(known)) & (np.abs(known) < 2.0**63)).all():
        whole = np.where(missing, 0, values).astype(np.int64).tolist()
        return [None if gone else str(value) for value, gone in zip(whole, missing.tolist(), strict=True)]
    items = values.tolist() if values.dtype.kind not in "mM" else values.astype(str).tolist()
    return [None if gone else text_of(value) for value, gone in zip(items, missing.tolist(), strict=True)]


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else value.hex() if isinstance(value, bytes) else str(value)
