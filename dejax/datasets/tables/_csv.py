"""Tables in CSV files, which say of no column whether it has numbers, times or names."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dejax._optional import optional

SUFFIXES = (".csv", ".csv.gz", ".csv.zip")
_INTEGER = r"^\s*(0|-?[1-9]\d*)\s*$"
_CODE = r"^\s*[+-]?(0[\dxX]|\d{16,}\s*$)"
"""What is read as a number elsewhere, but not written as one: 007, 0x1F, and more digits than float64 has."""

Place = tuple[str, str]
"""(table, column)."""


def read_csv(path: str | os.PathLike[str], *, text: Collection[str] = ()) -> Any:
    r"""Reads a CSV file as a `pyarrow.Table`.

    Empty fields, "NA", "N/A", "NULL", "NaN" and similar are missing values. A column of numbers that are written as
    codes are, such as 007, 0x1F or 20 digits, stays text.

    Args:
        path: path of a `.csv`, `.csv.gz` or `.csv.zip` file; a `.zip` must hold one file.
        text: the names of columns to read as text as it stands, of which only empty fields are missing.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no CSV file with commas between its columns; or it has no column of a name in `text`.
        ModuleNotFoundError: pyarrow is not installed.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "planes.csv")
    ...     _ = path.write_text("plane,seats,hangar\nN1,55,007\nN2,NA,012\n")
    ...     read_csv(path).to_pydict()
    {'plane': ['N1', 'N2'], 'seats': [55, None], 'hangar': ['007', '012']}
    """
    with optional("pyarrow", of=f"reading {os.fspath(path)}"):
        import pyarrow as pa
    table = _read(Path(path))
    if table.num_columns == 1 and any(sign in table.column_names[0] for sign in ";\t|"):
        raise ValueError(
            f"{path} must have commas between its columns, got the header {table.column_names[0]!r}; write the file "
            "with commas, or read it with pandas.read_csv(path, sep=...)"
        )
    for name in text:
        if name not in table.column_names:
            there = ", ".join(table.column_names)
            raise ValueError(f"{path} must have the columns that are read as text, {there} are there; got {name!r}")
    found = {field.name: _decoded(table.column(n)) for n, field in enumerate(table.schema) if _is_bytes(field.type)}
    kinds = {field.name: field.type for field in table.schema if field.name not in text}
    numbers = [name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind)]
    for name, values in _texts(Path(path), table, numbers).items():
        values = _without(values, _null_words())
        if _matches(values, _CODE) or (pa.types.is_integer(kinds[name]) and not _matches(values, _INTEGER, all_=True)):
            found[name] = values
    return _with_columns(table, found | _texts(Path(path), table, text))


def with_keys_as_text(
    tables: Mapping[str, Any],
    paths: Mapping[str, Path],
    primary_keys: Mapping[str, str | Sequence[str]],
    foreign_keys: Sequence[Sequence[Any]],
) -> dict[str, Any]:
    """The tables with the text of their files in columns of keys, so that a key stays what it is written as.

    A primary key of integers has none of that text, and neither have the foreign keys that refer to it: 7.0 is 7 then.
    Words for missing values, such as NA, are names in a column of keys where the primary key has them.

    Args:
        tables: `pyarrow.Table` by name.
        paths: the CSV files among their files.
        primary_keys, foreign_keys: as in `from_tables`; names that no table has are ignored here.
    """
    import pyarrow as pa

    there = {
        (name, column)
        for name, table in tables.items()
        for column in table.column_names
        if table.column_names.count(column) == 1  # of others `from_tables` raises
    }
    names: dict[Place, set[str]] = {}  # of the columns of keys that are text: the words for missing values among them
    for table, key in primary_keys.items():
        places = [(table, column) for column in _parts(key) if (table, column) in there]
        of_text = [name for _, name in places if not pa.types.is_integer(tables[table][name].type)]
        if table in paths:
            read = _texts(paths[table], tables[table], of_text)
            names |= {(table, name): _null_words().intersection(values.to_pylist()) for name, values in read.items()}
        else:
            names |= {(table, name): set() for name in of_text if _is_text(tables[table][name].type)}
    references = [
        ((table, own), (other, key))
        for table, columns, other in foreign_keys
        for own, key in zip(_parts(columns), _parts(primary_keys.get(other, ())), strict=False)
        if (table, own) in there
    ]
    for _ in references:  # a primary key may refer to another one
        for own, key in references:
            if key in names:
                names[own] = names.get(own, set()) | names[key]
    made = dict(tables)
    for table, path in paths.items():
        read = _texts(path, made[table], [column for of, column in names if of == table])
        read = {name: _without(values, _null_words() - names[table, name]) for name, values in read.items()}
        made[table] = _with_columns(made[table], read)
    return made


def _parts(key: str | Sequence[str]) -> list[str]:
    return [key] if isinstance(key, str) else list(key)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind))


def _null_words() -> set[str]:
    """What stands for a missing value, besides an empty field."""
    import pyarrow.csv as csv

    return {*csv.ConvertOptions().null_values} - {""}


def _without(values: Any, words: Collection[str]) -> Any:
    """Text without some words."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.if_else(
        pc.is_in(values, value_set=pa.array(sorted(words), pa.string())), pa.scalar(None, pa.string()), values
    )


def _matches(values: Any, pattern: str, *, all_: bool = False) -> bool:
    """Whether some text matches a pattern, or all; missing values do not count."""
    import pyarrow.compute as pc

    found = pc.match_substring_regex(values, pattern)
    return bool((pc.all if all_ else pc.any)(found, min_count=0).as_py())


def _with_columns(table: Any, columns: Mapping[str, Any]) -> Any:
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, values)
    return table


def _texts(path: Path, table: Any, columns: Collection[str]) -> dict[str, Any]:
    """The text of some columns of a file that was read as `table`, by name. Only empty fields are missing."""
    import pyarrow as pa

    once = [name for name in columns if table.column_names.count(name) == 1]
    if not once:
        return {}
    more = {"include_columns": once, "column_types": dict.fromkeys(once, pa.binary()), "null_values": [""]}
    found = _read(path, **more)
    return {name: _decoded(found[name]) for name in once}


def _decoded(values: Any) -> Any:
    """Bytes as text; those that are no UTF-8 as `read_sqlite` reads them."""
    import pyarrow as pa

    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if value is None else value.decode("utf-8", "backslashreplace") for value in values.to_pylist()]
        return pa.chunked_array([pa.array(texts, pa.string())])


def _read(path: Path, **convert: Any) -> Any:
    import pyarrow as pa
    import pyarrow.csv as csv

    # Without `newlines_in_values`, pyarrow cuts files of more than a megabyte inside of quoted text that has newlines.
    options = {
        "parse_options": csv.ParseOptions(newlines_in_values=True),
        "convert_options": csv.ConvertOptions(strings_can_be_null=True, **convert),
    }
    try:
        with _opened(path) as file:
            return csv.read_csv(file, **options)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} must be a CSV file, got an error: {error}; mend the file, or move it away") from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """What `pyarrow.csv` reads: the path, which says how it is compressed, or the one file in a .zip."""
    if path.suffix != ".zip":
        yield path
        return
    with zipfile.ZipFile(path) as archive:
        inside = [name for name in archive.namelist() if name.endswith(".csv")]
        if len(inside) != 1:
            raise ValueError(
                f"{path} must have one CSV file inside, got {len(inside)}; unpack it into a folder of files"
            )
        with archive.open(inside[0]) as file:
            yield file
