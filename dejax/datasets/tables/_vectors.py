"""Vectors for rows: precomputed ones, or those that a function makes of a column's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dejax._optional import optional
from dejax.datasets.tables._columns import Columns, texts_of

TextEncoder = Callable[[list[str]], Any]


def with_vectors(columns: Mapping[str, Columns], vectors: Mapping[str, Mapping[str, Any]]) -> dict[str, Columns]:
    """Tables with columns of vectors, in place of those with the same names.

    Args:
        columns: the columns, by table.
        vectors: table -> column -> float[rows, width], or a function of the texts of that column.

    Raises:
        ValueError: a table or a column of text that does not exist; vectors of another number of rows, or no numbers.
    """
    made = {table: dict(found) for table, found in columns.items()}
    for table, given in vectors.items():
        if table not in columns:
            raise ValueError(f"vectors must name tables, {', '.join(map(repr, columns))}; got {table!r}")
        rows = len(next(iter(columns[table].values()), ()))
        for column, of in given.items():
            name = f"the vectors {table}.{column}"
            if not callable(of):
                made[table][column] = _checked(name, of, rows)
            elif column in columns[table]:
                made[table][column] = _of_texts(name, columns[table][column], of)
            else:
                raise ValueError(
                    f"{name} must name a column of text of {table!r}, one of {', '.join(columns[table])}; got "
                    f"{column!r}"
                )
    return made


def _of_texts(name: str, values: np.ndarray, function: TextEncoder) -> np.ndarray:
    """float[rows, width], by a function that is called once with the different texts; NaN where text is missing."""
    texts = texts_of(values)
    place: dict[str, int] = {}
    rows = np.array([-1 if text is None else place.setdefault(text, len(place)) for text in texts], np.int64)
    found = _checked(name, function(list(place)), len(place))
    missing = np.full((1, found.shape[1]), np.nan, found.dtype)
    return np.concatenate([found, missing])[rows]


def _checked(name: str, given: Any, rows: int) -> np.ndarray:
    found = given if isinstance(given, np.ndarray) else np.asarray(given)
    found = found.astype(np.float32) if found.dtype.kind in "iub" else found
    if found.ndim != 2 or len(found) != rows or found.dtype.kind not in "fV":  # bfloat16 is of the kind V
        raise ValueError(
            f"{name} must be numbers [{rows}, width], a vector for each row or different text, got shape "
            f"{list(found.shape)} of {found.dtype}"
        )
    return found if found.dtype.kind == "f" else found.astype(np.float32)


def sentence_vectors(model: str = "all-MiniLM-L6-v2", **options: Any) -> TextEncoder:
    """Makes a function that converts texts to vectors by a model of sentence-transformers, for `vectors` of
    `from_tables`.

    Args:
        model: name of the model, or its folder.
        options: keyword arguments of the model's method `encode`, such as `batch_size`.

    Raises:
        ModuleNotFoundError: sentence-transformers is not installed.

    >>> from dejax.datasets import from_tables, sentence_vectors
    >>> data = from_tables("shop", vectors={"reviews": {"text": sentence_vectors()}})  # doctest: +SKIP
    """
    with optional("sentence-transformers", of="sentence_vectors()"):
        from sentence_transformers import SentenceTransformer
    encoder = SentenceTransformer(model)

    def encode(texts: list[str]) -> np.ndarray:
        return np.asarray(encoder.encode(texts, convert_to_numpy=True, **options), np.float32)

    return encode
